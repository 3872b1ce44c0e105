"""The one call that turns a model, its loss and a batch into an OP-DAG with shapes and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fusion.base.errors import CaptureError
from fusion.capture.drafts import DraftGraph, DraftInput, tidy
from fusion.capture.entry import Loss, Step, check_loss, example_fields, plan_call
from fusion.capture.export import Exported, explain, export_step, neutral_state
from fusion.capture.guards import NotCapturableError, check_modules
from fusion.capture.lower import NeedsFixedBatchError, lower
from fusion.capture.measure import measure
from fusion.capture.weights import Weights, stand_ins
from fusion.graph.check import check_graph
from fusion.graph.costs import operator_cost
from fusion.graph.dag import DTYPE_BYTES, Graph, Input, InputKind


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as data."""

    graph: Graph
    #: Every tensor of the model by its canonical name, on the CPU and detached, sharing the model's memory where it
    #: can (on the meta device where the model is); "$buffer.<name>" for buffers that are not in the state_dict and
    #: "$constant.<n>" for tensor literals. The graph's inputs have these names, and list those of tied weights.
    tensors: dict[str, Tensor]


def capture(model: nn.Module, batch: Mapping[str, Tensor], *, loss: Loss | None = None, micro_batch: int) -> Captured:
    """Capture one training micro-batch of `model`, forward and loss, as an OP-DAG.

    `batch` maps field names to tensors whose first dimension counts samples (any number of them). Fields that
    `model.forward` has arguments for are passed by name; if it has none, they are passed in order. The loss is
    `loss(outputs, batch)`, or the model's own scalar output, or the `.loss` of its output. Shapes and costs hold at
    `micro_batch` samples; if `graph.dynamic_batch`, any other number of samples can be run too.

    The modes of the modules are taken as they are (call `model.train()` first); the model is left unchanged, and
    neither its weights nor the batch's values matter. Raise CaptureError, with the model's line, if it cannot be done.
    """
    _check_call(batch, micro_batch)
    check_loss(loss)
    check_modules(model)
    fields = tuple(batch)
    step = Step(model, fields, plan_call(model, fields), loss)
    with neutral_state():
        weights = Weights.of(model)
        graph, dynamic = _capture_operators(step, weights, batch, micro_batch)
        _check_names(graph.inputs)
        finished = _finish(graph, micro_batch, dynamic)
        check_graph(finished)
        return Captured(finished, _tensors(weights, graph.inputs))


def _check_call(batch: Mapping[str, Tensor], micro_batch: int) -> None:
    if micro_batch < 1:
        raise CaptureError(f"micro_batch: {micro_batch} is not allowed; give at least 1 sample")
    if not batch:
        raise CaptureError("batch: it has no fields; give a mapping of field names to tensors")
    samples: dict[str, int] = {}
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) == 0:
            raise CaptureError(
                f"batch: field {name!r} must be a tensor whose first dimension counts samples, at least 1"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise CaptureError(f"batch: field {name!r} has dtype {dtype}; allowed: {', '.join(DTYPE_BYTES)}")
        samples[name] = len(tensor)
    if len(set(samples.values())) > 1:
        raise CaptureError(f"batch: the first dimension must be the same in every field, but is {samples}")
    if torch.get_default_dtype() is not torch.float32:
        raise CaptureError(
            f"torch.get_default_dtype(): {torch.get_default_dtype()}; nodes compute with torch.float32 as the default: "
            "call torch.set_default_dtype(torch.float32) and convert the model itself, for example model.double()"
        )


def _capture_operators(
    step: Step, weights: Weights, batch: Mapping[str, Tensor], micro_batch: int
) -> tuple[DraftGraph, bool]:
    """Return the operators, and whether they hold for every batch size: tried first, then with the size fixed."""
    fields = tuple(batch)
    # one sample would be taken for a broadcast dimension
    exported = _try_export(step, weights, example_fields(batch, max(2, micro_batch)))
    if exported is not None:
        try:
            return tidy(lower(exported, weights, fields)), True
        except NeedsFixedBatchError:
            pass
    exported = _export(step, weights, example_fields(batch, micro_batch), dynamic=False)
    return tidy(lower(exported, weights, fields)), False


def _try_export(step: Step, weights: Weights, fields: tuple[Tensor, ...]) -> Exported | None:
    """Return the model exported for any batch size, or None where it insists on the size that it saw."""
    try:
        return _export(step, weights, fields, dynamic=True)
    except CaptureError as error:
        if error.__cause__ is None or isinstance(error.__cause__, NotCapturableError):
            raise
        return None  # a real fault shows again with the size fixed


def _export(step: Step, weights: Weights, fields: tuple[Tensor, ...], *, dynamic: bool) -> Exported:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with stand_ins(step.model, weights, mode):
            return export_step(step, fields, dynamic=dynamic)
    except CaptureError:
        raise
    except Exception as error:
        raise explain(error, step.model) from error


def _check_names(inputs: tuple[DraftInput, ...]) -> None:
    seen: dict[str, DraftInput] = {}
    for item in inputs:
        if item.name in seen:
            raise CaptureError(f"batch: field {item.name!r} has the name of a {seen[item.name].kind}; rename the field")
        seen[item.name] = item


def _finish(graph: DraftGraph, micro_batch: int, dynamic: bool) -> Graph:
    measured = measure(graph, micro_batch)
    operators = tuple(
        replace(draft.operator, cost=operator_cost(draft.operator, measured.values, saved))
        for draft, saved in zip(graph.drafts, measured.saved_bytes, strict=True)
    )
    inputs = tuple(Input(item.name, item.kind, item.value, item.aliases) for item in graph.inputs)
    return Graph(measured.values, inputs, operators, graph.loss, micro_batch, dynamic)


def _tensors(weights: Weights, inputs: tuple[DraftInput, ...]) -> dict[str, Tensor]:
    found = {weight.name: weight.tensor for weight in weights.weights}
    for item in inputs:
        if item.kind is InputKind.CONSTANT and item.tensor is not None:
            found[item.name] = item.tensor
    return {name: _plain(tensor) for name, tensor in found.items()}


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()
