"""A model's parameters and buffers: canonical names, tied tensors, and fake stand-ins during capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusion.base.errors import CaptureError
from fusion.graph.dag import DTYPE_BYTES, InputKind

BUFFER_PREFIX = "$buffer."

_REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Weight:
    """One tensor of the model, under all of its names."""

    name: str  #: canonical: the first of its names in the state_dict; "$buffer.<name>" if in none
    kind: InputKind
    tensor: Tensor
    aliases: list[str] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        """Whether the optimizer is to change it."""
        return self.kind is InputKind.PARAMETER and self.tensor.requires_grad


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model's tensors, each tied tensor once, in the order of the state_dict."""

    weights: tuple[Weight, ...]
    by_path: dict[str, Weight]  #: by every path in the module tree, such as "head.weight"

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Collect the tensors of `model`. Raise CaptureError for those that cannot be shipped or trained faithfully."""
        persistent = {name: order for order, name in enumerate(model.state_dict(keep_vars=True))}
        found: dict[tuple[object, ...], Weight] = {}
        by_path: dict[str, Weight] = {}
        for path, tensor in _named_tensors(model, persistent):
            _check_tensor(path, tensor)
            kind = InputKind.PARAMETER if isinstance(tensor, nn.Parameter) else InputKind.BUFFER
            name = path if path in persistent else BUFFER_PREFIX + path
            weight = found.get(_identity(tensor))
            if weight is None:
                weight = found[_identity(tensor)] = Weight(name, kind, tensor)
            else:
                _tie(weight, name, kind, tensor)
            by_path[path] = weight
        weights = tuple(found.values())
        if not any(weight.trainable for weight in weights):
            raise CaptureError("model: it has no parameter with requires_grad=True; unfreeze what is to be trained")
        _check_overlaps(weights)
        return cls(weights, by_path)


def _named_tensors(model: nn.Module, persistent: dict[str, int]) -> list[tuple[str, Tensor]]:
    """List (path, tensor): those of the state_dict in its order, then the non-persistent buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    last = len(persistent)
    return sorted(named, key=lambda item: persistent.get(item[0], last))


def _check_tensor(path: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(f"{path}: its shape is not known yet; run the lazy module once on a batch first")
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise CaptureError(
            f"{path}: a {type(tensor).__name__} with layout {tensor.layout} cannot be shipped; "
            "use a plain dense tensor (torch.Tensor or nn.Parameter)"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise CaptureError(f"{path}: dtype {dtype} is not supported; allowed: {', '.join(DTYPE_BYTES)}")
    if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(f"{path}: it has a gradient hook, which cannot be captured; remove the hook")


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Two tensors with the same identity are one tensor under two names (tied weights)."""
    if tensor.numel() == 0:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _tie(weight: Weight, name: str, kind: InputKind, tensor: Tensor) -> None:
    if tensor.requires_grad != weight.tensor.requires_grad:
        raise CaptureError(
            f"{name}: it shares its memory with {weight.name!r}, but only one of the two has requires_grad=True; "
            "set both alike or give one a copy (.clone())"
        )
    if weight.kind is InputKind.BUFFER and kind is InputKind.PARAMETER:
        weight.kind, weight.tensor = kind, tensor
    if weight.name.startswith(BUFFER_PREFIX) and not name.startswith(BUFFER_PREFIX):
        weight.name, name = name, weight.name
    weight.aliases.append(name)


def _check_overlaps(weights: tuple[Weight, ...]) -> None:
    """Raise CaptureError where a trainable parameter shares memory with another tensor that is not the same view."""
    by_storage: dict[int, list[tuple[int, int, Weight]]] = {}
    for weight in weights:
        tensor = weight.tensor
        if tensor.numel() == 0:
            continue
        first = int(tensor.storage_offset())
        last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((first, last, weight))
    for spans in by_storage.values():
        for (start, end, one), (first, last, other) in combinations(spans, 2):
            if start <= last and first <= end and (one.trainable or other.trainable):
                raise CaptureError(
                    f"{other.name}: it is a different view of the memory of {one.name!r}; "
                    "compute the view in forward (for example F.linear(x, weight.t())) or give it a copy (.clone())"
                )


def stand_in(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake CPU tensor of the same type and shape, which holds no memory. Nodes get weights contiguous."""
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextmanager
def stand_ins(model: nn.Module, weights: Weights, mode: FakeTensorMode) -> Iterator[None]:
    """Replace every tensor of `model` by a fake CPU twin inside the block.

    So the capture neither needs the weights (they may be on the meta device or a GPU) nor can change them.
    """
    fakes = {id(weight): stand_in(weight.tensor, mode) for weight in weights.weights}
    before = [_Before.of(module) for module in model.modules()]
    try:
        for prefix, module in model.named_modules():
            for name, _ in _own_tensors(module):
                weight = weights.by_path[f"{prefix}.{name}" if prefix else name]
                # setattr, because some modules (LSTM) keep a second list of their parameters up to date in it
                setattr(module, name, fakes[id(weight)])
            for name, value in list(module.__dict__.items()):
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    module.__dict__[name] = stand_in(value, mode) if value.is_meta else value.detach().cpu()
        yield
    finally:
        for state in before:
            state.restore()


@dataclass(frozen=True, slots=True)
class _Before:
    """A module's attributes, parameters, buffers and submodules before its forward ran."""

    module: nn.Module
    attributes: dict[str, Any]
    tensors: list[tuple[str, Tensor]]
    registered: dict[str, dict[str, Any]]
    non_persistent: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        registered = {name: dict(getattr(module, name)) for name in _REGISTERED}
        return cls(
            module, dict(module.__dict__), _own_tensors(module), registered, set(module._non_persistent_buffers_set)
        )

    def restore(self) -> None:
        """Put everything back, and remove what forward added."""
        _restore_dict(self.module.__dict__, self.attributes)
        for name, tensor in self.tensors:
            setattr(self.module, name, tensor)
        for name, content in self.registered.items():
            _restore_dict(getattr(self.module, name), content)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.non_persistent)


def _restore_dict(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]
