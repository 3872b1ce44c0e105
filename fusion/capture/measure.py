"""What every operator of a graph produces and keeps: shapes, gradients' paths and saved bytes, without doing the work.

The operators run one by one on fake CPU tensors (shapes only) at the nominal micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from fusion.base.errors import CaptureError
from fusion.capture.arguments import DTYPES, to_torch
from fusion.capture.drafts import Draft, DraftGraph, DraftInput
from fusion.capture.weights import stand_in
from fusion.graph.dag import InputKind, Operator, TensorSpec, Value
from fusion.graph.operators import written_values

_CPU = torch.device("cpu")
_KINDS = {
    InputKind.BATCH: "a field of the batch",
    InputKind.PARAMETER: "a parameter",
    InputKind.CONSTANT: "a constant",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by their id, and for each operator the bytes that it is the first to keep for the backward."""

    values: tuple[Value, ...]
    saved_bytes: tuple[int, ...]


def measure(graph: DraftGraph, micro_batch: int) -> Measured:
    """Run `graph` on fake tensors with `micro_batch` samples.

    Raise CaptureError where an operator changes what must not change, or where training could not work.
    """
    run = _Run(graph, micro_batch)
    for position, draft in enumerate(graph.drafts):
        run.step(position, draft)
    run.check_end()
    return Measured(run.describe(), tuple(run.saved_bytes))


@dataclass(slots=True)
class _Saved:
    """A tensor that the backward will want as it was."""

    tensor: Tensor
    version: int
    draft: Draft


@dataclass
class _Run:
    graph: DraftGraph
    micro_batch: int
    values: dict[int, Any] = field(default_factory=dict)
    saved: list[_Saved] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=False)
        self._seen: set[int] = set()  # storages that exist anyway, or that an earlier operator keeps
        self._inputs: dict[int, DraftInput] = {}  # by storage
        for item in self.graph.inputs:
            if item.tensor is None:
                self.values[item.value] = self.micro_batch
                continue
            tensor = self._input(item, item.tensor)
            self.values[item.value] = tensor
            self._seen.add(_storage(tensor))
            self._inputs[_storage(tensor)] = item

    def _input(self, item: DraftInput, tensor: Tensor) -> Tensor:
        if item.kind is not InputKind.BATCH:
            return stand_in(tensor, self._mode)
        with self._mode:
            return torch.empty((self.micro_batch, *tensor.shape[1:]), dtype=tensor.dtype, device=_CPU)

    def step(self, position: int, draft: Draft) -> None:
        operator = draft.operator
        self.saved_bytes.append(0)
        arguments = [to_torch(item, self.values, _CPU) for item in operator.arguments]
        keywords = {key: to_torch(item, self.values, _CPU) for key, item in operator.keywords}
        with self._mode, _region(operator), saved_tensors_hooks(lambda t: self._keep(t, draft), _never):
            try:
                result = _call(draft, arguments, keywords)
            except Exception as error:
                raise CaptureError(
                    f"{draft.place}: {operator.name} fails on {self.micro_batch} samples: "
                    f"{str(error).splitlines()[0]}; see whether the model runs on a batch of this size by itself"
                ) from error
        self._check_writes(draft)
        results = result if isinstance(result, (tuple, list)) else [result]
        for out, value in zip(operator.outputs, results, strict=True):
            self.values[out] = value

    def _keep(self, tensor: Tensor, draft: Draft) -> None:
        self.saved.append(_Saved(tensor, tensor._version, draft))
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self.saved_bytes[-1] += tensor.untyped_storage().nbytes()

    def _check_writes(self, draft: Draft) -> None:
        for value in written_values(draft.operator):
            tensor = self.values[value]
            item = self._inputs.get(_storage(tensor)) if isinstance(tensor, Tensor) else None
            if item is not None and item.kind in _KINDS:
                raise CaptureError(
                    f"{draft.place}: {draft.operator.name} changes {_KINDS[item.kind]} in place ({item.name!r}); "
                    "work on a copy (.clone()) or use the operator without the underscore"
                )

    def check_end(self) -> None:
        """Raise CaptureError where the backward would fail, or would reach back into an earlier step."""
        for item in self.saved:
            if item.tensor._version != item.version:
                raise CaptureError(
                    f"{item.draft.place}: the backward of {item.draft.operator.name} needs a tensor that is changed in "
                    "place later on; work on a copy (.clone()) or use the operator without the underscore"
                )
        for source in self.graph.inputs:
            if source.kind is InputKind.BUFFER and self.values[source.value].requires_grad:
                raise CaptureError(
                    f"model: the buffer {source.name!r} is given a tensor that carries gradients; detach it (.detach())"
                )
        loss = self.values[self.graph.loss]
        if not loss.requires_grad:
            raise CaptureError("model: its loss does not depend on any trainable parameter; nothing would be learnt")

    def describe(self) -> tuple[Value, ...]:
        return tuple(_describe(self.values[value]) for value in range(len(self.values)))


def _describe(value: Any) -> Value:
    if not isinstance(value, Tensor):
        return Value(None, nominal=int(value))
    spec = TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return Value(spec, requires_grad=value.requires_grad)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing runs backward on fake tensors")


@contextmanager
def _region(operator: Operator) -> Iterator[None]:
    """Enter the modes that surround an operator in the model."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(not operator.no_grad))
        if operator.autocast_dtype == "off":
            stack.enter_context(torch.autocast("cpu", enabled=False))
        elif operator.autocast_dtype:
            stack.enter_context(torch.autocast("cpu", dtype=DTYPES[operator.autocast_dtype]))
        yield


def _call(draft: Draft, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Run one operator; a result whose shape depends on data gets its largest possible one."""
    name = draft.operator.name
    if name == "aten.nonzero.default":
        return _all_indices(arguments[0])
    if name == "aten.where.default":
        return _all_indices(arguments[0]).unbind(1)
    if name == "aten.masked_select.default":
        whole, mask = torch.broadcast_tensors(*arguments)  # type: ignore[no-untyped-call]
        return whole.reshape(-1).index_select(0, _all_indices(mask.reshape(-1)).squeeze(1))
    if name == "aten.index.Tensor":
        arguments[1] = list(_index_by_numbers(arguments[1]))
    return draft.run(*arguments, **keywords)


def _all_indices(mask: Tensor) -> Tensor:
    """Return what nonzero gives where everything is nonzero: (elements, dimensions) int64."""
    return torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device=_CPU)


def _index_by_numbers(indices: list[Tensor | None]) -> Iterator[Tensor | None]:
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            yield from _all_indices(index).unbind(1)
        else:
            yield index
