"""Whether a graph writes only where it may, and reads no memory that nobody has written."""

from __future__ import annotations

from fusion.base.errors import GraphError
from fusion.base.ids import ValueId
from fusion.graph.dag import Graph, InputKind, Operator, Ref
from fusion.graph.operators import FILLS, TABLE, UNINITIALISED, shared_values, written_values

#: Views in most cases, but not always: what is written to their result need not reach their argument.
_MAYBE_COPIES = frozenset(
    {"aten.reshape.default", "aten.reshape_as.default", "aten.flatten.using_ints", "aten.ravel.default"}
)
_WRITABLE = frozenset({InputKind.BUFFER, InputKind.BATCH_SIZE})


def check_writes(graph: Graph) -> None:
    """Raise GraphError where an operator of a graph that is sound otherwise writes or reads what it must not.

    Parameters change only by the optimizer; batch fields and constants never; buffers may be written to. Memory that
    was not initialised must be overwritten as a whole by the operator that first touches it.
    """
    seen_through: dict[ValueId, ValueId] = {}  # a view of an input: the input
    fresh: dict[ValueId, int] = {}  # uninitialised so far: the operator that made it
    for position, op in enumerate(graph.operators):
        where = f'operator "n{position}" ({op.name!r})'
        if fresh:
            _fill(where, op, fresh)
        for value in written_values(op):
            item = graph.input_of.get(seen_through.get(value, value))
            if item is not None and item.kind not in _WRITABLE:
                raise GraphError(f"{where}: it writes to the {item.kind} {item.name!r}; only buffers may be written to")
        if TABLE[op.name].cost == "view" and op.name not in _MAYBE_COPIES:
            for value in shared_values(op):
                origin = seen_through.get(value, value)
                if origin in graph.input_of:
                    seen_through.update((out, origin) for out in op.outputs)
        if op.name in UNINITIALISED:
            fresh[op.outputs[0]] = position


def _fill(where: str, op: Operator, fresh: dict[ValueId, int]) -> None:
    """Strike off what `op` overwrites; refuse any other touch of uninitialised memory."""
    read = list(op.reads())
    if op.name in FILLS and op.arguments and isinstance(op.arguments[0], Ref):
        target = op.arguments[0].value
        if target in fresh and read.count(target) == 1:
            del fresh[target]
    for value in read:
        if value in fresh:
            raise GraphError(
                f'{where}: it reads uninitialised memory of operator "n{fresh[value]}"; '
                "overwrite the whole of it first, or use new_zeros"
            )
