"""Samples as rows of tensors: in memory, in .npy files, or in a .safetensors file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion.base.errors import DataError
from fusion.graph.dag import DTYPE_BYTES, TensorSpec
from fusion.job.source import Array, Source, StoredArray, held_out, write_arrays
from fusion.protocol.job import DataField, DataFile, DataSpec, RowSource
from fusion.protocol.tensorheader import read_header
from fusion.runtime.data import as_tensor, map_tensor


class TensorData(Source):
    """Sample i is row i of every tensor.

    source: a dict from field name to a tensor, an array or the path of a .npy file (memory-mapped); or the path of a
        .safetensors file.
    fields: of a .safetensors file, which of its tensors to use: a dict from field name to tensor name, or a list of
        names. Default: all of them.

    DataError if it is empty, if the numbers of rows differ, or for an element type that tensors here cannot have.
    """

    def __init__(
        self,
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        fields: Mapping[str, str] | Collection[str] | None = None,
    ) -> None:
        self._file: Path | None = None
        self._tensor_of: dict[str, str] = {}
        if isinstance(source, Mapping):
            if fields is not None:
                raise DataError("fields is for a .safetensors file; of a dict of tensors, give only those to use")
            self._arrays = {_name(name): _stored(name, value) for name, value in source.items()}
        else:
            self._file = Path(source)
            self._arrays = self._map_file(self._file, fields)
        self.samples = _rows(self._arrays)

    def _map_file(self, path: Path, fields: Mapping[str, str] | Collection[str] | None) -> dict[str, StoredArray]:
        header = read_header(path)
        if fields is None:
            fields = sorted(header)
        self._tensor_of = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
        arrays = {}
        for name, tensor in self._tensor_of.items():
            if tensor not in header:
                raise DataError(f"field {name!r}: {path} has no tensor {tensor!r}; it has {', '.join(sorted(header))}")
            if header[tensor].dtype not in DTYPE_BYTES:
                raise DataError(f"field {name!r}: tensors of {header[tensor].dtype} cannot be fed to a model")
            arrays[name] = StoredArray(header[tensor].dtype, map_tensor(path, header[tensor]))
        return arrays

    @classmethod
    def _of(cls, arrays: dict[str, StoredArray]) -> TensorData:
        made = cls.__new__(cls)
        made._file, made._tensor_of, made._arrays = None, {}, arrays
        made.samples = _rows(arrays)
        return made

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def split(self, fraction: float) -> tuple[TensorData, TensorData]:
        """Return (train, eval): the last `fraction` of the rows are held out."""
        border = self.samples - held_out(self.samples, fraction)
        head = {name: StoredArray(item.dtype, item.array[:border]) for name, item in self._arrays.items()}
        tail = {name: StoredArray(item.dtype, item.array[border:]) for name, item in self._arrays.items()}
        return self._of(head), self._of(tail)

    def _chosen(self, fields: Collection[str]) -> dict[str, StoredArray]:
        return {name: item for name, item in self._arrays.items() if name in fields}

    def describe(self, fields: Collection[str]) -> DataSpec:
        items = []
        for number, (name, item) in enumerate(self._chosen(fields).items()):
            source = RowSource(number, name) if self._file is None else RowSource(0, self._tensor_of[name])
            items.append(DataField(name, TensorSpec(item.dtype, item.array.shape[1:]), source))
        files = 1 if self._file is not None else len(items)
        return DataSpec(tuple(items), (DataFile(),) * files, self.samples)

    def first(self, count: int) -> dict[str, torch.Tensor]:
        rows = np.arange(count) % self.samples
        return {name: as_tensor(item.array[rows], item.dtype) for name, item in self._arrays.items()}

    def write(self, directory: Path, stem: str, fields: Collection[str]) -> tuple[Path | None, ...]:
        """Write the named fields into one file each, so that a stage fetches only those that it reads.

        A .safetensors file that is used whole is not copied.
        """
        if self._file is not None:
            return (self._file,)
        paths = []
        for number, (name, item) in enumerate(self._chosen(fields).items()):
            paths.append(directory / f"{stem}-{number}.safetensors")
            write_arrays(paths[-1], {name: item})
        return tuple(paths)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise DataError(f"field names are non-empty strings, got {name!r:.40}")
    return name


def _stored(name: str, value: Any) -> StoredArray:
    if isinstance(value, str | os.PathLike):
        value = _load(name, Path(value))
    if isinstance(value, torch.Tensor):
        return _from_tensor(value)
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"field {name!r} must be a tensor, an array or the path of a .npy file, got {type(value)!r:.60}"
        )
    if value.dtype.name not in DTYPE_BYTES:
        raise DataError(f"field {name!r}: arrays of {value.dtype} cannot be fed to a model; convert it")
    return StoredArray(value.dtype.name, value)


def _from_tensor(tensor: torch.Tensor) -> StoredArray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise DataError(f"tensors of {dtype} cannot be sent; convert them")
    plain = tensor.detach().cpu()
    if dtype == "bfloat16":
        plain = plain.contiguous().view(torch.int16)
    return StoredArray(dtype, plain.numpy())


def _load(name: str, path: Path) -> Array:
    if path.suffix != ".npy":
        raise DataError(f"field {name!r}: only .npy files can be given here, got {str(path)!r}")
    try:
        loaded: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"field {name!r}: cannot read {path}: {error}") from error
    return loaded


def _rows(arrays: Mapping[str, StoredArray]) -> int:
    if not arrays:
        raise DataError("the data has no fields; give at least one input of the model")
    rows = {}
    for name, item in arrays.items():
        if item.array.ndim == 0:
            raise DataError(f"field {name!r} is a single number; its first dimension must be the samples")
        rows[name] = item.array.shape[0]
    if len(set(rows.values())) > 1:
        raise DataError(f"the fields have different numbers of rows: {', '.join(f'{k} {v}' for k, v in rows.items())}")
    count = next(iter(rows.values()))
    if count == 0:
        raise DataError("the data is empty: its tensors have 0 rows")
    return int(count)
