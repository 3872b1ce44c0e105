"""Cutting the OP-DAG into shards: which positions are legal, what crosses, what is shared.

A partition is a pure function of the graph and the cut positions, so every stage, the coordinator and the
reference run derive the same edges with the same numbers from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.base.ids import EdgeId, StageIndex, ValueId
from fusion.graph.dag import Graph


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
    shared: tuple[SharedParameter, ...]  #: parameters with more than one use, ordered by value
