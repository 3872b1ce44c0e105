"""Checks that only the owner can make cheaply, before anything is sent: sizes against data, ids against tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusion.base.errors import ConfigError, DataError
from fusion.graph.dag import Graph, InputKind, Operator, Ref
from fusion.job.tokendata import extent
from fusion.protocol.job import DataSpec, JobSpec
from fusion.protocol.tensorheader import read_header
from fusion.runtime.data import map_tensor

if TYPE_CHECKING:
    from fusion.job.prepare import StoredData

#: Operators that hand on the elements of their first argument, all of them and unchanged.
_SAME_ELEMENTS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "flatten.using_ints",
        "contiguous.default",
        "clone.default",
        "alias.default",
        "detach.default",
        "squeeze.default",
        "squeeze.dim",
        "unsqueeze.default",
        "transpose.int",
        "permute.default",
        "to.dtype",
        "to.device",
        "to.dtype_layout",
    )
)


def check_data_fits(spec: JobSpec) -> None:
    """Raise DataError or ConfigError if there are fewer samples than one step or one evaluation takes."""
    if spec.data.samples < spec.batch_size:
        raise DataError(f"data has {spec.data.samples} samples, fewer than one batch (batch_size={spec.batch_size})")
    if spec.loss_weight.field:
        _check_loss_weight(spec)
    if spec.eval_data is None:
        return
    wanted = spec.eval_batches * spec.batch_size
    if wanted > spec.eval_data.samples:
        raise ConfigError(
            f"eval_batches={spec.eval_batches} of batch_size={spec.batch_size} need {wanted} samples, "
            f"eval_data has {spec.eval_data.samples}"
        )
    ours = {item.name: item.sample for item in spec.data.fields}
    for item in spec.eval_data.fields:
        if item.sample != ours.get(item.name, item.sample):
            raise DataError(
                f"field {item.name!r} is {item.sample.dtype} {item.sample.shape} in eval_data, "
                f"{ours[item.name].dtype} {ours[item.name].shape} in data"
            )


def _check_loss_weight(spec: JobSpec) -> None:
    name = spec.loss_weight.field
    fields = {item.name: item for item in spec.data.fields}
    if name not in fields:
        raise ConfigError(f"loss_weight names field {name!r}; data has {', '.join(fields)}")
    if not fields[name].sample.dtype.startswith(("int", "uint")):
        raise ConfigError(f"loss_weight field {name!r} must hold integers, it holds {fields[name].sample.dtype}")


def check_batches(spec: JobSpec, graph: Graph) -> None:
    """Raise ConfigError if the model runs at one micro-batch size only and the job needs several."""
    sizes = spec.micro_batch_sizes()
    if not graph.dynamic_batch and sizes[-1] != sizes[0]:
        raise ConfigError(
            f"the model only runs with the batch size that it was captured with, so batch_size={spec.batch_size} must "
            f"be a multiple of micro_batches={spec.micro_batches}"
        )


def check_ids(field: str, graph: Graph, spec: JobSpec, stored: StoredData) -> None:
    """Raise DataError if a field holds an id that its embedding table or the classes of the loss do not have.

    Fields that reach them unchanged are found; of the others the operator itself raises when it runs.
    """
    if None in stored.paths:
        return
    for name, limit, ignored, what in _limits(graph):
        low, high = _extent(stored, name, ignored)
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise DataError(f"{field} field {name!r} holds {bad}, but {what}; allowed are 0..{limit - 1}")


def _limits(graph: Graph) -> Iterator[tuple[str, int, int | None, str]]:
    """Yield (field, number of allowed ids, id that is ignored, why) for every field whose use tells it."""
    for operator in graph.operators:
        if operator.name == "aten.embedding.default":
            field, rows = _field_behind(graph, operator, 1), _size(graph, operator, 0, 0)
            if field is not None and rows is not None:
                yield field, rows, None, f"the embedding {operator.module_path or 'of the model'} has {rows} rows"
        elif operator.name == "aten.cross_entropy_loss.default":
            field, classes = _field_behind(graph, operator, 1), _size(graph, operator, 0, 1)
            ignored = (
                operator.arguments[4] if len(operator.arguments) > 4 else dict(operator.keywords).get("ignore_index")
            )
            if field is not None and classes is not None and not _is_floating(graph, operator):
                yield field, classes, ignored if isinstance(ignored, int) else -100, f"the loss has {classes} classes"


def _size(graph: Graph, operator: Operator, argument: int, dimension: int) -> int | None:
    reference = operator.arguments[argument]
    spec = graph.values[reference.value].spec if isinstance(reference, Ref) else None
    return spec.shape[dimension] if spec is not None and len(spec.shape) > dimension else None


def _is_floating(graph: Graph, operator: Operator) -> bool:
    """Whether cross entropy's targets are probabilities instead of classes."""
    reference = operator.arguments[1]
    spec = graph.values[reference.value].spec if isinstance(reference, Ref) else None
    return spec is None or "float" in spec.dtype


def _field_behind(graph: Graph, operator: Operator, argument: int) -> str | None:
    """Return the batch field whose elements an argument holds, all of them and unchanged; None if it is not so."""
    reference = operator.arguments[argument]
    while isinstance(reference, Ref):
        brought = graph.input_of.get(reference.value)
        if brought is not None:
            return brought.name if brought.kind is InputKind.BATCH else None
        maker = graph.operators[graph.producer[reference.value]]
        if maker.name not in _SAME_ELEMENTS:
            return None
        reference = maker.arguments[0]
    return None


def _extent(stored: StoredData, name: str, ignored: int | None) -> tuple[int, int]:
    """Return the least and greatest value of a field over the samples, without `ignored`; (0, 0) if there is none."""
    item = next(item for item in stored.spec.fields if item.name == name)
    path = stored.paths[item.source.file]
    assert path is not None
    return extent(map_tensor(path, read_header(path)[item.source.tensor]), ignored)


def field_names(spec: DataSpec) -> tuple[str, ...]:
    """Return the names of a data set's fields, in order."""
    return tuple(item.name for item in spec.fields)
