"""The plan by equal compute: every node works on a micro-batch for the same time, within its memory.

This is the baseline that every better planner is measured against: it knows the operators' work and the nodes' speed
and memory, and nothing of the links between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from fusion.base.errors import PlanError
from fusion.base.ids import Epoch, StageIndex
from fusion.base.units import format_bytes
from fusion.graph.dag import Graph
from fusion.graph.partition import Partition, parameter_count, partition
from fusion.plan.need import in_flight, recomputes, shard_work, stage_bytes
from fusion.plan.spans import Spans, spans_of
from fusion.plan.types import Cluster, ClusterNode, JobView, Plan, PlannedLink, PlannedStage

#: Cost of stage k from place i to place j (inf: not possible), and whether nothing that begins earlier is possible.
Cost = Callable[[int, int, int], tuple[float, bool]]

_ROUNDS = 8  #: of making room for what is computed again
_SLACK = 1 + 1e-9


def plan(cluster: Cluster, graph: Graph, job: JobView) -> Plan:
    """Return a plan (epoch 1) in which the slowest stage is as fast as it can be.

    It has as many stages as nodes, legal cuts and `job.max_stages` allow, and fewer only where memory demands it.
    Nodes keep their order in `cluster`; where they are more than the stages, the fastest are taken, or if that does
    not fit those with the most memory. `job.cuts`, if there are any, are taken as they are. Where nothing fits
    otherwise, and the job allows it, stages run forwards again instead of keeping their results.

    PlanError says how many nodes or how much memory are missing; GraphError that `job.cuts` are not legal.
    """
    if not cluster.nodes:
        raise PlanError("no node is idle; start one with 'fusion-node start'")
    try:
        return _plan(cluster, graph, job)
    except PlanError:
        if job.recompute != "auto":
            raise
    return _plan(cluster, graph, replace(job, recompute="always"))


def _plan(cluster: Cluster, graph: Graph, job: JobView) -> Plan:
    if job.cuts:
        return _with_given_cuts(cluster, graph, job)
    spans = spans_of(graph, job)
    most = min(len(cluster.nodes), job.max_stages or len(cluster.nodes), spans.pieces)
    for count in range(most, 0, -1):
        for nodes in _candidates(cluster, count):
            parts = _fit(graph, spans, nodes, job)
            if parts is not None:
                return _make(parts, nodes, job)
    raise PlanError(_what_is_missing(spans, cluster, most, job))


def _candidates(cluster: Cluster, count: int) -> list[list[ClusterNode]]:
    """Which `count` nodes to try: the fastest, then those with the most memory; always in the cluster's order."""
    place = {node.node: index for index, node in enumerate(cluster.nodes)}
    found: list[list[ClusterNode]] = []
    by_speed = sorted(cluster.nodes, key=lambda node: -node.flops)
    by_memory = sorted(cluster.nodes, key=lambda node: -node.memory_bytes)
    for ranked in (by_speed, by_memory):
        chosen = sorted(ranked[:count], key=lambda node: place[node.node])
        if chosen not in found:
            found.append(chosen)
    return found


# ---- the planner's own cuts ----


def _fit(graph: Graph, spans: Spans, nodes: Sequence[ClusterNode], job: JobView) -> Partition | None:
    """Spread the graph over exactly these nodes; None if it does not fit into their memory.

    The search does not know what stages will compute again. Where that makes one too large, room is kept for it, and
    the search is made again.
    """
    room = [node.memory_bytes for node in nodes]
    for _ in range(_ROUNDS):
        places = _balance(spans, nodes, room, job)
        if places is None:
            return None
        parts = partition(graph, [spans.positions[place] for place in places[1:-1]])
        over = [stage_bytes(parts, stage, job) - node.memory_bytes for stage, node in enumerate(nodes)]
        if max(over) <= 0:
            return parts
        room = [bytes_ - max(0, extra) for bytes_, extra in zip(room, over, strict=True)]
    return None


def _balance(spans: Spans, nodes: Sequence[ClusterNode], room: Sequence[int], job: JobView) -> list[int] | None:
    """Return the places between which each node works: least time of the slowest, then most even for the others."""
    flights = [in_flight(job, stage, len(nodes)) for stage in range(len(nodes))]

    def time_s(stage: int, start: int, end: int) -> tuple[float, bool]:
        span = spans.span(start, end)
        again = recomputes(job, flights[stage])
        if span.memory_bytes(flights[stage], recompute=again) <= room[stage]:
            return span.work / nodes[stage].flops, False
        return inf, span.least_bytes(flights[stage], recompute=again) > room[stage]

    slowest_s, places = _search(spans.pieces, len(nodes), time_s, max)
    if places is None:
        return None
    limit_s = slowest_s * _SLACK

    def squared(stage: int, start: int, end: int) -> tuple[float, bool]:
        seconds, never = time_s(stage, start, end)
        return ((seconds / limit_s) ** 2, never) if seconds <= limit_s else (inf, never or seconds < inf)

    return _search(spans.pieces, len(nodes), squared, _add)[1] or places


def _add(first: float, second: float) -> float:
    return first + second


def _search(
    pieces: int, stages: int, cost: Cost, combine: Callable[[float, float], float]
) -> tuple[float, list[int] | None]:
    """Cut 0..pieces into `stages` runs of the least combined cost, by dynamic programming.

    `combine` is the larger of two costs, or their sum. A run that begins earlier never costs less, so one that alone
    costs as much as the best combination so far ends the search to its left.
    """
    best = [0.0] + [inf] * pieces
    came_from: list[list[int]] = []
    for stage in range(stages):
        after, origin = [inf] * (pieces + 1), [-1] * (pieces + 1)
        for end in range(stage + 1, pieces - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                if best[start] == inf:
                    continue
                alone, never = cost(stage, start, end)
                total = combine(best[start], alone)
                if total < after[end]:
                    after[end], origin[end] = total, start
                if never or (alone < inf and alone >= after[end]):
                    break
        best = after
        came_from.append(origin)
    if best[pieces] == inf:
        return inf, None
    places = [pieces]
    for origin in reversed(came_from):
        places.append(origin[places[-1]])
    return best[pieces], places[::-1]


def _what_is_missing(spans: Spans, cluster: Cluster, most: int, job: JobView) -> str:
    """Say how much memory is missing in the arrangement that comes closest, of many stages, some and one."""
    closest, stages = inf, 0
    for count in sorted({most, -(-most // 2), 1}, reverse=True):
        for nodes in _candidates(cluster, count):
            flights = [in_flight(job, stage, count) for stage in range(count)]

            def lacking(
                stage: int,
                start: int,
                end: int,
                nodes: Sequence[ClusterNode] = nodes,
                flights: Sequence[int] = flights,
            ) -> tuple[float, bool]:
                again = recomputes(job, flights[stage])
                need = spans.span(start, end).memory_bytes(flights[stage], recompute=again)
                return float(max(0, need - nodes[stage].memory_bytes)), False

            missing, _ = _search(spans.pieces, count, lacking, _add)
            if missing < closest:
                closest, stages = missing, count
    offered = sum(node.memory_bytes for node in cluster.nodes)
    return (
        f"memory: {format_bytes(max(1.0, closest))} more are needed even in {stages} stage(s); nodes idle: "
        f"{len(cluster.nodes)} with {format_bytes(offered)} in all; add a node, raise --max-memory, or take more "
        "micro_batches"
    )


# ---- cuts that the job states ----


def _with_given_cuts(cluster: Cluster, graph: Graph, job: JobView) -> Plan:
    parts = partition(graph, job.cuts)
    count = len(parts.shards)
    if len(cluster.nodes) < count:
        raise PlanError(f"cuts: {len(job.cuts)} cuts make {count} stages, only {len(cluster.nodes)} nodes are idle")
    needs = [stage_bytes(parts, stage, job) for stage in range(count)]
    lacks = []
    for nodes in _candidates(cluster, count):
        short = [
            (need - node.memory_bytes, stage, node, need)
            for stage, (need, node) in enumerate(zip(needs, nodes, strict=True))
            if need > node.memory_bytes
        ]
        if not short:
            return _make(parts, nodes, job)
        lacks.append(short)
    short = min(lacks, key=lambda found: sum(item[0] for item in found))
    _, stage, node, need = max(short, key=lambda item: item[0])
    raise PlanError(
        f"memory: {format_bytes(sum(item[0] for item in short))} more are needed for these cuts; stage {stage} needs "
        f"{format_bytes(need)}, node {node.name} offers {format_bytes(node.memory_bytes)}"
    )


# ---- the plan ----


def _make(parts: Partition, nodes: Sequence[ClusterNode], job: JobView) -> Plan:
    stages = []
    for shard, node in zip(parts.shards, nodes, strict=True):
        work = shard_work(parts.graph, shard)
        again = recomputes(job, in_flight(job, shard.index, len(parts.shards)))
        stages.append(
            PlannedStage(
                node.node,
                node.name,
                node.address,
                node.incarnation,
                shard.first_operator,
                shard.end_operator,
                parameter_count(parts.graph, shard),
                stage_bytes(parts, shard.index, job),
                work.forward / node.flops,
                (work.backward + again * work.forward) / node.flops,
                recompute=again,
            )
        )
    return Plan(Epoch(1), tuple(stages), links_of(parts, job.micro_batches), job.schedule, job.micro_batches)


def links_of(parts: Partition, micro_batches: int) -> tuple[PlannedLink, ...]:
    """Return who sends how much to whom in a step: values, their gradients on the way back, and shared parameters'."""
    graph = parts.graph
    found: dict[tuple[int, int], int] = {}

    def send(source: int, target: int, count: int) -> None:
        found[source, target] = found.get((source, target), 0) + count

    for edge in parts.edges:
        value = graph.values[edge.value]
        send(edge.source, edge.target, micro_batches * value.bytes)
        if value.requires_grad:
            send(edge.target, edge.source, micro_batches * value.bytes)
    for shared in parts.shared:
        for use in shared.uses:
            for holder in shared.holders:
                if holder != use.stage:
                    send(use.stage, holder, graph.values[shared.value].bytes)
    return tuple(
        PlannedLink(StageIndex(source), StageIndex(target), "none", count)
        for (source, target), count in sorted(found.items())
    )
