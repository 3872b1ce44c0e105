"""The graph while it is being built: operators with their torch calls and places, before shapes and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusion.base.ids import ValueId
from fusion.capture.places import Place
from fusion.graph.dag import Argument, InputKind, Operator, Ref
from fusion.graph.operators import TABLE


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
    """Drop what the loss does not need, and renumber."""
    return _renumber(_drop_dead(graph))


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


def _renumber(graph: DraftGraph) -> DraftGraph:
    number: dict[ValueId, ValueId] = {}
    for value in _all_values(graph):
        number[value] = ValueId(len(number))
    inputs = tuple(replace(item, value=number[item.value]) for item in graph.inputs)
    drafts = tuple(replace(draft, operator=_with_numbers(draft.operator, number)) for draft in graph.drafts)
    return DraftGraph(inputs, drafts, number[graph.loss])


def _all_values(graph: DraftGraph) -> Iterable[ValueId]:
    yield from (item.value for item in graph.inputs)
    for draft in graph.drafts:
        yield from draft.operator.outputs


def _with_numbers(operator: Operator, number: dict[ValueId, ValueId]) -> Operator:
    return replace(
        operator,
        arguments=tuple(_renamed(item, number) for item in operator.arguments),
        keywords=tuple((key, _renamed(item, number)) for key, item in operator.keywords),
        outputs=tuple(number[value] for value in operator.outputs),
    )


def _renamed(argument: Argument, number: dict[ValueId, ValueId]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(number[argument.value])
    if isinstance(argument, tuple):
        return tuple(_renamed(item, number) for item in argument)
    return argument
