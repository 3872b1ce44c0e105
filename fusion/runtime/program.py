"""A list of operators made ready to run: slots instead of value numbers, constants resolved, dead values let go.

It is an interpreter, not generated code: a graph from elsewhere must never become Python source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fusion.base.ids import ValueId
from fusion.graph.dag import Argument, Graph, Operator, Ref
from fusion.graph.operators import TABLE, may_draw
from fusion.runtime.operators import NORMALISE_BY_BATCH, constant, dtype_of, find_call, for_evaluation
from fusion.runtime.random import RandomKey

Slots = list[Any]


@dataclass(slots=True)
class _Call:
    """One operator: `arguments` is a template in which `places` are filled from slots before the call."""

    position: int
    function: Callable[..., Any]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]  #: (index into arguments, slot)
    nested: tuple[tuple[int, Callable[[Slots], list[Any]]], ...]  #: (index into arguments, builder of a list)
    keywords: dict[str, Any]
    keyword_places: tuple[tuple[str, int], ...]
    output: int  #: slot of the single result, or -1
    outputs: tuple[int, ...]  #: slots of several results
    frees: tuple[int, ...]  #: slots that nothing reads any more
    random: bool
    dropout: bool


@dataclass(frozen=True, slots=True)
class _Mode:
    """What surrounds a run of operators."""

    no_grad: bool
    autocast_dtype: str


class Program:
    """The operators of one shard, for training or for evaluation."""

    def __init__(
        self,
        graph: Graph,
        positions: Sequence[int],
        keep: Sequence[ValueId],
        *,
        device: torch.device,
        evaluation: bool = False,
        slot_of_use: dict[tuple[int, int], ValueId] | None = None,
        draw_on_cpu: bool = False,
    ) -> None:
        """Compile the operators at `positions`; the values `keep` stay in their slots.

        `slot_of_use` names, for (position, occurrence) of some reads, another key whose slot is read in the value's
        stead: the own leaf of one use of a shared parameter. Such keys are negative and thus no value's number.
        """
        self._device = device
        self._uses = slot_of_use or {}
        self._slot: dict[int, int] = {}
        self._kept = {int(value) for value in keep}
        self._generator = torch.Generator(device="cpu" if draw_on_cpu else device)
        operators = [(position, self._adapted(graph, position, evaluation)) for position in positions]
        last = self._last_reads(operators)
        self._segments: list[tuple[_Mode, list[_Call]]] = []
        for index, (position, op) in enumerate(operators):
            if op is None:
                self._alias(graph.operators[position])
                continue
            mode = _Mode(op.no_grad, op.autocast_dtype)
            if not self._segments or self._segments[-1][0] != mode:
                self._segments.append((mode, []))
            self._segments[-1][1].append(self._compile(position, op, last.get(index, ())))

    def slot(self, key: int) -> int:
        """Return the slot of a value (or of a use's negative key), making one if it has none yet."""
        return self._slot.setdefault(key, len(self._slot))

    def slots_with(self, fixed: Mapping[int, Any]) -> Slots:
        """Return slots in which the given values stand and all others are empty, to be copied for every run."""
        for key in fixed:
            self.slot(key)
        slots: Slots = [None] * len(self._slot)
        for key, value in fixed.items():
            slots[self._slot[key]] = value
        return slots

    def run(self, slots: Slots, key: RandomKey) -> None:
        """Run all operators over `slots`, whose inputs are set."""
        for mode, calls in self._segments:
            if mode.no_grad or mode.autocast_dtype:
                with self._entered(mode):
                    self._run_calls(calls, slots, key)
            else:
                self._run_calls(calls, slots, key)

    def _run_calls(self, calls: list[_Call], slots: Slots, key: RandomKey) -> None:
        for call in calls:
            arguments = call.arguments.copy()
            for index, slot in call.places:
                arguments[index] = slots[slot]
            for index, build in call.nested:
                arguments[index] = build(slots)
            if call.random:
                self._seed(call, key, arguments)
            if call.keyword_places:
                keywords = dict(call.keywords)
                for name, slot in call.keyword_places:
                    keywords[name] = slots[slot]
                result = call.function(*arguments, **keywords)
            else:
                result = call.function(*arguments, **call.keywords)
            if call.output >= 0:
                slots[call.output] = result
            else:
                for slot, item in zip(call.outputs, result, strict=True):
                    slots[slot] = item
            for slot in call.frees:
                slots[slot] = None

    def _seed(self, call: _Call, key: RandomKey, arguments: list[Any]) -> None:
        seed = key.for_operator(call.position)
        if call.dropout:
            self._generator.manual_seed(seed)
            arguments.insert(0, self._generator)
        elif self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        elif self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @contextmanager
    def _entered(self, mode: _Mode) -> Iterator[None]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not mode.no_grad):
            if not mode.autocast_dtype:
                yield
                return
            enabled = mode.autocast_dtype != "off"
            dtype = dtype_of(mode.autocast_dtype) if enabled else None
            with torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
                yield

    def _adapted(self, graph: Graph, position: int, evaluation: bool) -> Operator | None:
        """Return the operator to run at `position`, or None for one that evaluation leaves out."""
        op = graph.operators[position]
        if not evaluation:
            return op
        op = for_evaluation(op)
        mutates = TABLE[op.name].mutates
        if mutates and op.name not in NORMALISE_BY_BATCH and self._writes_input(graph, op, mutates):
            return None  # a counter or an average that only training moves on
        return op

    @staticmethod
    def _writes_input(graph: Graph, op: Operator, mutates: tuple[int, ...]) -> bool:
        targets = [op.arguments[index] for index in mutates if index < len(op.arguments)]
        return any(isinstance(target, Ref) and target.value in graph.input_of for target in targets)

    def _alias(self, op: Operator) -> None:
        """Let an operator that is left out return what it would have written to."""
        target = op.arguments[TABLE[op.name].mutates[0]]
        assert isinstance(target, Ref)
        for output in op.outputs:
            self._slot[output] = self.slot(target.value)

    def _last_reads(self, operators: list[tuple[int, Operator | None]]) -> dict[int, tuple[int, ...]]:
        """Return, per index, the values that are last read there, or made there and never read."""
        last: dict[int, int] = {}
        made: set[int] = set()
        for index, (_, op) in enumerate(operators):
            if op is None:
                continue
            for value in map(int, op.reads()):
                last[value] = index
            for output in map(int, op.outputs):
                last.setdefault(output, index)
                made.add(output)
        frees: dict[int, list[int]] = {}
        for value, index in last.items():
            if value in made and value not in self._kept:
                frees.setdefault(index, []).append(value)
        return {index: tuple(values) for index, values in frees.items()}

    def _compile(self, position: int, op: Operator, frees: tuple[int, ...]) -> _Call:
        occurrence = iter(range(1 << 30))

        def slot_of(ref: Ref) -> int:
            return self.slot(self._uses.get((position, next(occurrence)), ref.value))

        template: list[Any] = []
        places: list[tuple[int, int]] = []
        nested: list[tuple[int, Callable[[Slots], list[Any]]]] = []
        for index, argument in enumerate(op.arguments):
            template.append(None)
            if isinstance(argument, Ref):
                places.append((index, slot_of(argument)))
            elif isinstance(argument, tuple) and _holds_value(argument):
                nested.append((index, self._list_builder(argument, slot_of)))
            else:
                template[index] = constant(argument, self._device)
        keywords: dict[str, Any] = {}
        keyword_places: list[tuple[str, int]] = []
        for name, argument in op.keywords:
            if isinstance(argument, Ref):
                keyword_places.append((name, slot_of(argument)))
            else:
                keywords[name] = constant(argument, self._device)
        single = len(op.outputs) == 1 and TABLE[op.name].returns == 1
        outputs = tuple(self.slot(value) for value in op.outputs)
        dropout = op.name == "fusion.dropout.default"
        random = may_draw(op)
        function = find_call(op.name)
        if dropout and not random:
            function, template, places = _identity, [None], [(0, places[0][1])]
        return _Call(
            position, function, template, tuple(places), tuple(nested), keywords, tuple(keyword_places),
            outputs[0] if single else -1, () if single else outputs,
            tuple(self.slot(value) for value in frees), random, dropout,
        )  # fmt: skip

    def _list_builder(self, items: tuple[Argument, ...], slot_of: Callable[[Ref], int]) -> Callable[[Slots], list[Any]]:
        filled = [constant(item, self._device) if not isinstance(item, Ref) else None for item in items]
        places = [(index, slot_of(item)) for index, item in enumerate(items) if isinstance(item, Ref)]

        def build(slots: Slots) -> list[Any]:
            result = filled.copy()
            for index, slot in places:
                result[index] = slots[slot]
            return result

        return build


def _identity(x: Any) -> Any:
    return x


def _holds_value(argument: tuple[Argument, ...]) -> bool:
    return any(isinstance(item, Ref) for item in argument)
