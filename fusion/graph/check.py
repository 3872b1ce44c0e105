"""Whether a graph from elsewhere is one that may be run: everything that can be told without torch, in linear time.

Receivers check every graph before they look at it further. Messages name an operator by its position ("n17").
"""

from __future__ import annotations

import math
import re

from fusion.base.errors import GraphError
from fusion.base.layout import MAX_RANK
from fusion.base.units import GIB, format_bytes
from fusion.graph.calls import check_call
from fusion.graph.dag import DTYPE_BYTES, Cost, Graph, Input, InputKind, Operator, TensorSpec, Value
from fusion.graph.writes import check_writes

MAX_OPERATORS = 200_000
MAX_VALUES = 1_000_000
MAX_ARGUMENTS = 4_000_000  #: of all operators together
MAX_TENSOR_BYTES = 64 * GIB  #: of one value; what a node has, it compares by itself
MAX_MICRO_BATCH = 2**20
NAME = re.compile(r"[A-Za-z0-9_$][A-Za-z0-9_.$-]{0,255}")
NAME_RULE = "1 to 256 of A-Z a-z 0-9 _ . $ -, not starting with a dot or a hyphen"
MAX_PATH_CHARACTERS = 1024

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
_DIFFERENTIABLE = _FLOATING | {"complex64"}
_AUTOCAST = frozenset({"", "off", "bfloat16", "float16"})


def check_graph(graph: Graph) -> None:
    """Raise GraphError unless `graph` is well formed and calls nothing but operators of the table, as it may.

    It holds: counts and sizes within bounds; every value is brought by one input or made by one operator, before it
    is read; arguments fit the signatures; stated shapes and integers follow from the arguments where a rule is known;
    neither parameters nor the batch are written to; nothing shows uninitialised memory; the loss is a floating-point
    scalar that an operator makes.
    """
    _check_counts(graph)
    for index, value in enumerate(graph.values):
        _check_value(f"value {index}", value)
    made = _check_inputs(graph)
    arguments = 0
    for position, op in enumerate(graph.operators):
        where = f'operator "n{position}" ({op.name[:80]!r})'
        _check_labels(where, op)
        arguments += check_call(graph, where, op, made)
        _check_outputs(graph, where, position, op, made)
    if arguments > MAX_ARGUMENTS:
        raise GraphError(f"graph: {arguments} arguments; allowed are {MAX_ARGUMENTS}")
    dangling = made.count(None)
    if dangling:
        raise GraphError(f"value {made.index(None)}: no input brings it and no operator makes it ({dangling} in all)")
    check_writes(graph)
    _check_loss(graph, made)


def _check_counts(graph: Graph) -> None:
    if not graph.operators:
        raise GraphError("graph: it has no operators")
    for what, count, limit in (
        ("operators", len(graph.operators), MAX_OPERATORS),
        ("values", len(graph.values), MAX_VALUES),
    ):
        if count > limit:
            raise GraphError(f"graph: {count} {what}; allowed are {limit}")
    if not 1 <= graph.nominal_micro_batch <= MAX_MICRO_BATCH:
        raise GraphError(f"nominal_micro_batch: {graph.nominal_micro_batch}; allowed: 1 to {MAX_MICRO_BATCH}")


def _check_value(where: str, value: Value) -> None:
    if value.spec is None:
        if value.requires_grad or not -(2**63) <= value.nominal < 2**63:
            raise GraphError(f"{where}: an integer must fit into 64 bits and cannot require a gradient")
        return
    check_spec(where, value.spec)
    if value.requires_grad and value.spec.dtype not in _DIFFERENTIABLE:
        raise GraphError(f"{where}: a tensor of dtype {value.spec.dtype} cannot require a gradient")


def check_spec(where: str, spec: TensorSpec) -> None:
    """Raise GraphError unless element type, rank, dimensions and bytes of a tensor are within bounds."""
    if spec.dtype not in DTYPE_BYTES:
        raise GraphError(f"{where}: dtype {spec.dtype[:40]!r} is not known; allowed: {', '.join(DTYPE_BYTES)}")
    if len(spec.shape) > MAX_RANK:
        raise GraphError(f"{where}: rank {len(spec.shape)}; allowed are 0 to {MAX_RANK}")
    if any(size < 0 for size in spec.shape):
        raise GraphError(f"{where}: shape {list(spec.shape)} has a negative dimension")
    # an empty tensor must not hide huge dimensions beside its zero
    size = math.prod(max(size, 1) for size in spec.shape) * DTYPE_BYTES[spec.dtype]
    if size > MAX_TENSOR_BYTES:
        raise GraphError(
            f"{where}: a tensor of shape {list(spec.shape)} needs {format_bytes(size)}; "
            f"allowed are {format_bytes(MAX_TENSOR_BYTES)}"
        )


def _check_inputs(graph: Graph) -> list[int | None]:
    """Return by value: -1 where an input brings it, None otherwise; operators then fill in their positions."""
    made: list[int | None] = [None] * len(graph.values)
    names: set[str] = set()
    for item in graph.inputs:
        where = f"input {item.name[:80]!r}"
        for name in (item.name, *item.aliases):
            if not NAME.fullmatch(name):
                raise GraphError(f"{where}: the name {name[:80]!r} is not allowed; allowed: {NAME_RULE}")
            if name in names:
                raise GraphError(f"{where}: the name {name!r} is given twice")
            names.add(name)
        if not 0 <= item.value < len(made) or made[item.value] is not None:
            raise GraphError(f"{where}: value {item.value} does not exist or is brought by another input already")
        made[item.value] = -1
        _check_input(graph, where, item)
    if sum(item.kind is InputKind.BATCH_SIZE for item in graph.inputs) > 1:
        raise GraphError("graph: the batch size is given twice")
    return made


def _check_input(graph: Graph, where: str, item: Input) -> None:
    value = graph.values[item.value]
    if (value.spec is None) != (item.kind is InputKind.BATCH_SIZE):
        raise GraphError(f"{where}: a {item.kind} must be {'an integer' if value.spec else 'a tensor'}")
    if value.spec is None and value.nominal != graph.nominal_micro_batch:
        raise GraphError(f"{where}: it is {value.nominal}, but the nominal micro-batch is {graph.nominal_micro_batch}")
    if value.requires_grad and item.kind is not InputKind.PARAMETER:
        raise GraphError(f"{where}: only parameters require gradients, not a {item.kind}")
    if item.aliases and item.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
        raise GraphError(f"{where}: only parameters and buffers have further names, not a {item.kind}")
    if value.spec is not None and item.kind is InputKind.BATCH:
        shape = value.spec.shape
        if not shape or shape[0] != graph.nominal_micro_batch:
            raise GraphError(
                f"{where}: shape {list(shape)} must start with the nominal micro-batch {graph.nominal_micro_batch}"
            )


def _check_labels(where: str, op: Operator) -> None:
    if len(op.module_path) > MAX_PATH_CHARACTERS or not op.module_path.isprintable():
        raise GraphError(f"{where}: module_path must be printable and at most {MAX_PATH_CHARACTERS} characters long")
    if op.autocast_dtype not in _AUTOCAST:
        raise GraphError(
            f"{where}: autocast_dtype {op.autocast_dtype[:40]!r}; allowed: '', 'off', 'bfloat16', 'float16'"
        )
    _check_cost(where, op.cost)


def _check_cost(where: str, cost: Cost) -> None:
    for name in ("forward_flops", "backward_flops", "saved_bytes", "moved_bytes"):
        figure = getattr(cost, name)
        if not (math.isfinite(figure) and 0 <= figure < 2**63):  # also catches NaN
            raise GraphError(f"{where}: cost {name} is {figure}; allowed: finite, at least 0, below 2^63")


def _check_outputs(graph: Graph, where: str, position: int, op: Operator, made: list[int | None]) -> None:
    for out in op.outputs:
        if not 0 <= out < len(made):
            raise GraphError(f"{where}: it makes value {out}; the graph has {len(made)}")
        if made[out] is not None:
            other = "an input brings" if made[out] == -1 else f'operator "n{made[out]}" makes'
            raise GraphError(f"{where}: it makes value {out}, which {other} already")
        made[out] = position


def _check_loss(graph: Graph, made: list[int | None]) -> None:
    if not 0 <= graph.loss < len(graph.values):
        raise GraphError(f"loss: value {graph.loss} does not exist; the graph has {len(graph.values)}")
    spec = graph.values[graph.loss].spec
    if spec is None or spec.dtype not in _FLOATING or spec.shape:
        found = "an integer" if spec is None else f"{spec.dtype} {list(spec.shape)}"
        raise GraphError(f"loss: value {graph.loss} is {found}; it must be a floating-point scalar of rank 0")
    if made[graph.loss] == -1:
        raise GraphError(f"loss: value {graph.loss} is an input; an operator must make it")
