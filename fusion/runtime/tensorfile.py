"""Weights between a blob of safetensors and a stage: only the tensors that the stage holds, in flat memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from fusion.base.digest import BLOB_CHUNK_BYTES
from fusion.base.errors import DataError
from fusion.compress.raw import memory_of
from fusion.protocol.tensorheader import FileTensor, header_bytes, read_header_from

_PIECE_BYTES = 16 * BLOB_CHUNK_BYTES


class ChunkSource(Protocol):
    """A blob whose verified 1 MiB chunks can be streamed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob."""
        ...

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset` on."""
        ...

    def chunks(self, first: int, end: int) -> Iterator[bytes]:
        """Yield the chunks `first` up to, without, `end`."""
        ...


def blob_header(source: ChunkSource) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors blob by name; DataError if it is none."""

    def read(offset: int, count: int) -> bytes:
        found = bytearray(count)
        source.read_into(offset, memoryview(found))
        return bytes(found)

    return read_header_from("weights", source.size_bytes, read)


def load_tensors(source: ChunkSource, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the named tensors of a safetensors blob; every chunk that they lie in is fetched once.

    DataError names the first tensor that the blob does not have.
    """
    header = blob_header(source)
    missing = [name for name in names if name not in header]
    if missing:
        raise DataError(f"weights: tensor {missing[0]!r} is missing")
    wanted = sorted(((header[name], name) for name in names), key=lambda item: item[0].begin)
    tensors = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for entry, name in wanted}
    places = [(entry.begin, entry.begin + entry.bytes, memory_of(tensors[name])) for entry, name in wanted]
    start = 0
    for first, end in _chunk_runs([(begin, stop) for begin, stop, _ in places]):
        for index, chunk in enumerate(source.chunks(first, end), first):
            start = _scatter(index * BLOB_CHUNK_BYTES, chunk, places, start)
    return tensors


def _chunk_runs(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ascending byte ranges into runs of chunks (first, one past the last)."""
    runs: list[tuple[int, int]] = []
    for begin, end in ranges:
        if begin == end:
            continue
        first, last = begin // BLOB_CHUNK_BYTES, -(-end // BLOB_CHUNK_BYTES)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs


def _scatter(offset: int, chunk: bytes, places: list[tuple[int, int, memoryview]], start: int) -> int:
    """Copy a chunk's bytes to the tensors that they belong to; return the first place that is not yet full."""
    view = memoryview(chunk)
    for index in range(start, len(places)):
        begin, end, target = places[index]
        if begin >= offset + len(chunk):
            break
        low, high = max(begin, offset), min(end, offset + len(chunk))
        if low < high:
            target[low - begin : high - begin] = view[low - offset : high - offset]
        if end <= offset + len(chunk) and index == start:
            start += 1
    return start


def file_pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces, one tensor after the other."""
    shapes = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]
    yield header_bytes(shapes)
    for tensor in tensors.values():
        view = memory_of(tensor.detach().to("cpu").contiguous())
        for begin in range(0, len(view), _PIECE_BYTES):
            yield view[begin : begin + _PIECE_BYTES]


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, one tensor at a time."""
    with path.open("wb") as file:
        for piece in file_pieces(tensors):
            file.write(piece)
