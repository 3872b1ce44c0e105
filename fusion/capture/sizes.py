"""Integers that follow from the batch size: from torch's symbolic expressions to operators of the OP-DAG."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy import functions

from fusion.graph.dag import Argument, Ref

#: Integer arithmetic of the table, by its name there.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "python.add": operator.add,
    "python.mul": operator.mul,
    "python.floordiv": operator.floordiv,
    "python.mod": operator.mod,
    "python.max": max,
    "python.min": min,
}

#: Appends an operator of the table and returns its result.
Emit = Callable[[str, tuple[Argument, ...]], Ref]

_NAMES: dict[type, str] = {
    sympy.Add: "python.add",
    sympy.Mul: "python.mul",
    functions.FloorDiv: "python.floordiv",
    functions.CleanDiv: "python.floordiv",
    functions.Mod: "python.mod",
    functions.PythonMod: "python.mod",
    functions.Max: "python.max",
    functions.Min: "python.min",
}


class UnsupportedSizeError(Exception):
    """An expression that is not integer arithmetic over the batch size; the text shows it."""


class Sizes:
    """Turns symbolic integers into arguments, emitting each operator that they need once."""

    def __init__(self, symbol: sympy.Symbol | None, batch_size: Ref, emit: Emit) -> None:
        self._symbol = symbol
        self._emit = emit
        self._known: dict[sympy.Expr, Ref] = {} if symbol is None else {symbol: batch_size}

    def argument(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | Ref:
        """Return an integer, or a reference to one that a stage computes. Raise UnsupportedSizeError."""
        return self._lower(sympy.sympify(value.node.expr))

    def is_data_dependent(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
        """Whether `value` depends on more than the batch size."""
        return bool(value.node.expr.free_symbols - {self._symbol})

    def _lower(self, expression: sympy.Expr) -> int | Ref:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._known:
            self._known[expression] = self._compute(expression)
        return self._known[expression]

    def _compute(self, expression: sympy.Expr) -> Ref:
        if expression.is_Pow and expression.exp.is_Integer and expression.exp > 1:
            name, terms = "python.mul", [expression.base] * int(expression.exp)
        elif isinstance(expression, functions.PowByNatural) and expression.args[1].is_Integer:
            name, terms = "python.mul", [expression.args[0]] * int(expression.args[1])
        elif type(expression) in _NAMES:
            name, terms = _NAMES[type(expression)], list(expression.args)
        else:
            raise UnsupportedSizeError(str(expression))
        operands: list[int | Ref] = [self._lower(term) for term in terms]
        result = operands[0]
        for operand in operands[1:]:
            result = self._emit(name, (result, operand))
        assert isinstance(result, Ref)
        return result
