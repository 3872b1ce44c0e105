"""What a plan that is in force costs on the cluster as it is now, by the same model that new plans are made by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from fusion.base.errors import PlanError
from fusion.graph.dag import Graph
from fusion.graph.partition import partition
from fusion.plan.codecs import NONE, link_codec
from fusion.plan.cost import Arrangement, Evaluation, Problem
from fusion.plan.finals import simulated_s
from fusion.plan.need import in_flight, stage_bytes
from fusion.plan.network import network_of
from fusion.plan.profile import profile_of
from fusion.plan.types import Cluster, JobView, Plan, PlannedStage
from fusion.plan.workload import Workload


@dataclass(frozen=True)
class InForce:
    """The cost of a plan that exists."""

    evaluation: Evaluation
    micro_batches: int
    simulated_s: float  #: inf where the model says that the memory does not suffice

    @property
    def step_s(self) -> float:
        """Time of a step, also where the model says that the memory does not suffice: the plan runs, so it does."""
        if self.simulated_s < inf:
            return self.simulated_s
        found = self.evaluation
        return float(found.fill_s + (self.micro_batches - 1) * found.period_s + found.tied_s)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """By stage: time that it computes in a step."""
        both = self.evaluation.forward_s + self.evaluation.backward_s
        return tuple(float(seconds) * self.micro_batches for seconds in both)


def in_force(plan: Plan, cluster: Cluster, workload: Workload, job: JobView) -> InForce:
    """Return what `plan` costs on `cluster`; PlanError if one of its nodes is not there any more."""
    problem, found = problem_of(plan, cluster, workload, job)
    return InForce(problem.evaluate(found), plan.micro_batches, simulated_s(problem, found))


def problem_of(plan: Plan, cluster: Cluster, workload: Workload, job: JobView) -> tuple[Problem, Arrangement]:
    """Return a plan as an arrangement of its own cuts; PlanError if one of its nodes is not in `cluster`."""
    place = {node.node: index for index, node in enumerate(cluster.nodes)}
    missing = [stage.node_name for stage in plan.stages if stage.node not in place]
    if missing:
        raise PlanError(f"node {missing[0]} of the plan in force is not in the cluster")
    cuts = [stage.first_operator for stage in plan.stages[1:]]
    profile = profile_of(workload, job.optimizer_bytes_per_parameter, cuts=cuts)
    places = tuple(range(len(plan.stages) + 1)) if cuts else (0, profile.blocks)
    codecs = [NONE]
    choice = np.zeros((len(plan.stages), len(plan.stages)), dtype=np.int64)
    for link in plan.links:
        choice[link.source, link.target] = len(codecs)
        codecs.append(link_codec(link.codec, link.source, link.target))
    nodes = tuple(place[stage.node] for stage in plan.stages)
    recompute = tuple(stage.recompute for stage in plan.stages)
    return Problem(profile, network_of(cluster), job), Arrangement(nodes, places, tuple(codecs), choice, recompute)


def with_flights(plan: Plan, cluster: Cluster, graph: Graph, workload: Workload, job: JobView) -> Plan:
    """Return a plan that was made without a look at the links, with estimates and enough micro-batches in flight.

    Never fewer than the schedule's name says, and no more than the nodes' memory and the links' times ask for.
    """
    problem, found = problem_of(plan, cluster, workload, job)
    needed = any(stage.recompute for stage in plan.stages)  # it fits no other way
    evaluation = problem.evaluate(found if needed else replace(found, recompute=None))
    parts = partition(graph, [stage.first_operator for stage in plan.stages[1:]])
    count, limits = len(plan.stages), {node.node: node.memory_bytes for node in cluster.nodes}
    stages: list[PlannedStage] = []
    for index, stage in enumerate(plan.stages):
        least = in_flight(job, index, count)
        flights = max(least, evaluation.in_flight[index])
        if stages:  # a stage that holds more than the one before it only waits for it
            flights = min(flights, stages[-1].in_flight)
        again = evaluation.recompute[index]
        while flights > least and stage_bytes(parts, index, job, flights, recompute=again) > limits[stage.node]:
            flights -= 1
        stages.append(
            replace(
                stage,
                in_flight=flights,
                memory_bytes=stage_bytes(parts, index, job, flights, recompute=again),
                memory_limit_bytes=limits[stage.node],
                forward_s=float(evaluation.forward_s[index]),
                backward_s=float(evaluation.backward_s[index]),
                recompute=again,
            )
        )
    return replace(plan, stages=tuple(stages))
