"""A plan on its cluster, run through the simulator: what planners and `fusion simulate` check their estimates by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from fusion.base.errors import PlanError
from fusion.plan.codecs import link_codec
from fusion.plan.schedule import StageSchedule, alternating, make_schedule
from fusion.plan.simulation import EdgeLoad, Pipeline, SharedLoad, Simulation, StageLoad, Wire
from fusion.plan.simulator import simulate
from fusion.plan.timing import BYTES_PER_FLOP
from fusion.plan.types import Cluster, ClusterNode, Plan, PlannedLink, PlannedStage, site_of
from fusion.plan.workload import HeldLoad, Workload

#: Moved by the optimizer for a parameter, beside its state that is read and written: the weight read and written, the
#: gradient read. All are fp32.
_UPDATE_BYTES = 12


def simulate_plan(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    *,
    steps: int = 1,
    optimizer_bytes_per_parameter: int = 8,
    window_bytes: float = inf,
    record: bool = True,
) -> Simulation:
    """Run `steps` steps of a plan for this workload on these nodes and links.

    Seconds of the stages are the plan's; bytes and their destinations are the workload's, divided by the ratio of
    each planned link; `window_bytes` is the credit of every link. Raises PlanError where two stages that exchange
    messages have no link, and ConfigError for a schedule or window with which the pipeline stands still.
    """
    made = pipeline_of(plan, workload, cluster, optimizer_bytes_per_parameter, window_bytes)
    return simulate(made, steps=steps, record=record)


def pipeline_of(
    plan: Plan, workload: Workload, cluster: Cluster, optimizer_bytes_per_parameter: int = 8, window_bytes: float = inf
) -> Pipeline:
    """Return the pipeline that a plan makes of a workload; see `simulate_plan`."""
    nodes = _nodes(plan, cluster)
    ends = [stage.end_operator for stage in plan.stages]
    shared = _shared(workload.held, ends)
    tensors = _tensors(workload.held, ends)
    stages = [
        StageLoad(
            planned.node_name,
            planned.forward_s,
            planned.backward_s,
            _update_s(planned, node, optimizer_bytes_per_parameter),
            tensors[index],
        )
        for index, (planned, node) in enumerate(zip(plan.stages, nodes, strict=True))
    ]
    edges = _edges(plan, workload, ends)
    pipes = _Pipes(cluster)
    wires = [
        _wire(source, target, nodes, cluster, pipes, window_bytes)
        for source, target in sorted(_pairs(edges, shared, len(stages)))
    ]
    return Pipeline(stages, edges, wires, schedules_of(plan), shared, pipes.rates)


def schedules_of(plan: Plan) -> tuple[StageSchedule, ...]:
    """Return every stage's schedule: by the plan's numbers in flight where it has them, else by its name."""
    named = make_schedule(plan.schedule, len(plan.stages), plan.micro_batches)
    return tuple(
        alternating(stage.in_flight, plan.micro_batches) if stage.in_flight else schedule
        for stage, schedule in zip(plan.stages, named, strict=True)
    )


class _Pipes:
    """The shared pipes of a cluster: for every site with an uplink one outwards and one inwards."""

    def __init__(self, cluster: Cluster) -> None:
        self.rates: list[float] = []
        self._out: dict[str, int] = {}
        self._in: dict[str, int] = {}
        for site, uplink in sorted(cluster.links.uplinks.items()):
            self._out[site], self._in[site] = len(self.rates), len(self.rates) + 1
            self.rates += [uplink.out_bytes_per_s, uplink.in_bytes_per_s]

    def between(self, source: ClusterNode, target: ClusterNode) -> tuple[int, ...]:
        """Return those that the link from one node to another goes through."""
        leaving, entering = site_of(source), site_of(target)
        if leaving == entering:
            return ()
        found = (self._out.get(leaving), self._in.get(entering))
        return tuple(pipe for pipe in found if pipe is not None)


def _nodes(plan: Plan, cluster: Cluster) -> list[ClusterNode]:
    known = {node.node: node for node in cluster.nodes}
    for stage in plan.stages:
        if stage.node not in known:
            raise PlanError(f"the plan has node {stage.node_name}, which is not in the cluster")
    return [known[stage.node] for stage in plan.stages]


def _update_s(planned: PlannedStage, node: ClusterNode, state_bytes: int) -> float:
    """Return the seconds of the optimizer, which memory limits."""
    speed = node.bytes_per_s or node.flops * BYTES_PER_FLOP
    return planned.parameters * (_UPDATE_BYTES + 2 * state_bytes) / speed


def _edges(plan: Plan, workload: Workload, ends: Sequence[int]) -> list[EdgeLoad]:
    links: dict[tuple[int, int], PlannedLink] = {(link.source, link.target): link for link in plan.links}
    edges = []
    for value in workload.values:
        source = bisect_right(ends, value.producer)
        for target in sorted({bisect_right(ends, reader) for reader in value.readers} - {source}):
            forward_bytes, *forward_s = _encoded(value.forward_bytes, links.get((source, target)))
            backward_bytes, *backward_s = _encoded(value.backward_bytes, links.get((target, source)))
            wanted = backward_bytes if value.backward_bytes else None
            edges.append(EdgeLoad(source, target, forward_bytes, wanted, *forward_s, *backward_s))
    return edges


def _encoded(size: int, link: PlannedLink | None) -> tuple[int, float, float]:
    """Return the bytes on the wire of so many raw ones, and the seconds to encode and to decode them."""
    if link is None:
        return size, 0.0, 0.0
    codec = link_codec(link.codec, link.source, link.target)
    if not size:
        return 0, 0.0, 0.0
    return (
        round(size / link.ratio),
        size * codec.encode_s_per_byte + codec.encode_message_s,
        size * codec.decode_s_per_byte + codec.decode_message_s,
    )


def _shared(held: Sequence[HeldLoad], ends: Sequence[int]) -> list[SharedLoad]:
    """Return the trainable parameters that several stages read."""
    found = []
    for item in held:
        uses = tuple(bisect_right(ends, reader) for reader in item.readers)
        holders = tuple(sorted(set(uses)))
        if item.trainable and len(holders) > 1:
            found.append(SharedLoad(uses, holders, item.bytes))
    return found


def _tensors(held: Sequence[HeldLoad], ends: Sequence[int]) -> list[int]:
    """Return for every stage of how many parameters it makes the norm: of a shared one only the first holder."""
    counts = [0] * len(ends)
    for item in held:
        if item.trainable and item.readers:
            counts[bisect_right(ends, min(item.readers))] += 1
    return counts


def _pairs(edges: Sequence[EdgeLoad], shared: Sequence[SharedLoad], stages: int) -> set[tuple[int, int]]:
    """Return all pairs of stages that exchange messages, in both directions, because credit travels back."""
    pairs = {(stage, stage + 1) for stage in range(stages - 1)}
    pairs |= {(edge.source, edge.target) for edge in edges}
    pairs |= {(a, b) for item in shared for a in item.holders for b in item.holders if a < b}
    return pairs | {(b, a) for a, b in pairs}


def _wire(
    source: int, target: int, nodes: Sequence[ClusterNode], cluster: Cluster, pipes: _Pipes, window_bytes: float
) -> Wire:
    here, there = nodes[source], nodes[target]
    link = cluster.links.between(here, there)
    if link is None:
        raise PlanError(f"stage {source} on {here.name} and stage {target} on {there.name} have no link to each other")
    return Wire(source, target, link.rate_bytes_per_s, link.delay_s, window_bytes, pipes.between(here, there))
