"""What every data source offers a job, and how arrays become the safetensors files that nodes read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import DataError
from fusion.base.units import MIB
from fusion.protocol.job import DataSpec
from fusion.protocol.tensorheader import header_bytes

Array = npt.NDArray[Any]

_WRITE_BYTES = 16 * MIB


class Source(ABC):
    """A data set on the owner's side."""

    samples: int

    @property
    @abstractmethod
    def field_names(self) -> tuple[str, ...]:
        """The names of its fields."""

    @abstractmethod
    def describe(self, fields: Collection[str]) -> DataSpec:
        """Return the named fields as data; the files have no blobs yet."""

    @abstractmethod
    def first(self, count: int) -> dict[str, torch.Tensor]:
        """Return all fields of the first `count` samples, from the start again where there are fewer."""

    @abstractmethod
    def write(self, directory: Path, stem: str, fields: Collection[str]) -> tuple[Path | None, ...]:
        """Write the files of `describe(fields)` into `directory`, named after `stem`, and return their paths.

        A file that is there already is not copied; one that only nodes have is None.
        """


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array and torch's name of the element type that it is written as; bfloat16 lies in int16."""

    dtype: str
    array: Array


def write_arrays(path: Path, arrays: Mapping[str, StoredArray]) -> None:
    """Write a safetensors file. Memory stays flat: an array may be a mapping of a file larger than memory."""
    entries = [(name, item.dtype, item.array.shape) for name, item in arrays.items()]
    try:
        with path.open("wb") as file:
            file.write(header_bytes(entries))
            for item in arrays.values():
                for part in _parts(item):
                    file.write(part)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _parts(item: StoredArray) -> Iterator[memoryview]:
    """Yield an array's bytes in order, little-endian, in bounded pieces."""
    little = np.dtype({"bfloat16": "int16", "bool": "uint8"}.get(item.dtype, item.dtype)).newbyteorder("<")
    rows = item.array.reshape(1) if item.array.ndim == 0 else item.array
    if rows.size == 0:
        return
    per_part = max(1, _WRITE_BYTES // max(1, rows[0].nbytes))
    for start in range(0, len(rows), per_part):
        part = np.ascontiguousarray(rows[start : start + per_part].astype(little, copy=False))
        yield part.reshape(-1).view(np.uint8).data


def held_out(samples: int, fraction: float) -> int:
    """Return how many of `samples` a split by `fraction` holds out; DataError if either part would be empty."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise DataError(f"split fraction must lie between 0 and 1, got {fraction!r}")
    count = max(1, round(samples * fraction))
    if count >= samples:
        raise DataError(f"a split by {fraction} of {samples} samples leaves no training data")
    return count
