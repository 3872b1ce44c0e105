"""Bringing a prepared job's bulk into the coordinator's store; what it already holds is not sent again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fusion.base.errors import DataError
from fusion.job.prepare import Prepared, StoredData
from fusion.protocol.graph import graph_to_proto
from fusion.protocol.job import DataFile, DataSpec, JobSpec
from fusion.runtime.tensorfile import save_tensors
from fusion.transport.blobs import BlobClient

UploadProgress = Callable[[str, int, int], None]  #: what, bytes done, bytes in all


def upload(prepared: Prepared, blobs: BlobClient, directory: Path, progress: UploadProgress | None = None) -> JobSpec:
    """Upload graph, weights and data, and return the job with the names that the store gave them.

    `directory` takes the weights' file on its way. UnreachableError if the coordinator stays away.
    """
    graph = graph_to_proto(prepared.graph).SerializeToString(deterministic=True)
    weights = directory / "weights.safetensors"
    save_tensors(weights, prepared.tensors)
    spec = replace(
        prepared.spec,
        graph=blobs.upload_bytes(graph, _named("graph", progress)),
        weights=blobs.upload_file(weights, _named("weights", progress)),
        data=_upload_data("data", prepared.data, blobs, progress),
    )
    if prepared.eval_data is not None:
        spec = replace(spec, eval_data=_upload_data("eval_data", prepared.eval_data, blobs, progress))
    return spec


def _upload_data(what: str, stored: StoredData, blobs: BlobClient, progress: UploadProgress | None) -> DataSpec:
    files = []
    for file, path in zip(stored.spec.files, stored.paths, strict=True):
        if file.node_path:
            files.append(file)
        elif path is not None:
            files.append(DataFile(blobs.upload_file(path, _named(what, progress))))
        else:
            raise DataError(f"{what}: a file is neither here nor on the nodes")
    return stored.with_files(tuple(files))


def _named(what: str, progress: UploadProgress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(what, done, total)
