"""What a plan that is in force costs on the cluster as it is now, by the same model that new plans are made by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusion.base.errors import PlanError
from fusion.plan.codecs import LADDER, PlanCodec, topk
from fusion.plan.cost import Arrangement, Evaluation, Problem
from fusion.plan.network import network_of
from fusion.plan.profile import profile_of
from fusion.plan.types import Cluster, JobView, Plan, PlannedLink
from fusion.plan.workload import Workload


@dataclass(frozen=True)
class InForce:
    """The cost of a plan that exists."""

    evaluation: Evaluation
    micro_batches: int

    @property
    def step_s(self) -> float:
        """Time of a step, also where the model says that the memory does not suffice: the plan runs, so it does."""
        found = self.evaluation
        return float(found.fill_s + (self.micro_batches - 1) * found.period_s + found.tied_s)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """By stage: time that it computes in a step."""
        both = self.evaluation.forward_s + self.evaluation.backward_s
        return tuple(float(seconds) * self.micro_batches for seconds in both)


def in_force(plan: Plan, cluster: Cluster, workload: Workload, job: JobView) -> InForce:
    """Return what `plan` costs on `cluster`; PlanError if one of its nodes is not there any more."""
    place = {node.node: index for index, node in enumerate(cluster.nodes)}
    missing = [stage.node_name for stage in plan.stages if stage.node not in place]
    if missing:
        raise PlanError(f"node {missing[0]} of the plan in force is not in the cluster")
    cuts = [stage.first_operator for stage in plan.stages[1:]]
    profile = profile_of(workload, job.optimizer_bytes_per_parameter, cuts=cuts)
    places = tuple(range(len(plan.stages) + 1)) if cuts else (0, profile.blocks)
    codecs = list(dict.fromkeys(_codec(link) for link in plan.links)) or [LADDER[0]]
    choice = np.zeros((len(plan.stages), len(plan.stages)), dtype=np.int64)
    for link in plan.links:
        choice[link.source, link.target] = codecs.index(_codec(link))
    nodes = tuple(place[stage.node] for stage in plan.stages)
    problem = Problem(profile, network_of(cluster), job)
    return InForce(problem.evaluate(Arrangement(nodes, places, tuple(codecs), choice)), plan.micro_batches)


def _codec(link: PlannedLink) -> PlanCodec:
    """Return what is known of the speed of a link's codec."""
    known = {codec.name: codec for codec in LADDER}
    return known[link.codec] if link.codec in known else topk(link.ratio)
