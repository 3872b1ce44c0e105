"""Checks everything about a submitted job that can be checked before a node is bothered with it.

Blocks for as long as the graph is large; called on a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError

from fusion.base.digest import BLOB_CHUNK_BYTES
from fusion.base.errors import ConfigError, DataError, GraphError
from fusion.base.units import MIB, format_bytes
from fusion.graph.dag import Graph, InputKind
from fusion.graph.partition import partition
from fusion.protocol.graph import graph_from_proto
from fusion.protocol.job import BlobRef, DataField, DataSpec, JobSpec, RowSource
from fusion.protocol.tensorheader import FileTensor, read_header_from
from fusion.wire.v1 import graph_pb2
from fusion_coordinator.blobs import BlobFiles, check_digest

MAX_GRAPH_BYTES = 512 * MIB
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)


def blobs_of(job: JobSpec) -> dict[str, BlobRef]:
    """Return every blob that a job needs, by what it is for. WireError for a digest that is none."""
    found = {"graph": job.graph, "weights": job.weights}
    for name, data in (("data", job.data), ("eval_data", job.eval_data)):
        for index, file in enumerate(data.files if data is not None else ()):
            if file.blob is not None:
                found[f"{name}.files[{index}]"] = file.blob
            elif not file.node_path:
                raise ConfigError(f"{name}.files[{index}] names neither a blob nor a path on the nodes")
    for blob in found.values():
        check_digest(blob.digest)
    return found


def check_complete(needed: Mapping[str, BlobRef], sizes: Mapping[str, int | None]) -> None:
    """Raise ConfigError for a blob that the store, which knows `sizes` by digest, does not hold."""
    for name, blob in needed.items():
        size_bytes = sizes[blob.digest]
        if size_bytes is None:
            raise ConfigError(f"{name}: blob {blob.digest} was not uploaded whole; upload it, then submit again")
        if size_bytes != blob.size_bytes:
            raise ConfigError(f"{name}: blob {blob.digest} has {size_bytes} bytes, the job says {blob.size_bytes}")


def load_graph(blob: BlobRef, files: BlobFiles) -> Graph:
    """Read and check a graph from the store; GraphError says what is wrong with it."""
    if blob.size_bytes > MAX_GRAPH_BYTES:
        raise GraphError(
            f"graph: {format_bytes(blob.size_bytes)} is too large; at most {format_bytes(MAX_GRAPH_BYTES)}"
        )
    content = bytearray()
    while len(content) < blob.size_bytes:
        count = min(BLOB_CHUNK_BYTES, blob.size_bytes - len(content))
        content += files.read(blob.digest, len(content), count)
    try:
        message = graph_pb2.Graph.FromString(bytes(content))
    except DecodeError:
        raise GraphError(f"graph: blob {blob.digest} is not a serialised graph") from None
    return graph_from_proto(message)


def check_job(job: JobSpec, files: BlobFiles) -> Graph:
    """Check a job against the content of its blobs, which are complete; return its graph.

    Raises GraphError, ConfigError or DataError with one line for the first thing that does not fit.
    """
    graph = load_graph(job.graph, files)
    partition(graph, job.cuts)
    if job.max_stages and len(job.cuts) >= job.max_stages:
        raise ConfigError(f"cuts: {len(job.cuts)} cuts make {len(job.cuts) + 1} stages, max_stages={job.max_stages}")
    _check_batch(job, graph)
    _check_weights(graph, read_header_from("weights", job.weights.size_bytes, _reader(files, job.weights)))
    for name, data in (("data", job.data), ("eval_data", job.eval_data)):
        if data is not None:
            _check_fields(name, data, graph)
            _check_files(name, data, files)
    return graph


def _reader(files: BlobFiles, blob: BlobRef) -> Callable[[int, int], bytes]:
    return lambda offset, count: files.read(blob.digest, offset, count)


def _check_batch(job: JobSpec, graph: Graph) -> None:
    sizes = set(job.micro_batch_sizes())
    if not graph.dynamic_batch and sizes != {graph.nominal_micro_batch}:
        raise ConfigError(
            f"batch_size={job.batch_size} with micro_batches={job.micro_batches} makes micro-batches of "
            f"{', '.join(map(str, sorted(sizes)))}; this graph runs only with {graph.nominal_micro_batch}"
        )


def _check_weights(graph: Graph, stored: Mapping[str, FileTensor]) -> None:
    missing = [item.name for item in graph.inputs if item.kind in _HELD and item.name not in stored]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise DataError(f"weights: {', '.join(missing[:3])}{more} of the graph are not in the file")
    for item in graph.inputs:
        spec = graph.values[item.value].spec
        if item.kind not in _HELD or spec is None:
            continue
        found = stored[item.name]
        if (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise DataError(
                f"weights: {item.name} is {found.dtype} {list(found.shape)} in the file, "
                f"{spec.dtype} {list(spec.shape)} in the graph"
            )


def _check_fields(name: str, data: DataSpec, graph: Graph) -> None:
    given = {field.name for field in data.fields}
    needed = [item.name for item in graph.inputs if item.kind is InputKind.BATCH]
    missing = [field for field in needed if field not in given]
    if missing:
        raise DataError(f"{name}: the model reads {', '.join(missing)}, the data has {', '.join(sorted(given))}")


def _check_files(name: str, data: DataSpec, files: BlobFiles) -> None:
    headers = {
        index: read_header_from(f"{name}.files[{index}]", file.blob.size_bytes, _reader(files, file.blob))
        for index, file in enumerate(data.files)
        if file.blob is not None
    }
    for field in data.fields:
        if field.source.file in headers:
            _check_field(f"{name} field {field.name!r}", field, data.samples, headers[field.source.file])


def _check_field(what: str, field: DataField, samples: int, stored: Mapping[str, FileTensor]) -> None:
    tensor = stored.get(field.source.tensor)
    if tensor is None:
        raise DataError(f"{what}: its file has no tensor {field.source.tensor[:80]!r}")
    if not tensor.shape:
        raise DataError(f"{what}: tensor {field.source.tensor!r} is a single number")
    if isinstance(field.source, RowSource):
        needed, rows = samples, tensor.shape[0]
    else:
        length = field.sample.shape[0] if field.sample.shape else 1
        needed, rows = (samples - 1) * field.source.stride + field.source.offset + length, tensor.shape[0]
    if rows < needed:
        raise DataError(f"{what}: {samples} samples need {needed} rows of {field.source.tensor!r}, which has {rows}")
