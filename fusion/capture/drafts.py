"""The graph while it is being built: operators with their torch calls and places, before shapes and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusion.base.ids import ValueId
from fusion.capture.places import Place
from fusion.graph.dag import Argument, InputKind, Operator, Ref, refs
from fusion.graph.operators import TABLE, shared_values, written_values


@dataclass(frozen=True, slots=True)
class Draft:
    """One operator, how to run it, and where the model calls it."""

    operator: Operator
    run: Callable[..., Any]
    place: Place


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One input of the graph; `tensor` states its type and shape (a batch field's: with any number of samples)."""

    value: ValueId
    name: str
    kind: InputKind
    tensor: Tensor | None = None  #: None for the batch size
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftGraph:
    """Operators in a topological order over values numbered from 0: inputs first, then results in order."""

    inputs: tuple[DraftInput, ...]
    drafts: tuple[Draft, ...]
    loss: ValueId


def tidy(graph: DraftGraph) -> DraftGraph:
    """Drop what the loss does not need, move late buffer updates up to where they can happen, and renumber."""
    return _renumber(_hoist_updates(_drop_dead(graph)))


def _drop_dead(graph: DraftGraph) -> DraftGraph:
    """Keep the operators that the loss needs, and every one that writes in place (batch norm's statistics too)."""
    needed = {graph.loss}
    kept = []
    for draft in reversed(graph.drafts):
        operator = draft.operator
        if TABLE[operator.name].mutates or needed.intersection(operator.outputs):
            needed.update(operator.reads())
            kept.append(draft)
    inputs = tuple(item for item in graph.inputs if item.value in needed)
    return DraftGraph(inputs, tuple(reversed(kept)), graph.loss)


def _hoist_updates(graph: DraftGraph) -> DraftGraph:
    """Move `buffer.copy_(new)` up to just after the last use of what it touches.

    torch.export puts the assignment of a buffer at the very end, which would tie the first stage to the last.
    """
    buffers = {item.value for item in graph.inputs if item.kind is InputKind.BUFFER}
    drafts = list(graph.drafts)
    for position in range(len(drafts)):
        operator = drafts[position].operator
        if operator.name == "aten.copy_.default" and not operator.outputs_read_by(drafts) and _written(operator) <= buffers:
            target = _first_free_position(drafts, position)
            drafts.insert(target, drafts.pop(position))
    return replace(graph, drafts=tuple(drafts))
