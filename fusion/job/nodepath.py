"""Data that already lies on the nodes, at a path that their owners allow; nothing is uploaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch

from fusion.base.errors import DataError
from fusion.graph.dag import DTYPE_BYTES, TensorSpec
from fusion.job.source import Source
from fusion.protocol.job import DataField, DataFile, DataSpec, RowSource, WindowSource


@dataclass(frozen=True, slots=True)
class Rows:
    """A field whose sample i is row i of a tensor of the file: element type, shape of one row, the tensor's name."""

    dtype: str
    shape: tuple[int, ...] = ()
    tensor: str = ""  #: default: the field's name


@dataclass(frozen=True, slots=True)
class Window:
    """A field whose sample i is elements i * stride + offset and on of a one-dimensional tensor of the file."""

    length: int
    offset: int = 0
    stride: int = 0  #: default: `length`
    dtype: str = "int64"  #: what the model gets; the file may hold a narrower integer type
    tensor: str = "tokens"


class NodePath(Source):
    """A safetensors file at the same path on every node that needs it.

    The nodes' owners allow its directory with `fusion-node start --allow-data DIRECTORY`. What is in it is stated
    here, and checked by each node when it opens the file.
    """

    def __init__(self, path: str, *, fields: Mapping[str, Rows | Window], samples: int) -> None:
        text = str(path)
        if not (PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()):
            raise DataError(f"a path on nodes must be absolute, got {text!r}")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise DataError(f"samples must be a positive integer, got {samples!r:.40}")
        if not fields:
            raise DataError("fields must name at least one input of the model")
        self.path, self.samples = text, samples
        self._fields = tuple(_field(name, item) for name, item in fields.items())

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self._fields)

    def describe(self, fields: Collection[str]) -> DataSpec:
        chosen = tuple(item for item in self._fields if item.name in fields)
        return DataSpec(chosen, (DataFile(node_path=self.path),), self.samples)

    def first(self, count: int) -> dict[str, torch.Tensor]:
        """Return zeros: the model is captured by shapes and types alone."""
        return {
            item.name: torch.zeros((count, *item.sample.shape), dtype=getattr(torch, item.sample.dtype))
            for item in self._fields
        }

    def write(self, directory: Path, stem: str, fields: Collection[str]) -> tuple[Path | None, ...]:
        """Write nothing; the path is given only if this machine has the file too."""
        here = Path(self.path)
        return (here if here.is_file() else None,)


def _field(name: str, item: Rows | Window) -> DataField:
    if not isinstance(item, Rows | Window):
        raise DataError(f"field {name!r} must be fusion.Rows(...) or fusion.Window(...), got {item!r:.40}")
    if item.dtype not in DTYPE_BYTES:
        raise DataError(f"field {name!r}: dtype must be one of {', '.join(DTYPE_BYTES)}; got {item.dtype!r}")
    if isinstance(item, Rows):
        return DataField(name, TensorSpec(item.dtype, tuple(item.shape)), RowSource(0, item.tensor or name))
    if item.length < 1 or item.offset < 0 or item.stride < 0:
        raise DataError(f"field {name!r}: length must be positive, offset and stride not negative; got {item}")
    source = WindowSource(0, item.tensor, item.stride or item.length, item.offset)
    return DataField(name, TensorSpec(item.dtype, (item.length,)), source)
