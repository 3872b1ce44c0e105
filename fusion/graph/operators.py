"""The table of operators: the only calls that a graph may make, by exact overload name.

"aten." is followed by torch's own overload name, "fusion." by an operator of ours, "python." by arithmetic on
integers that follow from the batch size. Receivers look a name up here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion.base.ids import ValueId
from fusion.graph import table_network, table_pointwise, table_shape
from fusion.graph.dag import Argument, Operator, refs
from fusion.graph.signature import OperatorInfo, Parameter

__all__ = [
    "FILLS",
    "TABLE",
    "UNINITIALISED",
    "OperatorInfo",
    "Parameter",
    "argument_of",
    "may_draw",
    "shared_values",
    "written_values",
]

TABLE: dict[str, OperatorInfo] = {
    info.name: info for info in (*table_pointwise.OPERATORS, *table_shape.OPERATORS, *table_network.OPERATORS)
}

#: Return memory as it was: allowed only where the next operator on it overwrites the whole of it.
UNINITIALISED = frozenset({"aten.new_empty.default"})

#: Overwrite the whole of their first argument.
FILLS = frozenset(
    {
        "aten.fill_.Scalar",
        "aten.fill_.Tensor",
        "aten.zero_.default",
        "aten.copy_.default",
        "aten.bernoulli_.float",
        "aten.bernoulli_.Tensor",
        "aten.exponential_.default",
        "aten.normal_.default",
        "aten.uniform_.default",
    }
)


def argument_of(op: Operator, name: str) -> Argument:
    """Return what `op`, an operator of the table, passes as parameter `name`; None where it leaves it out."""
    index = TABLE[op.name].index_of[name]
    if index < len(op.arguments):
        return op.arguments[index]
    return next((value for key, value in op.keywords if key == name), None)


def may_draw(op: Operator) -> bool:
    """Whether this call may draw random numbers; a dropout of probability 0 or outside training does not."""
    info = TABLE[op.name]
    if not info.random:
        return False
    for probability in ("p", "dropout", "dropout_p"):
        if probability in info.index_of and info.name not in _DRAWS_BY_P:
            value = argument_of(op, probability)
            if value is None or value == 0:
                return False
    return all(argument_of(op, flag) is not False for flag in ("train", "training") if flag in info.index_of)


#: Their `p` is the probability of a one, not of a drop.
_DRAWS_BY_P = frozenset({"aten.bernoulli.p", "aten.bernoulli_.float", "aten.bernoulli_.Tensor"})


def written_values(op: Operator) -> Iterator[ValueId]:
    """Yield the values that `op`, an operator of the table, writes to in place."""
    return _values_at(op, TABLE[op.name].mutates)


def shared_values(op: Operator) -> Iterator[ValueId]:
    """Yield the values whose memory the results of `op`, an operator of the table, may share."""
    return _values_at(op, TABLE[op.name].aliases)


def _values_at(op: Operator, indices: tuple[int, ...]) -> Iterator[ValueId]:
    for index in indices:
        if index < len(op.arguments):
            yield from refs((op.arguments[index],))
        elif op.keywords:
            name = TABLE[op.name].parameters[index].name
            yield from refs(tuple(value for key, value in op.keywords if key == name))
