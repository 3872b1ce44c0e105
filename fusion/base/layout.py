"""Where a tensor's elements lie in memory, as plain data that can cross a wire."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Element type, shape, strides in elements, and the elements between a 64-byte boundary and the first.

    Both ends of an edge lay a tensor out alike, because kernels choose their order of additions by it.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment_offset: int = 0
