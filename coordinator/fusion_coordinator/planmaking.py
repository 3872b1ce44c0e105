"""Makes plans of jobs, with the graphs that it reads from the blob store. Blocks for as long as it takes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion.base.ids import NodeId
from fusion.graph.dag import Graph
from fusion.plan.codecs import plan_at
from fusion.plan.equal_compute import plan as by_equal_compute
from fusion.plan.inforce import in_force, problem_of, with_flights
from fusion.plan.phases import compressed, stretches, with_codecs
from fusion.plan.planner import Options, make_plan
from fusion.plan.replicas import with_replicas
from fusion.plan.types import Cluster, ClusterNode, JobView, Plan
from fusion.plan.workload import Workload, workload_of
from fusion.protocol.job import BlobRef, JobSpec, job_view
from fusion_coordinator.admission import load_graph
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.decide.recoding import SLOWER, Choices
from fusion_coordinator.decide.replanning import slowness, with_usual

_GRAPHS_KEPT = 4
BUDGET_S = 5.0  #: after that the best plan found so far is taken


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan for the cluster as it was measured, beside the one in force."""

    plan: Plan
    present_s: float  #: time of a step under the plan in force
    best_s: float
    slowness: Mapping[NodeId, float]  #: of the nodes that were measured: real time over what their stated speed says


class PlanMaker:
    """Runs the planner, and keeps the last graphs that it read."""

    def __init__(self, files: BlobFiles) -> None:
        self._files = files
        self._graphs: OrderedDict[str, tuple[Graph, Workload]] = OrderedDict()

    def divide(self, cluster: Cluster, spec: JobSpec, cuts: Sequence[int]) -> Plan:
        """Return a plan on these nodes in their order, cut at `cuts`, or evenly if there are none."""
        view = replace(job_view(spec), cuts=tuple(cuts), max_stages=0)
        return _divided(cluster, *self._graph(spec.graph), view)

    def plan(self, cluster: Cluster, spec: JobSpec) -> Plan:
        """Return a plan with epoch 1; PlanError if none fits, ConfigError if none ever could.

        Without any measured link the nodes' speed and memory are all that there is to plan by.
        """
        (graph, workload), view = self._graph(spec.graph), job_view(spec)
        blind = spec.planner == "fusion" and (len(cluster.nodes) == 1 or not measured(cluster))
        if blind or spec.planner == "equal-compute":
            return _divided(cluster, graph, workload, view)
        return _planned(cluster, graph, view, spec.planner)

    def compare(
        self,
        cluster: Cluster,
        spec: JobSpec,
        present: Plan,
        compute_s: Sequence[float],
        earlier: Mapping[NodeId, float],
        step: int = 0,
    ) -> Alternative:
        """Return the best plan now that a job was seen to run.

        compute_s: by stage of the plan in force, how long it computed in a step. earlier: slowness of nodes that ran
        the job before. step: the last one done.

        PlanError if no plan fits, or a node of the plan in force is not in `cluster`.
        """
        graph, workload = self._graph(spec.graph)
        view, present = job_view(spec), plan_at(present, step + 1)
        known, real = _as_seen(cluster, present, workload, view, compute_s, earlier)
        best = _planned(real, graph, view, "fusion")
        present_s = in_force(present, real, workload, view).step_s
        return Alternative(best, present_s, in_force(best, real, workload, view).step_s, known)

    def recode(
        self,
        cluster: Cluster,
        spec: JobSpec,
        present: Plan,
        compute_s: Sequence[float],
        earlier: Mapping[NodeId, float],
        step: int,
    ) -> Choices | None:
        """Return which codecs the links of a running job should have after `step`; None if the job does not leave that
        to us then. Arguments and errors as `compare`.
        """
        view, present = replace(job_view(spec), first_step=step + 1), plan_at(present, step + 1)
        compression = stretches(view)[0].compression
        if compression.kind != "auto" or len(present.stages) < 2:
            return None
        _, workload = self._graph(spec.graph)
        _, real = _as_seen(cluster, present, workload, view, compute_s, earlier)
        problem, found = problem_of(present, real, workload, view)
        used = [(int(a), int(b)) for a, b in np.argwhere(problem.evaluate(found).raw_bytes > 0)]
        least = compressed(problem, found, compression)
        doubtful = replace(real, links=real.links.scaled(SLOWER))
        most = compressed(problem_of(present, doubtful, workload, view)[0], found, compression)
        links = {(stage, other): real.links.between(*_pair(real, present, stage, other)) for stage, other in used}
        return Choices(
            {link: found.codec(*link) for link in used},
            {link: least.codec(*link) for link in used},
            {link: most.codec(*link) for link in used},
            {link: item.rate_bytes_per_s for link, item in links.items() if item is not None},
            problem.step_s(found),
            problem.step_s(least),
        )

    def _graph(self, blob: BlobRef) -> tuple[Graph, Workload]:
        found = self._graphs.pop(blob.digest, None)
        if found is None:
            graph = load_graph(blob, self._files)
            found = (graph, workload_of(graph))
        self._graphs[blob.digest] = found
        while len(self._graphs) > _GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return found


def _planned(cluster: Cluster, graph: Graph, job: JobView, method: str) -> Plan:
    plan = make_plan(cluster, graph, job, Options(method, budget_s=BUDGET_S, clock_s=time.monotonic)).plan
    return with_replicas(plan, cluster)


def _divided(cluster: Cluster, graph: Graph, workload: Workload, job: JobView) -> Plan:
    plan = with_codecs(by_equal_compute(cluster, graph, job), cluster, workload, job)
    return with_replicas(with_flights(plan, cluster, graph, workload, job), cluster)


def measured(cluster: Cluster) -> bool:
    """Whether any link of the cluster was measured."""
    links = cluster.links
    return bool(links.sites or any(link is not None for link in links.pairs.values()))


def _as_seen(
    cluster: Cluster,
    present: Plan,
    workload: Workload,
    view: JobView,
    compute_s: Sequence[float],
    earlier: Mapping[NodeId, float],
) -> tuple[dict[NodeId, float], Cluster]:
    """Return how slow nodes are by what a job's stages took, and the cluster with those speeds."""
    nodes = [stage.node for stage in present.stages]
    expected = in_force(present, cluster, workload, view)
    known = {**earlier, **slowness(nodes, expected.compute_s, compute_s, view.micro_batches)}
    return known, slowed(cluster, with_usual(known, [node.node for node in cluster.nodes]))


def _pair(cluster: Cluster, plan: Plan, source: int, target: int) -> tuple[ClusterNode, ClusterNode]:
    by_id = {node.node: node for node in cluster.nodes}
    return by_id[plan.stages[source].node], by_id[plan.stages[target].node]


def slowed(cluster: Cluster, slow: Mapping[NodeId, float]) -> Cluster:
    """Return the cluster with each node's speed, of computing and of moving bytes, divided by its slowness."""
    nodes = tuple(
        replace(node, flops=node.flops / slow[node.node], bytes_per_s=node.bytes_per_s / slow[node.node])
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)
