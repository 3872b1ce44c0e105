"""Remote automatic differentiation over one shard: forward and backward of single micro-batches.

Every value that comes from another stage becomes the output of a node that catches its gradient; every value that goes
to another stage is a root of the backward. Autograd does the rest, so the gradients are those of the whole model.
Sums have one order that no cut can change: a parameter's gradient over micro-batches by their number, a shared
parameter's gradient per use and then over its uses, a value's gradient from its last consumer to its first.

A shard that recomputes keeps of a micro-batch only what came in, and runs its forward a second time before its
backward: with the same random numbers, and with buffers as they were, so that it makes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusion.base.errors import GraphError
from fusion.base.ids import EdgeId, StageIndex, ValueId
from fusion.graph.dag import InputKind
from fusion.graph.lifetimes import lifetimes_of
from fusion.graph.partition import ParameterUse, Partition
from fusion.runtime.program import Program, Slots
from fusion.runtime.random import RandomKey


class _Receive(torch.autograd.Function):
    """Brings a value into this stage's autograd graph, and its gradient out again with the memory layout it has."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, caught: list[torch.Tensor]) -> torch.Tensor:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        if grads[0] is not None:
            ctx.caught.append(grads[0])
        return None, None, None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All that a micro-batch's forward depends on."""

    key: RandomKey
    fields: Mapping[str, torch.Tensor]
    received: Mapping[EdgeId, tuple[torch.Tensor, bool]]
    samples: int
    written: Mapping[ValueId, torch.Tensor]  #: copies of the buffers that the forward itself changes


@dataclass(slots=True)
class _Live:
    """What a micro-batch leaves behind between its forward and its backward: results, or the way to make them again."""

    again: _Inputs | None = None
    caught: dict[EdgeId, list[torch.Tensor]] = field(default_factory=dict)
    sent: dict[ValueId, torch.Tensor] = field(default_factory=dict)
    loss: torch.Tensor | None = None


@dataclass(slots=True)
class Forwarded:
    """The result of a forward: the value of each outgoing edge, and the loss where it is made here."""

    edges: dict[EdgeId, torch.Tensor]
    loss: torch.Tensor | None


class ShardExecutor:
    """Runs one shard. Owns its parameters, buffers and the gradients of their uses."""

    def __init__(
        self,
        partition: Partition,
        stage: StageIndex,
        tensors: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        precision: str = "fp32",
        draw_on_cpu: bool = False,
        take_over: bool = False,
        recompute: bool = False,
    ) -> None:
        """`tensors` holds the shard's parameters, buffers and constants by name.

        They are copied to `device`; with `take_over`, those that lie there already are used and changed as they are.
        `recompute`: run each forward again before its backward instead of keeping what it made.
        """
        self.graph = partition.graph
        self.stage = stage
        self.shard = partition.shards[stage]
        self.device = torch.device(device)
        self._seed = seed
        self._autocast = precision == "bf16"
        self.edges_in = [partition.edges[edge] for edge in self.shard.incoming]
        self.edges_out = [partition.edges[edge] for edge in self.shard.outgoing]
        self.batch_fields: dict[str, ValueId] = {}
        self.parameters: dict[str, torch.Tensor] = {}  #: by canonical name, trainable and frozen
        self.buffers: dict[str, torch.Tensor] = {}
        self._fixed: dict[int, torch.Tensor] = {}  #: what every run finds in its slots, by value or by use's key
        self._batch_size: ValueId | None = None
        self._load(tensors, copy=not take_over)
        uses = self._separate_uses(partition)
        positions = [*self.shard.recomputed, *range(self.shard.first_operator, self.shard.end_operator)]
        keep = [edge.value for edge in self.edges_out]
        self.makes_loss = self.graph.loss in {v for p in positions for v in self.graph.operators[p].outputs}
        if self.makes_loss:
            keep.append(self.graph.loss)
        options: dict[str, Any] = {"device": self.device, "slot_of_use": uses, "draw_on_cpu": draw_on_cpu}
        self._training = Program(self.graph, positions, keep, **options)
        self._evaluation = Program(self.graph, positions, keep, evaluation=True, **options)
        arriving = [*self.batch_fields.values(), *(edge.value for edge in self.edges_in)]
        arriving += [] if self._batch_size is None else [self._batch_size]
        start = dict.fromkeys(map(int, arriving)) | self._fixed
        self._start = {program: program.slots_with(start) for program in (self._training, self._evaluation)}
        self._anchor = torch.zeros((), requires_grad=True)
        self._live: dict[int, _Live] = {}
        lifetimes, inputs = lifetimes_of(self.graph), self.graph.input_of
        buffers = [value for value in self.shard.inputs if inputs[value].kind is InputKind.BUFFER]
        self._written = [value for value in buffers if lifetimes.is_written(value)]  # capture lets no other be
        self._recompute = recompute

    def _load(self, tensors: Mapping[str, torch.Tensor], copy: bool) -> None:
        for value in self.shard.inputs:
            source = self.graph.input_of[value]
            if source.kind is InputKind.BATCH:
                self.batch_fields[source.name] = value
                continue
            if source.kind is InputKind.BATCH_SIZE:
                self._batch_size = value
                continue
            if source.name not in tensors:
                raise GraphError(f"{source.kind} {source.name!r} of stage {self.stage} is missing from the weights")
            tensor = tensors[source.name].detach().to(self.device, copy=copy)
            self._check_tensor(source.name, value, tensor)
            if source.kind is InputKind.PARAMETER:
                tensor.requires_grad_(self.graph.values[value].requires_grad)
                self.parameters[source.name] = tensor
            elif source.kind is InputKind.BUFFER:
                self.buffers[source.name] = tensor
            self._fixed[value] = tensor

    def _check_tensor(self, name: str, value: ValueId, tensor: torch.Tensor) -> None:
        spec = self.graph.values[value].spec
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if spec is None or found != (spec.dtype, spec.shape):
            raise GraphError(f"weight {name!r} is {found[0]} {found[1]}, the graph needs {spec}")

    def _separate_uses(self, partition: Partition) -> dict[tuple[int, int], int]:
        """Give every local use of a shared parameter a leaf of its own over the same memory."""
        slot_of_use: dict[tuple[int, int], int] = {}
        self._use_leaf: dict[int, torch.Tensor] = {}  #: by the use's number over all shared parameters
        number = 0
        for shared in partition.shared:
            for use in shared.uses:
                if use.stage == self.stage:
                    leaf = self._fixed[shared.value].detach().requires_grad_()
                    key = -1 - number
                    self._use_leaf[number] = leaf
                    self._fixed[key] = leaf
                    slot_of_use[use.position, use.occurrence] = key
                number += 1
        return slot_of_use

    def forward(
        self,
        step: int,
        micro_batch: int,
        fields: Mapping[str, torch.Tensor],
        received: Mapping[EdgeId, tuple[torch.Tensor, bool]],
        samples: int,
    ) -> Forwarded:
        """Run the forward of one micro-batch of `samples` samples and keep what its backward needs.

        `received` has, for every incoming edge, its value and whether its gradient is wanted back.
        """
        inputs = _Inputs(RandomKey(self._seed, step, micro_batch), fields, received, samples, {})
        if self._recompute:
            again = replace(inputs, written={value: self._fixed[value].clone() for value in self._written})
            # With gradients on, as the second run has them: some operators compute otherwise without.
            with torch.autograd.graph.saved_tensors_hooks(_drop, _dropped):
                _, result = self._run(inputs)
            self._live[micro_batch] = _Live(again)
        else:
            self._live[micro_batch], result = self._run(inputs)
        return Forwarded(result.edges, _detached(result.loss))

    def _run(self, inputs: _Inputs) -> tuple[_Live, Forwarded]:
        """Run the operators of a training forward; return what its backward needs, and its results."""
        live = _Live()
        slots = self._filled(self._training, inputs.fields, inputs.samples)
        for written, tensor in inputs.written.items():
            slots[self._training.slot(written)] = tensor
        with self._precision():
            for edge in self.edges_in:
                value, wanted = inputs.received[edge.edge]
                if wanted:
                    caught: list[torch.Tensor] = []
                    live.caught[edge.edge] = caught
                    value = _Receive.apply(self._anchor, value, caught)  # type: ignore[no-untyped-call]
                slots[self._training.slot(edge.value)] = value
            self._training.run(slots, inputs.key)
        result = self._results(self._training, slots)
        for edge in self.edges_out:
            value = result.edges[edge.edge]
            if value.requires_grad:
                live.sent[edge.value] = value
        live.loss = result.loss
        return live, result

    def backward(
        self,
        micro_batch: int,
        loss_weight: float,
        gradients: Mapping[EdgeId, torch.Tensor | None],
    ) -> dict[EdgeId, torch.Tensor | None]:
        """Run the backward of one micro-batch, adding to the gradients of parameters.

        `gradients` has, for every outgoing edge whose value wanted one, its gradient or None. Returns the gradient of
        each incoming edge that wants one; None where there is none.
        """
        live = self._live.pop(micro_batch)
        if live.again is not None:
            live, _ = self._run(live.again)
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for value, tensor in live.sent.items():
            total = self._total(value, gradients)
            if total is not None:
                roots.append(tensor)
                seeds.append(total)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            seeds.append(torch.full_like(live.loss, loss_weight))
        if roots:
            torch.autograd.backward(roots, seeds)
        return {edge: caught[0] if caught else None for edge, caught in live.caught.items()}

    def evaluate(
        self,
        step: int,
        micro_batch: int,
        fields: Mapping[str, torch.Tensor],
        received: Mapping[EdgeId, torch.Tensor],
        samples: int,
    ) -> Forwarded:
        """Run a forward as a user would serve the model: no dropout, batch norm by its running statistics."""
        slots = self._filled(self._evaluation, fields, samples)
        with torch.no_grad(), self._precision():
            for edge in self.edges_in:
                slots[self._evaluation.slot(edge.value)] = received[edge.edge]
            self._evaluation.run(slots, RandomKey(self._seed, step, micro_batch))
        return self._results(self._evaluation, slots)

    def use_gradients(self) -> dict[int, torch.Tensor | None]:
        """Return the summed gradient of every local use of a shared parameter, by the use's number."""
        return {number: leaf.grad for number, leaf in self._use_leaf.items()}

    def clear_gradients(self) -> None:
        """Let all gradients go."""
        for tensor in self.parameters.values():
            tensor.grad = None
        for leaf in self._use_leaf.values():
            leaf.grad = None

    def forget(self) -> None:
        """Let micro-batches whose backward never came go, and all gradients."""
        self._live.clear()
        self.clear_gradients()

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._autocast else nullcontext()

    def _filled(self, program: Program, fields: Mapping[str, torch.Tensor], samples: int) -> Slots:
        slots = self._start[program].copy()
        for name, value in self.batch_fields.items():
            slots[program.slot(value)] = fields[name]
        if self._batch_size is not None:
            slots[program.slot(self._batch_size)] = samples
        return slots

    def _results(self, program: Program, slots: Slots) -> Forwarded:
        edges = {edge.edge: slots[program.slot(edge.value)] for edge in self.edges_out}
        return Forwarded(edges, slots[program.slot(self.graph.loss)] if self.makes_loss else None)

    def _total(self, value: ValueId, gradients: Mapping[EdgeId, torch.Tensor | None]) -> torch.Tensor | None:
        """Add up what the consumers sent back, the last stage first, as autograd would in one process."""
        total: torch.Tensor | None = None
        for edge in sorted(self.edges_out, key=lambda edge: -edge.target):
            gradient = gradients.get(edge.edge) if edge.value == value else None
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total


def _drop(_tensor: torch.Tensor) -> None:
    """Stand in for a tensor that a backward would need, where none will come."""


def _dropped(_nothing: None) -> torch.Tensor:
    raise AssertionError("a backward of a forward that is only run again")


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def all_uses(partition: Partition) -> list[tuple[int, ParameterUse]]:
    """Return (index into partition.shared, use) for every use of a shared parameter; the place is the use's number."""
    return [(index, use) for index, shared in enumerate(partition.shared) for use in shared.uses]
