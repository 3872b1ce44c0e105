"""From a model and data sources to what a run needs: the graph, the tensors, the data files and the job as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from fusion.base.errors import ConfigError, DataError
from fusion.graph.dag import Graph, InputKind
from fusion.job.checks import check_batches, check_data_fits, check_ids, field_names
from fusion.job.names import names_of
from fusion.job.source import Source
from fusion.protocol.job import BlobRef, DataFile, DataSpec, JobSpec, check_settings
from fusion.runtime.data import DataSet, open_data

if TYPE_CHECKING:
    from fusion.capture import Captured
    from fusion.job.job import Job

UNSENT = BlobRef("", 0)  #: stands for a blob that no store has yet
LEAST_CAPTURE_BATCH = 2  #: a model that is captured with one sample is captured for one sample only


@dataclass(frozen=True, slots=True)
class StoredData:
    """A data set as data, and the files that it lies in; a path is None where only nodes have the file."""

    spec: DataSpec
    paths: tuple[Path | None, ...]

    def open(self, field: str) -> DataSet:
        """Open the files; DataError if one of them is not on this machine."""
        for file, path in zip(self.spec.files, self.paths, strict=True):
            if path is None:
                raise DataError(f"{field}: {file.node_path} is not on this machine, so the job can only be submitted")
        return open_data(self.spec, self.paths)

    def with_files(self, files: tuple[DataFile, ...]) -> DataSpec:
        """Return the spec with its files named as the store names them."""
        return replace(self.spec, files=files)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job ready to run here, or to be uploaded. Its files lie in a directory that the caller made and removes."""

    spec: JobSpec  #: with UNSENT for graph and weights, and files without blobs
    graph: Graph
    tensors: dict[str, Tensor]
    data: StoredData
    eval_data: StoredData | None


def prepare(job: Job, directory: Path) -> Prepared:
    """Check the job, capture the model, and write the data files into `directory`.

    Raises ConfigError, DataError or CaptureError, one line each. The model is not changed.
    """
    draft = check_draft(job)
    graph, tensors = _capture(job, draft.micro_batch_sizes()[0])
    spec = _spec(job, _fields_read(job, graph))
    check_batches(spec, graph)
    stored = StoredData(spec.data, job.data.write(directory, "data", field_names(spec.data)))
    check_ids("data", graph, spec, stored)
    stored_eval = None
    if job.eval_data is not None and spec.eval_data is not None:
        stored_eval = StoredData(spec.eval_data, job.eval_data.write(directory, "eval", field_names(spec.eval_data)))
        check_ids("eval_data", graph, spec, stored_eval)
    return Prepared(spec, graph, tensors, stored, stored_eval)


def captured_graph(job: Job) -> tuple[JobSpec, Graph]:
    """Return the job as far as it is known, and its model's graph: what planning needs. No data file is written."""
    draft = check_draft(job)
    graph, _ = _capture(job, draft.micro_batch_sizes()[0])
    check_batches(draft, graph)
    return draft, graph


def check_draft(job: Job) -> JobSpec:
    """Return the job as far as it is known before capture; ConfigError or DataError for a setting that cannot be."""
    draft = _spec(job, job.data.field_names)
    check_settings(draft)
    check_data_fits(draft)
    return draft


def _spec(job: Job, fields: tuple[str, ...]) -> JobSpec:
    evaluation = None if job.eval_data is None else job.eval_data.describe(fields)
    return job.spec(UNSENT, UNSENT, job.data.describe(fields), evaluation)


def check_model(model: object) -> None:
    """Raise ConfigError unless `model` is a module whose parameters have values, some of them trainable."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ConfigError(f"model parameter {name!r} is on the meta device and has no values; initialise it first")
        if parameter.is_sparse or parameter.layout is not parameter.data.layout:
            raise ConfigError(f"model parameter {name!r} is sparse; only dense parameters can be trained")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model has no trainable parameter; set requires_grad on at least one")


def check_sources(job: Job) -> None:
    """Raise ConfigError unless both data sources are ours, and have the same fields."""
    for field, source in (("data", job.data), ("eval_data", job.eval_data)):
        if not isinstance(source, Source) and not (field == "eval_data" and source is None):
            raise ConfigError(
                f"{field} must be fusion.TextData, TokenData, TensorData, NodePath or a dict of tensors; "
                f"got {type(source).__name__}"
            )
    if job.eval_data is not None:
        missing = [name for name in job.data.field_names if name not in job.eval_data.field_names]
        if missing:
            raise ConfigError(f"eval_data has no field {missing[0]!r}, which data has")


def _capture(job: Job, micro_batch: int) -> tuple[Graph, dict[str, Tensor]]:
    from fusion.capture import capture

    device = next(job.model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in job.data.first(max(micro_batch, LEAST_CAPTURE_BATCH)).items()}
    captured = capture(job.model, batch, loss=cast(Any, job.loss), micro_batch=micro_batch)
    return captured.graph, captured.tensors | _left_out(job.model, captured)


def _left_out(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Return what of the state dict has no place in the graph, such as a second name of tied, unused weights."""
    names = names_of(captured.graph, list(captured.tensors))
    entries = model.state_dict().items()
    return {name: value.detach().cpu() for name, value in entries if name not in names and isinstance(value, Tensor)}


def _fields_read(job: Job, graph: Graph) -> tuple[str, ...]:
    """Return the data's fields that the graph or the loss's weight reads; nothing else is uploaded."""
    wanted = {item.name for item in graph.inputs if item.kind is InputKind.BATCH}
    if job.loss_weight is not None:
        wanted.add(job.loss_weight.field)
    unknown = wanted - set(job.data.field_names)
    if unknown:
        has = ", ".join(job.data.field_names)
        raise ConfigError(f"data has no field {min(unknown)!r}, which the job reads; it has {has}")
    return tuple(name for name in job.data.field_names if name in wanted)
