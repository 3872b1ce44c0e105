"""The call convention: how a batch reaches `forward`, and where the loss comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion.base.errors import CaptureError
from fusion.capture.guards import guarded

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]

#: The name of the user's model inside the module that is exported.
MODEL = "model"

_KINDS_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_THREE_WAYS = (
    "return a scalar from forward, return an output with a .loss field (Hugging Face models do when the batch holds "
    "'labels'), or pass loss=, a function of (outputs, batch)"
)


@dataclass(frozen=True, slots=True)
class Call:
    """Which fields of the batch `forward` takes, and how."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]


def plan_call(model: nn.Module, fields: tuple[str, ...]) -> Call:
    """Decide how `fields` are passed to `model.forward`. Raise CaptureError naming an argument that is missing."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = tuple(p.name for p in parameters if p.kind in _KINDS_BY_NAME and p.name in fields)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if named:
        missing = [p.name for p in required if p.name not in named]
        if missing:
            raise _missing(missing[0], fields)
        return Call((), named)
    by_position = [p.name for p in required if p.kind is not p.KEYWORD_ONLY]
    for name in [p.name for p in required if p.kind is p.KEYWORD_ONLY] + by_position[len(fields) :]:
        raise _missing(name, fields)
    if not by_position:
        raise CaptureError(
            f"batch: none of its fields ({_listed(fields)}) is an argument of forward; "
            "name the fields as forward names its arguments"
        )
    return Call(fields[: len(by_position)], ())


def _missing(argument: str, fields: tuple[str, ...]) -> CaptureError:
    return CaptureError(
        f"batch: forward needs the argument {argument!r}, but the fields are {_listed(fields)}; "
        f"add a field {argument!r} or give the argument a default"
    )


def _listed(fields: tuple[str, ...]) -> str:
    return ", ".join(repr(field) for field in fields)


class Step(nn.Module):
    """The model and its loss as one module from the batch's fields to a scalar."""

    def __init__(self, model: nn.Module, fields: tuple[str, ...], call: Call, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.fields = fields
        self.call = call
        # not registered as a submodule: its tensors are constants, which `Captured` carries under names of their own
        self._loss = (loss,)
        self.training = model.training

    def forward(self, fields: tuple[Tensor, ...]) -> Tensor:
        """Return the scalar loss of one micro-batch."""
        batch = dict(zip(self.fields, fields, strict=True))
        arguments = (batch[name] for name in self.call.positional)
        keywords = {name: batch[name] for name in self.call.keywords}
        with guarded():
            return find_loss(self.model(*arguments, **keywords), batch, self._loss[0])


def find_loss(outputs: Any, batch: Mapping[str, Tensor], loss: Loss | None) -> Tensor:
    """Return the scalar loss: from `loss`, or the outputs themselves, or their `.loss`. Raise CaptureError if none."""
    if loss is not None:
        return _check_scalar(loss(outputs, batch), "loss: the function returned")
    if isinstance(outputs, Tensor):
        return _check_scalar(outputs, "model: without a loss function, forward must return the loss, but it returned")
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if value is None:
        raise CaptureError(f"model: no loss found in its {type(outputs).__name__} output; {_THREE_WAYS}")
    return _check_scalar(value, "model: the .loss field of its output is")


def _check_scalar(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise CaptureError(f"{what} a {type(value).__name__}; allowed: a scalar tensor")
    if value.dim() != 0 or not value.is_floating_point():
        shown = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {_shape(value)}"
        raise CaptureError(f"{what} a {shown}; allowed: a floating-point scalar, such as its .mean(); {_THREE_WAYS}")
    return value


def _shape(value: Tensor) -> str:
    return f"({', '.join(str(size) if isinstance(size, int) else 'batch' for size in value.shape)})"


def check_loss(loss: Loss | None) -> None:
    """Raise CaptureError if the loss has parameters to train: they would be frozen without a word."""
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise CaptureError("loss: it has parameters of its own; make it part of the model, so that they are trained")


def example_fields(batch: Mapping[str, Tensor], rows: int) -> tuple[Tensor, ...]:
    """Return the batch's tensors with exactly `rows` samples each, repeating samples where there are fewer."""
    samples = len(next(iter(batch.values())))
    picked = torch.arange(rows) % samples
    return tuple(tensor.detach().cpu().index_select(0, picked) for tensor in batch.values())
