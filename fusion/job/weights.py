"""Trained weights put together from the stages' files: for `load_state_dict`, or streamed into one file.

Names that start with "$" belong to the captured graph, not to the model, and are left out. A tied tensor appears
under each of its names. What no stage held (parameters that the loss does not use) comes from the initial weights.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fusion.base.errors import ConfigError, StateError
from fusion.base.units import MIB, format_bytes
from fusion.graph.dag import Graph
from fusion.job.client import Client
from fusion.job.names import names_of
from fusion.protocol.graph import graph_from_proto
from fusion.protocol.job import BlobRef
from fusion.protocol.jobstatus import JobState, JobStatus
from fusion.protocol.tensorheader import FileTensor, header_bytes, read_header
from fusion.wire.v1 import graph_pb2

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]

_MOST_GRAPH_BYTES = 256 * MIB
_COPY_BYTES = 4 * MIB


def merged(
    graph: Graph, initial: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a state dict from tensors in memory; the tensors are copies, except that tied ones stay tied."""
    tensors = {name: trained.get(name, tensor).detach().cpu().clone() for name, tensor in initial.items()}
    return {name: tensors[canonical] for name, canonical in names_of(graph, list(initial)).items()}


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    tensor: FileTensor


class WeightFiles:
    """The downloaded files of one finished job, and where each tensor of the model lies in them."""

    def __init__(self, client: Client, status: JobStatus, directory: Path, progress: Progress | None = None) -> None:
        """Download into `directory`; StateError unless the job succeeded."""
        graph, initial = weight_blobs(status)
        refs = [initial, *status.stage_weights]
        paths = [directory / f"{number}.safetensors" for number in range(len(refs))]
        done = 0
        total = sum(ref.size_bytes for ref in refs)
        for ref, path in zip(refs, paths, strict=True):
            client.blobs.download_file(ref, path, _shifted(progress, done, total))
            done += ref.size_bytes
        message = graph_pb2.Graph.FromString(client.blobs.download_bytes(graph, _MOST_GRAPH_BYTES))
        held: dict[str, _Piece] = {}
        # A parameter that several stages hold is equal in all of them; the first stage's copy is taken.
        for path in (*paths[1:], paths[0]):
            for name, tensor in read_header(path).items():
                held.setdefault(name, _Piece(path, tensor))
        self._pieces = {
            name: held[canonical] for name, canonical in names_of(graph_from_proto(message), list(held)).items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors in memory of their own; tied ones share it."""
        from fusion.runtime.data import as_tensor, map_tensor

        made: dict[int, torch.Tensor] = {}
        for piece in self._pieces.values():
            if id(piece) not in made:
                made[id(piece)] = as_tensor(map_tensor(piece.path, piece.tensor), piece.tensor.dtype)
        return {name: made[id(piece)] for name, piece in self._pieces.items()}

    def write(self, path: Path, force: bool = False) -> int:
        """Write one safetensors file, which appears only when it is whole, and return its bytes. Memory stays flat.

        ConfigError if the file exists (unless `force`) or cannot be written.
        """
        part = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
        try:
            with part.open("xb") as file:
                pieces = sorted(self._pieces.items())
                file.write(header_bytes((name, item.tensor.dtype, item.tensor.shape) for name, item in pieces))
                for _, piece in pieces:
                    _copy(piece, file)
                size_bytes = file.tell()
            if path.exists() and not force:
                raise ConfigError(f"{path} exists already; choose another name or give --force")
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; free space or choose another place") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return size_bytes


def weight_blobs(status: JobStatus) -> tuple[BlobRef, BlobRef]:
    """Return the graph and the initial weights of a job that succeeded; StateError for any other."""
    if status.state is not JobState.SUCCEEDED:
        because = f" ({status.reason})" if status.reason else ""
        raise StateError(f"job {status.job_id} is {status.state}{because}; weights are there once it has succeeded")
    if status.graph is None or status.weights is None or not status.stage_weights:
        raise StateError(f"the coordinator no longer has the weights of job {status.job_id}")
    return status.graph, status.weights


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda part, _: progress(done + part, total)


def _copy(piece: _Piece, target: BinaryIO) -> None:
    for part in _ranges(piece):
        target.write(part)


def _ranges(piece: _Piece) -> Iterator[bytes]:
    with piece.path.open("rb") as file:
        file.seek(piece.tensor.begin)
        left = piece.tensor.bytes
        while left:
            part = file.read(min(left, _COPY_BYTES))
            if not part:
                raise ConfigError(f"{piece.path} was cut short ({format_bytes(left)} are missing)")
            left -= len(part)
            yield part
