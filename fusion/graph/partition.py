"""Cutting the OP-DAG into shards: which positions are legal, what crosses, what is shared.

A partition is a pure function of the graph and the cut positions, so every stage, the coordinator and the
reference run derive the same edges with the same numbers from them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from fusion.base.errors import GraphError
from fusion.base.ids import EdgeId, StageIndex, ValueId
from fusion.graph.dag import Cost, Graph, InputKind
from fusion.graph.lifetimes import Lifetimes, lifetimes_of


@dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way from the stage that makes it to one later stage that needs it."""

    edge: EdgeId
    value: ValueId
    source: StageIndex
    target: StageIndex


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """One place where an operator reads a parameter. Its gradients are summed apart from those of other uses."""

    stage: StageIndex
    position: int  #: of the operator
    occurrence: int  #: among the reads of that operator, from 0, in the order of `Operator.reads`


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A trainable parameter that several operators read, possibly on several stages."""

    value: ValueId
    uses: tuple[ParameterUse, ...]  #: the order in which their gradients are added up
    holders: tuple[StageIndex, ...]  #: ascending; each keeps a copy, the first answers for its norm


@dataclass(frozen=True, slots=True)
class Shard:
    """What one stage runs."""

    index: StageIndex
    first_operator: int
    end_operator: int  #: one past the last
    recomputed: tuple[int, ...]  #: earlier operators that it runs again instead of receiving their values; ascending
    inputs: tuple[ValueId, ...]  #: the graph's inputs that it reads, ascending
    incoming: tuple[EdgeId, ...]
    outgoing: tuple[EdgeId, ...]


@dataclass(frozen=True)
class Partition:
    """A graph in pieces."""

    graph: Graph
    shards: tuple[Shard, ...]
    edges: tuple[Edge, ...]  #: ordered by (source, value, target); an EdgeId is an index into it
    shared: tuple[SharedParameter, ...]  #: parameters with more than one use or holder, ordered by value

    def stage_of_operator(self, position: int) -> StageIndex:
        """Return the stage whose own part holds the operator at `position`."""
        return StageIndex(bisect_right(self._ends, position))

    @cached_property
    def loss_stage(self) -> StageIndex:
        """The stage that makes the loss. Mostly, but not always, the last one."""
        return self.stage_of_operator(self.graph.producer[self.graph.loss])

    @cached_property
    def _ends(self) -> list[int]:
        return [shard.end_operator for shard in self.shards]


def legal_cuts(graph: Graph) -> tuple[int, ...]:
    """Return the positions p, 0 < p < number of operators, at which the graph may be cut before operator p.

    Everything that is written in place stays with what it may be seen through: from the making of the memory to its
    last write for a value, and over all operators that touch it for an input such as batch norm's statistics.
    """
    blocked = lifetimes_of(graph).blocked
    return tuple(position for position in range(1, len(graph.operators)) if not blocked[position])


def partition(graph: Graph, cuts: Sequence[int]) -> Partition:
    """Return `graph` cut before each of the positions `cuts`, which ascend and are all legal.

    A value that a later stage needs travels straight from the stage that makes it, once to each stage that needs it.
    Integers, and values that are cheap to make from the graph's inputs (`Lifetimes.is_recomputed`), are made
    again where they are needed instead. Raises GraphError for positions that are not legal.
    """
    _check_cuts(graph, cuts)
    bounds = [0, *cuts, len(graph.operators)]
    spans = list(pairwise(bounds))
    needs = [_needs(graph, first, end) for first, end in spans]
    ends = bounds[1:]
    found = sorted(
        (bisect_right(ends, graph.producer[value]), value, stage)
        for stage, need in enumerate(needs)
        for value in need.received
    )
    edges = tuple(
        Edge(EdgeId(index), value, StageIndex(source), StageIndex(target))
        for index, (source, value, target) in enumerate(found)
    )
    incoming: list[list[EdgeId]] = [[] for _ in spans]
    outgoing: list[list[EdgeId]] = [[] for _ in spans]
    for edge in edges:
        outgoing[edge.source].append(edge.edge)
        incoming[edge.target].append(edge.edge)
    shards = tuple(
        Shard(
            index=StageIndex(stage),
            first_operator=first,
            end_operator=end,
            recomputed=tuple(sorted(needs[stage].recomputed)),
            inputs=tuple(sorted(needs[stage].inputs)),
            incoming=tuple(incoming[stage]),
            outgoing=tuple(outgoing[stage]),
        )
        for stage, (first, end) in enumerate(spans)
    )
    return Partition(graph, shards, edges, _shared_parameters(graph, shards))


def stage_cost(graph: Graph, shard: Shard) -> Cost:
    """Return what the shard costs per micro-batch, with the operators that it runs again."""
    costs = [graph.operators[position].cost for position in operators_of(shard)]
    return Cost(
        forward_flops=sum(cost.forward_flops for cost in costs),
        backward_flops=sum(cost.backward_flops for cost in costs),
        saved_bytes=sum(cost.saved_bytes for cost in costs),
        moved_bytes=sum(cost.moved_bytes for cost in costs),
    )


def operators_of(shard: Shard) -> tuple[int, ...]:
    """Return the positions of all operators that the shard runs, in the order in which it runs them."""
    return (*shard.recomputed, *range(shard.first_operator, shard.end_operator))


def parameter_bytes(graph: Graph, shard: Shard) -> int:
    """Return the bytes of all parameters that the shard reads, trainable and frozen."""
    return sum(graph.values[value].bytes for value in _parameters(graph, shard))


def parameter_count(graph: Graph, shard: Shard, *, trainable_only: bool = False) -> int:
    """Return the number of scalars in the parameters that the shard reads."""
    return sum(
        spec.elements
        for value in _parameters(graph, shard)
        if (spec := graph.values[value].spec) is not None and (graph.values[value].requires_grad or not trainable_only)
    )


def crossing_bytes(graph: Graph) -> tuple[int, ...]:
    """Return by position p, 0 to the number of operators, the bytes that cross a cut before operator p.

    Each value that is sent counts once, however many later operators read it; values that are made again count
    nothing. Positions that are not legal are counted all the same.
    """
    lifetimes, changes = lifetimes_of(graph), [0] * (len(graph.operators) + 2)
    last_read = {value: position for position, read in enumerate(lifetimes.reads) for value in read}
    for value, last in last_read.items():
        made = graph.producer.get(value)
        if made is not None and not lifetimes.is_recomputed(value):
            changes[made + 1] += graph.values[value].bytes
            changes[last + 1] -= graph.values[value].bytes
    return tuple(accumulate(changes[: len(graph.operators) + 1]))


def _parameters(graph: Graph, shard: Shard) -> list[ValueId]:
    return [value for value in shard.inputs if graph.input_of[value].kind is InputKind.PARAMETER]


def _check_cuts(graph: Graph, cuts: Sequence[int]) -> None:
    legal = legal_cuts(graph)
    previous = 0
    for cut in cuts:
        if not 0 < cut < len(graph.operators):
            raise GraphError(f"cuts: {cut} is not inside the graph; allowed: 1 to {len(graph.operators) - 1}")
        if cut <= previous:
            raise GraphError(f"cuts: {cut} after {previous} leaves a stage without operators; positions must ascend")
        place = bisect_left(legal, cut)
        if place == len(legal) or legal[place] != cut:
            nearest = ", ".join(str(position) for position in legal[max(0, place - 1) : place + 1]) or "none"
            raise GraphError(f"cuts: {cut} would split memory that is written in place; nearest legal: {nearest}")
        previous = cut


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a stage needs beyond its own operators' results."""

    inputs: set[ValueId]
    recomputed: set[int]
    received: list[ValueId]


def _needs(graph: Graph, first: int, end: int) -> _Needs:
    lifetimes = lifetimes_of(graph)
    read = {value for position in range(first, end) for value in lifetimes.reads[position]}
    earlier = sorted(value for value in read if graph.producer.get(value, first) < first)
    recomputed: set[int] = set()
    for value in earlier:
        if graph.producer[value] not in recomputed and lifetimes.is_recomputed(value):
            recomputed.update(lifetimes.closure(value))
    inputs = {value for value in read if value not in graph.producer}
    inputs.update(value for value in _reads_of(lifetimes, recomputed) if value not in graph.producer)
    return _Needs(inputs, recomputed, [value for value in earlier if graph.producer[value] not in recomputed])


def _reads_of(lifetimes: Lifetimes, positions: set[int]) -> set[ValueId]:
    return {value for position in positions for value in lifetimes.reads[position]}


def _shared_parameters(graph: Graph, shards: tuple[Shard, ...]) -> tuple[SharedParameter, ...]:
    """Find the trainable parameters with several uses or holders; a read under no_grad holds but does not use."""
    parameters = [item.value for item in graph.inputs if item.kind is InputKind.PARAMETER]
    trainable = {value for value in parameters if graph.values[value].requires_grad}
    reads = lifetimes_of(graph).reads
    uses: dict[ValueId, list[ParameterUse]] = {value: [] for value in trainable}
    holders: dict[ValueId, set[StageIndex]] = {value: set() for value in trainable}
    for shard in shards:
        for position in operators_of(shard):
            for occurrence, value in enumerate(reads[position]):
                if value in trainable:
                    holders[value].add(shard.index)
                    if not graph.operators[position].no_grad:
                        uses[value].append(ParameterUse(shard.index, position, occurrence))
    return tuple(
        SharedParameter(
            value,
            tuple(sorted(uses[value], key=lambda use: (use.position, use.occurrence, use.stage))),
            tuple(sorted(holders[value])),
        )
        for value in sorted(trainable)
        if uses[value] and (len(uses[value]) > 1 or len(holders[value]) > 1)
    )
