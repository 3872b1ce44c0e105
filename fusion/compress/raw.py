"""The codec "none": a tensor's elements as they are, and its exact place in memory as a layout.

Kernels choose their order of additions by strides and alignment, so an edge that changed them would change the last
bits of a loss. Dense tensors travel in their storage order. Dimensions of stride 0 (an expanded gradient) travel once.
Tensors with gaps travel dense, and the receiver opens the same gaps again, unless they would cost more than four times
the memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fusion.base.errors import WireError
from fusion.base.layout import MAX_RANK, TensorLayout
from fusion.graph.dag import DTYPE_BYTES

MAX_GAP_FACTOR = 4  #: largest memory span of a tensor with gaps, in multiples of its elements
ALIGNMENT_BYTES = 64


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return where the tensor's elements lie.

    A tensor with too large gaps, or whose elements overlap, has the strides of its dense copy.
    """
    strides = tuple(tensor.stride())
    shape = tuple(tensor.shape)
    if _span(shape, strides) > MAX_GAP_FACTOR * max(1, tensor.numel()) or _overlaps(shape, strides):
        strides = dense_strides(shape)
    offset = (tensor.data_ptr() % ALIGNMENT_BYTES) // tensor.element_size() if tensor.device.type == "cpu" else 0
    return TensorLayout(str(tensor.dtype).removeprefix("torch."), shape, strides, offset)


def encode(tensor: torch.Tensor) -> tuple[TensorLayout, memoryview]:
    """Return the layout and the elements: once per distinct element, in the order of their strides, without a copy
    where the memory is already like that."""
    layout, flat = flatten(tensor)
    return layout, memory_of(flat.to("cpu"))


def flatten(tensor: torch.Tensor, layout: TensorLayout | None = None) -> tuple[TensorLayout, torch.Tensor]:
    """Return the layout, and the elements as `encode` orders them: 1-D, on the tensor's device.

    A `layout` of the same shape is used instead of the tensor's own.
    """
    tensor = tensor.detach()
    layout = layout or layout_of(tensor)
    return layout, _distinct(tensor, layout).contiguous().view(-1)


def payload_bytes(layout: TensorLayout) -> int:
    """Return the size of the payload that belongs to a layout, by exact integers."""
    count = 1
    for size, stride in zip(layout.shape, layout.strides, strict=True):
        count *= 1 if stride == 0 and size > 1 else size
    return count * DTYPE_BYTES[layout.dtype]


def decode(layout: TensorLayout, payload: memoryview | bytes | bytearray, device: str = "cpu") -> torch.Tensor:
    """Return the tensor of `layout` filled from `payload`; WireError if they do not fit together."""
    check_layout(layout)
    if len(payload) != payload_bytes(layout):
        raise WireError(f"payload has {len(payload)} bytes, its layout needs {payload_bytes(layout)}")
    place = Place(layout)
    if len(payload):
        place.fill(_tensor_over(payload, place.tensor.dtype))
    return place.tensor if device == "cpu" else place.tensor.to(device, non_blocking=True)


class Place:
    """A tensor of a layout (checked before), made but not filled.

    `dense` is its memory in storage order and `spare` more elements behind it; None where the layout has gaps.
    """

    def __init__(self, layout: TensorLayout, device: str | torch.device = "cpu", spare: int = 0) -> None:
        self._layout = layout
        span, first = _span(layout.shape, layout.strides), layout.alignment_offset
        base = torch.empty(span + first + spare, dtype=getattr(torch, layout.dtype), device=device)
        self.tensor = base.as_strided(layout.shape, layout.strides, first)
        distinct = _distinct(self.tensor, layout)
        self.dense = base[first:] if distinct.is_contiguous() and distinct.numel() == span else None

    def fill(self, flat: torch.Tensor) -> None:
        """Write distinct elements in storage order, as `flatten` gives them."""
        target = _distinct(self.tensor, self._layout)
        target.copy_(flat.view(target.shape))

    def fill_in_order(self, flat: torch.Tensor) -> None:
        """Write all elements, given in the order of the indices. The layout repeats none."""
        self.tensor.copy_(flat.view(self.tensor.shape))


def _distinct(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """Return a view of the tensor with each distinct element once, its dimensions in the order of the strides."""
    order = _storage_order(layout)
    view = tensor.permute(order)
    for dim, source in enumerate(order):
        if layout.strides[source] == 0 and layout.shape[source] > 1:
            view = view.narrow(dim, 0, 1)
    return view


def check_layout(layout: TensorLayout) -> None:
    """Raise WireError unless a tensor of this layout can be made within the bounds of this codec."""
    if layout.dtype not in DTYPE_BYTES:
        raise WireError(f"dtype {layout.dtype[:40]!r} is unknown")
    if len(layout.shape) > MAX_RANK or len(layout.shape) != len(layout.strides):
        raise WireError(f"rank {len(layout.shape)} with {len(layout.strides)} strides; at most {MAX_RANK} of each")
    if any(not 0 <= size < 2**40 for size in layout.shape) or any(not 0 <= stride < 2**40 for stride in layout.strides):
        raise WireError(f"shape {layout.shape} with strides {layout.strides} is out of range")
    if not 0 <= layout.alignment_offset < ALIGNMENT_BYTES:
        raise WireError(f"alignment offset {layout.alignment_offset} is not in 0..{ALIGNMENT_BYTES - 1}")
    elements = 1
    for size in layout.shape:
        elements *= size
    if _span(layout.shape, layout.strides) > MAX_GAP_FACTOR * max(1, elements):
        raise WireError(f"strides {layout.strides} of shape {layout.shape} span too much memory")
    if _overlaps(layout.shape, layout.strides):
        raise WireError(f"strides {layout.strides} of shape {layout.shape} put elements over each other")


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    return tuple(torch.empty(shape, device="meta").stride())


def unrepeated(layout: TensorLayout) -> TensorLayout:
    """Return the layout, or a dense one where it repeats elements (stride 0)."""
    if all(stride or size < 2 for size, stride in zip(layout.shape, layout.strides, strict=True)):
        return layout
    return TensorLayout(layout.dtype, layout.shape, dense_strides(layout.shape))


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a step in one dimension may land inside what the smaller strides span; repetition (stride 0) is none."""
    if 0 in shape:
        return False
    end = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if 0 < stride < end:
            return True
        end += stride * (size - 1)
    return False


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to one past the last in memory."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _storage_order(layout: TensorLayout) -> list[int]:
    return sorted(range(len(layout.shape)), key=lambda dim: (-layout.strides[dim], dim))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory, writable; the tensor lives as long as the view does."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    buffer: Any = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    buffer._keep_alive = tensor
    return memoryview(buffer).cast("B")


def _tensor_over(payload: memoryview | bytes | bytearray, dtype: torch.dtype) -> torch.Tensor:
    view = memoryview(payload)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=dtype)
