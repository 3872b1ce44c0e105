"""The header of a safetensors file, read with bounds checks and written for streaming; the bytes stay on the disk.

A file is 8 bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets) and the data. The
safetensors library accepts duplicate names and sizes that overflow, so files of others are read through this.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fusion.base.errors import DataError
from fusion.base.layout import MAX_RANK

#: Element types in files, by their name in the header: torch's name and bytes per element.
FILE_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
CODE_OF = {dtype: code for code, (dtype, _) in FILE_DTYPES.items()}
ELEMENT_BYTES = dict(FILE_DTYPES.values())

MAX_HEADER_BYTES = 100_000_000  #: the format's own limit
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where one tensor lies in a file."""

    dtype: str  #: torch's name
    shape: tuple[int, ...]
    begin: int  #: of its first byte, from the start of the file
    bytes: int


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a contiguous tensor of a dtype of FILE_DTYPES, by exact integers."""
    size = ELEMENT_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name; DataError with one line if it is not a whole one."""
    try:
        with path.open("rb") as file:

            def read(offset: int, count: int) -> bytes:
                file.seek(offset)
                return file.read(count)

            return read_header_from(str(path), file.seek(0, 2), read)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_header_from(what: str, file_bytes: int, read: Callable[[int, int], bytes]) -> dict[str, FileTensor]:
    """Return the tensors of a file of `file_bytes` bytes by name; `read(offset, count)` reads it, the header only.

    DataError, one line that begins with `what`, unless the tensors fill the file exactly.
    """
    if file_bytes < 8:
        raise DataError(f"{what} is no safetensors file: it has {file_bytes} bytes")
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise DataError(f"{what} is no safetensors file, or cut short: a header of {length} bytes does not fit")
    try:
        entries = json.loads(read(8, length), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is no safetensors file: its header is not valid ({str(error)[:80]})") from error
    if not isinstance(entries, dict):
        raise DataError(f"{what} is no safetensors file: its header is not an object")
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name] = _entry(entry, 8 + length, file_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{what}: tensor {name[:80]!r} has a bad entry: {str(error)[:80]}") from error
    _check_filled(what, tensors, 8 + length, file_bytes)
    return tensors


def _check_filled(what: str, tensors: Mapping[str, FileTensor], begin: int, file_bytes: int) -> None:
    position = begin
    for tensor in sorted(tensors.values(), key=lambda item: (item.begin, item.bytes)):
        if tensor.begin != position:
            raise DataError(f"{what}: its tensors overlap or leave a gap at byte {position}")
        position += tensor.bytes
    if position != file_bytes:
        raise DataError(f"{what}: its tensors end at byte {position}, the file at {file_bytes}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"two entries are named {name[:60]!r}")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def _entry(entry: Mapping[str, Any], data_start: int, file_bytes: int) -> FileTensor:
    code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code not in FILE_DTYPES:
        raise ValueError(f"unknown dtype {str(code)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise ValueError(f"the shape is not a list of at most {MAX_RANK} sizes")
    for number in (*shape, begin, end):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
            raise ValueError(f"{str(number)[:20]} is not a size")
    dtype, _ = FILE_DTYPES[code]
    need = tensor_bytes(dtype, tuple(shape))
    if end - begin != need:
        raise ValueError(f"{dtype} of shape {shape} needs {need} bytes, its offsets hold {end - begin}")
    if data_start + end > file_bytes:
        raise ValueError(f"it ends at byte {data_start + end} of a file of {file_bytes}; the file is cut short")
    return FileTensor(dtype, tuple(shape), data_start + begin, need)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the start of a file that holds the tensors (name, torch dtype, shape) one after the other.

    The data of each tensor then follows contiguously in the same order. The data starts on a 64-byte boundary.
    """
    entries, offset = {}, 0
    for name, dtype, shape in tensors:
        end = offset + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": CODE_OF[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
