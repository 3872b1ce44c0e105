"""What a planner must know of a graph, without the graph: costs, crossing values and parameters by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.base.ids import ValueId
from fusion.graph.dag import Graph, InputKind
from fusion.graph.lifetimes import Lifetimes, lifetimes_of
from fusion.graph.operators import TABLE
from fusion.graph.partition import legal_cuts
from fusion.plan.timing import BACKWARD_MOVES, Pace, TimeModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OperatorLoad:
    """One operator at the nominal micro-batch size."""

    kind: str  #: `OperatorInfo.cost`
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0  #: read and written
    backward_bytes: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ValueLoad:
    """A value that has to travel if a later stage reads it."""

    producer: int  #: position of the operator that makes it
    readers: tuple[int, ...]  #: positions, ascending
    forward_bytes: int
    backward_bytes: int  #: of its gradient; 0 where none is wanted


@dataclass(frozen=True, slots=True)
class HeldLoad:
    """A tensor that each stage which reads it keeps for the whole run: a parameter, buffer or constant."""

    readers: tuple[int, ...]  #: positions, ascending
    bytes: int
    elements: int
    trainable: bool = False
    parameter: bool = True  #: False for buffers and constants


@dataclass(frozen=True)
class Workload:
    """A graph for planners. Positions are those of the graph's operators."""

    operators: Sequence[OperatorLoad]
    values: Sequence[ValueLoad]
    held: Sequence[HeldLoad]
    cuts: Sequence[int]  #: legal positions, ascending, without 0 and the end

    def work(self, pace: Pace, model: TimeModel) -> tuple[Floats, Floats]:
        """Return each operator's forward and backward work in operations at a node's stated speed."""
        share = {op.kind: model.efficiency_of(pace, op.kind) for op in self.operators}
        shares = np.array([share[op.kind] for op in self.operators])

        def longer(flops: list[float], moved: list[float]) -> Floats:
            return np.asarray(np.maximum(np.array(flops) / shares, np.array(moved) / pace.bytes_per_flop))

        forward = longer([op.forward_flops for op in self.operators], [op.forward_bytes for op in self.operators])
        backward = longer([op.backward_flops for op in self.operators], [op.backward_bytes for op in self.operators])
        return forward + 1.0, backward  # no operator is free, so that any one counts

    def crossing_bytes(self) -> Floats:
        """Return by position 0..n the bytes of values and gradients that a cut there would send."""
        changes = np.zeros(len(self.operators) + 2)
        for value in self.values:
            size = value.forward_bytes + value.backward_bytes
            changes[value.producer + 1] += size
            changes[value.readers[-1] + 1] -= size
        crossing: Floats = np.cumsum(changes)[:-1]
        return crossing


def workload_of(graph: Graph) -> Workload:
    """Return what planners need of a checked graph."""
    lifetimes = lifetimes_of(graph)
    return Workload(_operators(graph), _values(graph, lifetimes), _held(graph), legal_cuts(graph))


def _operators(graph: Graph) -> list[OperatorLoad]:
    found = []
    for op in graph.operators:
        learns = not op.no_grad and any(graph.values[out].requires_grad for out in op.outputs)
        found.append(
            OperatorLoad(
                TABLE[op.name].cost,
                op.cost.forward_flops,
                op.cost.backward_flops,
                op.cost.moved_bytes,
                BACKWARD_MOVES * op.cost.moved_bytes if learns else 0.0,
                op.cost.saved_bytes,
            )
        )
    return found


def _values(graph: Graph, lifetimes: Lifetimes) -> list[ValueLoad]:
    """Values that are made again where they are needed do not travel, and neither do integers."""
    found = []
    for value, readers in graph.readers.items():
        producer = graph.producer.get(value)
        if producer is None or lifetimes.is_recomputed(value):
            continue
        item = graph.values[value]
        found.append(
            ValueLoad(producer, _distinct(readers), item.bytes, item.bytes if item.requires_grad else 0),
        )
    return found


def _held(graph: Graph) -> list[HeldLoad]:
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)
    found = []
    for item in graph.inputs:
        if item.kind not in kinds or item.value not in graph.readers:
            continue
        found.append(_held_one(graph, item.value, item.kind is InputKind.PARAMETER))
    return found


def _held_one(graph: Graph, value: ValueId, parameter: bool) -> HeldLoad:
    item = graph.values[value]
    elements = 0 if item.spec is None else item.spec.elements
    trainable = parameter and item.requires_grad
    return HeldLoad(_distinct(graph.readers[value]), item.bytes, elements, trainable, parameter)


def _distinct(positions: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positions))
