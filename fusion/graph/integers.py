"""Arithmetic on the integers that follow from the batch size; every stage does it for itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from fusion.base.errors import GraphError

#: The functions behind the table's "python." operators.
ARITHMETIC: dict[str, Callable[..., int]] = {
    "python.add": operator.add,
    "python.floordiv": operator.floordiv,
    "python.max": max,
    "python.min": min,
    "python.mod": operator.mod,
    "python.mul": operator.mul,
    "python.neg": operator.neg,
    "python.sub": operator.sub,
}

LIMIT = 2**63  #: results lie below it in size, so that no graph can grow numbers without bound


def evaluate(name: str, operands: Sequence[int]) -> int:
    """Return the result of a "python." operator of the table.

    Raise GraphError where it divides by zero or leaves 64 bits.
    """
    try:
        result = ARITHMETIC[name](*operands)
    except ZeroDivisionError:
        raise GraphError(f"{name} divides {operands[0]} by zero") from None
    if not -LIMIT <= result < LIMIT:
        raise GraphError(f"{name} of {', '.join(map(str, operands))} does not fit into 64 bits")
    return result
