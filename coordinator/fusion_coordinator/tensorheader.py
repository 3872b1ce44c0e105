"""Reads the header of a safetensors file in the blob store: names, types and shapes, without its content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from fusion.base.errors import DataError
from fusion.base.units import MIB
from fusion.graph.dag import DTYPE_BYTES

MAX_HEADER_BYTES = 100 * MIB
MAX_RANK = 16
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type (as graphs call it) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(what: str, size_bytes: int, read: Callable[[int, int], bytes]) -> dict[str, TensorInfo]:
    """Return the tensors of a file of `size_bytes` by name; `read(offset, count)` reads it.

    DataError, naming `what`, for anything but a header whose tensors fill the file exactly.
    """
    if size_bytes < 10:
        raise DataError(f"{what}: {size_bytes} bytes are no safetensors file")
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise DataError(f"{what}: a header of {length} bytes in {size_bytes} is no safetensors file")
    try:
        header = json.loads(read(8, length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: its safetensors header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise DataError(f"{what}: its safetensors header is no table")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        tensors[name], span = _entry(f"{what}: tensor {name[:80]!r}", entry)
        spans.append(span)
    _check_spans(what, sorted(spans), size_bytes - 8 - length)
    return tensors


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(what: str, entry: object) -> tuple[TensorInfo, tuple[int, int]]:
    if not isinstance(entry, dict):
        raise DataError(f"{what} is not described")
    dtype, shape, offsets = entry.get("dtype"), _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DataError(f"{what}: dtype {str(dtype)[:20]!r} must be one of {', '.join(_DTYPES)}")
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > MAX_RANK:
        raise DataError(f"{what}: shape or data_offsets are malformed")
    info = TensorInfo(_DTYPES[dtype], tuple(shape))
    count = 1
    for size in shape:
        count *= size
    if offsets[1] - offsets[0] != count * DTYPE_BYTES[info.dtype]:
        raise DataError(f"{what}: {offsets[1] - offsets[0]} bytes for {info.dtype} of shape {list(info.shape)}")
    return info, (offsets[0], offsets[1])


def _naturals(value: object) -> list[int] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return value
    return None


def _check_spans(what: str, spans: list[tuple[int, int]], data_bytes: int) -> None:
    position = 0
    for begin, end in spans:
        if begin != position:
            raise DataError(f"{what}: its tensors overlap or leave a gap at byte {position}")
        position = end
    if position != data_bytes:
        raise DataError(f"{what}: its tensors end at byte {position}, the file at {data_bytes}")
