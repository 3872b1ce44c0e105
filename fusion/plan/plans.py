"""From an arrangement of stages on nodes to the plan that nodes get."""

from __future__ import annotations

import numpy as np

from fusion.base.ids import Epoch, StageIndex
from fusion.plan.codecs import NONE
from fusion.plan.cost import Arrangement, Evaluation, Problem
from fusion.plan.types import Plan, PlannedLink, PlannedStage


def plan_of(problem: Problem, found: Arrangement, evaluation: Evaluation) -> Plan:
    """Return the plan (epoch 1) of an arrangement, with the step time of its evaluation."""
    job = problem.job
    stages = tuple(_stage(problem, found, evaluation, stage) for stage in range(len(found.nodes)))
    links = []
    for source, target in np.argwhere(evaluation.raw_bytes + evaluation.tied_bytes > 0).tolist():
        codec = found.codec(source, target) if evaluation.raw_bytes[source, target] > 0 else NONE
        count = evaluation.raw_bytes[source, target] * job.micro_batches + evaluation.tied_bytes[source, target]
        seconds = float(evaluation.link_s[source, target])
        links.append(PlannedLink(StageIndex(source), StageIndex(target), codec.name, int(count), codec.ratio, seconds))
    return Plan(Epoch(1), stages, tuple(links), job.schedule, job.micro_batches, evaluation.step_s)


def _stage(problem: Problem, found: Arrangement, evaluation: Evaluation, stage: int) -> PlannedStage:
    node = problem.network.cluster.nodes[found.nodes[stage]]
    first, end = (int(problem.profile.positions[place]) for place in found.places[stage : stage + 2])
    return PlannedStage(
        node.node,
        node.name,
        node.address,
        node.incarnation,
        first,
        end,
        _parameters(problem, first, end),
        int(evaluation.memory_bytes[stage]),
        float(evaluation.forward_s[stage]),
        float(evaluation.backward_s[stage]),
        node.memory_bytes,
        evaluation.in_flight[stage],
        recompute=evaluation.recompute[stage],
    )


def _parameters(problem: Problem, first: int, end: int) -> int:
    held = problem.profile.workload.held
    return sum(
        item.elements for item in held if item.parameter and any(first <= reader < end for reader in item.readers)
    )
