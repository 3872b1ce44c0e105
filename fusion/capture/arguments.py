"""Constants among an operator's arguments: from torch's objects to the OP-DAG's plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion.graph.dag import DTYPE_BYTES, Argument, Device, DType, Layout, MemoryFormat, Ref

MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}

_MEMORY_FORMAT_NAMES = {value: name for name, value in MEMORY_FORMATS.items()}
_DTYPE_NAMES = {value: name for name, value in DTYPES.items()}


def constant(value: Any) -> Argument:
    """Return `value` as plain data. Raise ValueError, saying what it is, if the OP-DAG has no place for it."""
    # bool is an int in Python, so the exact type decides
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]
    if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
        return DType(_DTYPE_NAMES[value])
    if isinstance(value, torch.device):
        return Device()
    if isinstance(value, torch.memory_format) and value in _MEMORY_FORMAT_NAMES:
        return MemoryFormat(_MEMORY_FORMAT_NAMES[value])
    if value is torch.strided:
        return Layout("strided")
    raise ValueError(f"an argument {value!r} of type {type(value).__name__}")


def to_torch(argument: Argument, values: Mapping[int, Any], device: torch.device) -> Any:
    """Return what to pass to torch for `argument`; `values` holds the tensors and integers by their id."""
    if isinstance(argument, Ref):
        return values[argument.value]
    if isinstance(argument, tuple):
        return [to_torch(item, values, device) for item in argument]
    if isinstance(argument, DType):
        return DTYPES[argument.name]
    if isinstance(argument, Device):
        return device
    if isinstance(argument, MemoryFormat):
        return MEMORY_FORMATS[argument.name]
    if isinstance(argument, Layout):
        return torch.strided
    return argument
