"""Micro-batches out of memory-mapped safetensors files: the fields of the samples whose ids are asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import DataError
from fusion.protocol.job import DataField, DataSpec, RowSource, WindowSource
from fusion.protocol.tensorheader import FileTensor, read_header

Array = npt.NDArray[Any]

#: Integer types whose every value the type on the right can hold: token files are stored compactly and widened here.
_WIDER = {
    "bool": ("uint8", "int8", "int16", "int32", "int64"),
    "uint8": ("int16", "int32", "int64"),
    "int8": ("int16", "int32", "int64"),
    "uint16": ("int32", "int64"),
    "int16": ("int32", "int64"),
    "uint32": ("int64",),
    "int32": ("int64",),
}


def may_widen(stored: str, wanted: str) -> bool:
    """Whether a field of dtype `wanted` may be read from a tensor of dtype `stored`."""
    return stored == wanted or wanted in _WIDER.get(stored, ())


def files_needed(spec: DataSpec, fields: Collection[str]) -> list[int]:
    """Return the indices of the files that hold the named fields, ascending: a stage fetches only those."""
    return sorted({item.source.file for item in spec.fields if item.name in fields})


@dataclass(frozen=True, slots=True)
class _Reader:
    """One field with the array that it is read from; bfloat16 lies in an array of int16."""

    spec: DataField
    array: Array
    stored: str

    def read(self, ids: Array) -> torch.Tensor:
        """Return the field of the samples `ids`: a contiguous tensor (len(ids), *sample shape)."""
        source = self.spec.source
        if isinstance(source, RowSource):
            values = self.array[ids]
        else:
            (length,) = self.spec.sample.shape
            values = np.empty((len(ids), length), dtype=self.array.dtype)
            for row, sample in enumerate(ids):
                start = int(sample) * source.stride + source.offset
                values[row] = self.array[start : start + length]
        return as_tensor(values, self.stored, self.spec.sample.dtype)


def as_tensor(values: Array, stored: str, wanted: str = "") -> torch.Tensor:
    """Return a file's array as a contiguous tensor of dtype `wanted` (default: as stored), in memory of its own.

    An array that may be written to is given away: the tensor may share its memory.
    """
    if stored == "bfloat16":
        return torch.from_numpy(_owned(values, "int16")).view(torch.bfloat16)
    if stored == "bool":
        values = values != 0
    return torch.from_numpy(_owned(values, wanted or stored))


def _owned(values: Array, dtype: str) -> Array:
    converted = np.asarray(values, dtype=dtype, order="C")
    return converted if converted.flags.writeable else converted.copy()


class DataSet:
    """An open data set. Reading is a pure function of the ids; several threads may read at once."""

    def __init__(self, samples: int, readers: dict[str, _Reader]) -> None:
        self.samples = samples
        self._readers = readers

    def batch(self, fields: Collection[str], ids: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return each field of the samples `ids`, stacked: (len(ids), *sample shape), on the CPU.

        DataError for a field or an id that the data set does not have.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.samples:
            raise DataError(f"the data has samples 0..{self.samples - 1}, asked for {int(ids.min())}..{int(ids.max())}")
        unknown = [name for name in fields if name not in self._readers]
        if unknown:
            raise DataError(f"the data has no field {unknown[0]!r}; it has {', '.join(sorted(self._readers))}")
        return {name: self._readers[name].read(ids) for name in fields}


def open_data(spec: DataSpec, files: Sequence[Path | None], fields: Collection[str] | None = None) -> DataSet:
    """Open a data set whose file i lies at files[i]; only `fields` (None: all) are opened.

    A path may be None if no field of `fields` lies in it (see `files_needed`). DataError, one line, for a file or a
    tensor that is missing, cut short, too short for the samples, or of another dtype or shape.
    """
    if len(files) != len(spec.files):
        raise DataError(f"the data has {len(spec.files)} files, {len(files)} paths were given")
    headers: dict[int, dict[str, FileTensor]] = {}
    readers = {}
    for item in spec.fields:
        if fields is not None and item.name not in fields:
            continue
        path = files[item.source.file]
        if path is None:
            raise DataError(f"field {item.name!r} lies in file {item.source.file}, which was not fetched")
        if item.source.file not in headers:
            headers[item.source.file] = read_header(path)
        readers[item.name] = _open_field(item, path, headers[item.source.file], spec.samples)
    return DataSet(spec.samples, readers)


def _open_field(item: DataField, path: Path, header: dict[str, FileTensor], samples: int) -> _Reader:
    where = f"field {item.name!r} in {path}"
    tensor = header.get(item.source.tensor)
    if tensor is None:
        known = ", ".join(sorted(header)[:8]) or "none"
        raise DataError(f"{where}: there is no tensor {item.source.tensor!r}; the file has {known}")
    if not may_widen(tensor.dtype, item.sample.dtype):
        raise DataError(f"{where}: the tensor is {tensor.dtype}, the job wants {item.sample.dtype}")
    _check_shape(where, item, tensor, samples)
    return _Reader(item, map_tensor(path, tensor), tensor.dtype)


def _check_shape(where: str, item: DataField, tensor: FileTensor, samples: int) -> None:
    sample = item.sample.shape
    if isinstance(item.source, WindowSource):
        source = item.source
        if len(sample) != 1 or len(tensor.shape) != 1 or source.stride < 1:
            raise DataError(f"{where}: windows need a tensor and a sample of one dimension, and a stride from 1")
        need = (samples - 1) * source.stride + source.offset + sample[0]
        if need > tensor.shape[0]:
            raise DataError(f"{where}: {samples} windows need {need} tokens, the file has {tensor.shape[0]}")
    elif not tensor.shape or tensor.shape[1:] != sample:
        raise DataError(f"{where}: rows have shape {tensor.shape[1:]}, the job wants {sample}")
    elif tensor.shape[0] < samples:
        raise DataError(f"{where}: {tensor.shape[0]} rows, the job wants {samples} samples")


def map_tensor(path: Path, tensor: FileTensor) -> Array:
    """Return a read-only view of a tensor in a file, memory-mapped; bfloat16 as int16."""
    dtype = np.dtype({"bfloat16": "int16", "bool": "uint8"}.get(tensor.dtype, tensor.dtype)).newbyteorder("<")
    if not tensor.bytes:
        return np.empty(tensor.shape, dtype=dtype)
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return np.ndarray(tensor.shape, dtype=dtype, buffer=mapped, offset=tensor.begin)
