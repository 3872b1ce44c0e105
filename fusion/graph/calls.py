"""Whether one operator's call fits the table: name, arguments, number and kind of results, shapes, integers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import isfinite

from fusion.base.errors import GraphError
from fusion.graph.costs import flops
from fusion.graph.dag import DTYPE_BYTES, Argument, Device, DType, Graph, Layout, MemoryFormat, Operator, Ref
from fusion.graph.integers import evaluate
from fusion.graph.operators import TABLE, OperatorInfo, Parameter
from fusion.graph.shapes import ShapeError, expected_shape

MAX_LIST = 16_384  #: items of one list among the arguments
MAX_TEXT = 1024  #: characters of one text among the arguments

_MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})


def check_call(graph: Graph, where: str, op: Operator, made: list[int | None]) -> int:
    """Raise GraphError unless `op`, to which `where` points, is a call that the table allows.

    `made` tells by value who makes it, None for values that nobody has made yet. Return the number of arguments.
    """
    info = TABLE.get(op.name)
    if info is None:
        raise GraphError(f"{where}: this operator is not in the table of operators that may be run")
    count = 0
    for parameter, argument in _bind(where, op, info):
        count += _check_argument(graph, where, op, parameter, argument, made)
    _check_results(graph, where, op, info)
    if info.name.startswith("python."):
        _check_integer(graph, where, op)
    else:
        _check_shape(graph, where, op, made)
        _check_cost(graph, where, op)
    return count


def _bind(where: str, op: Operator, info: OperatorInfo) -> list[tuple[Parameter, Argument]]:
    """Pair each argument with its parameter."""
    positional = info.positional
    if len(op.arguments) > len(positional):
        raise GraphError(f"{where}: {len(op.arguments)} arguments by position; allowed are {len(positional)}")
    bound = list(zip(positional, op.arguments, strict=False))
    given = set(range(len(op.arguments)))
    if any(one >= other for (one, _), (other, _) in pairwise(op.keywords)):
        raise GraphError(f"{where}: its keywords must differ and be sorted by name")
    for name, argument in op.keywords:
        index = info.index_of.get(name)
        if index is None:
            raise GraphError(f"{where}: it has no parameter {name[:80]!r}; allowed: {', '.join(info.index_of)}")
        if index in given:
            raise GraphError(f"{where}: parameter {name!r} is given twice")
        given.add(index)
        bound.append((info.parameters[index], argument))
    for index in info.required:
        if index not in given:
            raise GraphError(f"{where}: parameter {info.parameters[index].name!r} is missing")
    return bound


def _check_argument(
    graph: Graph, where: str, op: Operator, parameter: Parameter, argument: Argument, made: list[int | None]
) -> int:
    if argument is None:
        if not parameter.nullable:
            raise GraphError(f"{where}: parameter {parameter.name!r} must not be None")
        return 1
    if not parameter.is_list or not isinstance(argument, tuple):
        # torch takes one number for a list of equal ones
        if isinstance(argument, tuple) or (parameter.is_list and parameter.kind == "Tensor"):
            raise _unfit(where, parameter, _told(argument))
        _check_item(graph, where, op, parameter, argument, made)
        return 1
    if len(argument) > MAX_LIST:
        raise GraphError(f"{where}: parameter {parameter.name!r} lists {len(argument)} items; allowed are {MAX_LIST}")
    for item in argument:
        if item is not None or not parameter.nullable_items:
            _check_item(graph, where, op, parameter, item, made)
    return len(argument)


def _check_item(
    graph: Graph, where: str, op: Operator, parameter: Parameter, item: Argument, made: list[int | None]
) -> None:
    if isinstance(item, Ref):
        _check_read(graph, where, op, parameter, item, made)
        return
    allowed = _CONSTANTS.get(parameter.kind)
    if allowed is None or not allowed(item) or _must_be_tensor(op, parameter):
        raise _unfit(where, parameter, _told(item))


def _check_read(
    graph: Graph, where: str, op: Operator, parameter: Parameter, item: Ref, made: list[int | None]
) -> None:
    value = item.value
    if not 0 <= value < len(made):
        raise GraphError(f"{where}: it reads value {value}; the graph has {len(made)}")
    if made[value] is None:
        maker = graph.producer.get(value)
        who = "nobody makes" if maker is None else f'only operator "n{maker}" makes'
        raise GraphError(f"{where}: it reads value {value}, which {who}; operators must stand after what they read")
    if graph.values[value].spec is None:
        if parameter.kind not in _TAKES_INTEGERS or _must_be_tensor(op, parameter):
            raise _unfit(where, parameter, "an integer of the graph")
    elif parameter.kind != "Tensor":
        raise _unfit(where, parameter, "a tensor of the graph")


def _must_be_tensor(op: Operator, parameter: Parameter) -> bool:
    """Whether no number may stand for a tensor here, as it may for the second operand of a sum."""
    return parameter.kind == "Tensor" and (parameter.nullable or parameter is TABLE[op.name].parameters[0])


def _unfit(where: str, parameter: Parameter, found: str) -> GraphError:
    kind = f"a list of {parameter.kind}" if parameter.is_list else parameter.kind
    wanted = f"{kind} or None" if parameter.nullable else kind
    return GraphError(f"{where}: parameter {parameter.name!r} is {found}; allowed: {wanted}")


def _check_results(graph: Graph, where: str, op: Operator, info: OperatorInfo) -> None:
    if not op.outputs or (info.returns and len(op.outputs) != info.returns):
        wanted = info.returns or "at least 1"
        raise GraphError(f"{where}: it states {len(op.outputs)} results; it has {wanted}")
    integers = info.name.startswith("python.")
    for out in op.outputs:
        if 0 <= out < len(graph.values) and (graph.values[out].spec is None) != integers:
            raise GraphError(f"{where}: value {out} must be {'an integer' if integers else 'a tensor'}")


def _check_integer(graph: Graph, where: str, op: Operator) -> None:
    operands = [graph.values[item.value].nominal if isinstance(item, Ref) else item for item in op.arguments]
    try:
        result = evaluate(op.name, [item for item in operands if isinstance(item, int)])
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None
    out = op.outputs[0]
    stated = graph.values[out].nominal if 0 <= out < len(graph.values) else result
    if stated != result:
        raise GraphError(f"{where}: value {out} is stated as {stated}, but follows as {result}")


def _check_shape(graph: Graph, where: str, op: Operator, made: list[int | None]) -> None:
    if not 0 <= op.outputs[0] < len(graph.values):
        return  # told by whoever checks the results
    try:
        expected = expected_shape(op, graph.values)
    except ShapeError as error:
        raise GraphError(f"{where}: {error}; its arguments: {_sources(graph, op, made)}") from None
    spec = graph.values[op.outputs[0]].spec
    if expected is not None and spec is not None and spec.shape != expected:
        raise GraphError(
            f"{where}: its result is stated as {list(spec.shape)}, but follows as {list(expected)} "
            f"from {_sources(graph, op, made)}"
        )


def _check_cost(graph: Graph, where: str, op: Operator) -> None:
    """Planners count on the cost rules to work for every operator of a checked graph."""
    if any(not 0 <= out < len(graph.values) for out in op.outputs):
        return  # told by whoever checks the results
    try:
        forward, backward = flops(op, graph.values)
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None
    if not (isfinite(forward) and isfinite(backward)):
        raise GraphError(f"{where}: its cost is not finite")


def _sources(graph: Graph, op: Operator, made: list[int | None]) -> str:
    """Tell the shape of each tensor argument and who makes it, at most four."""
    told = []
    for value in dict.fromkeys(op.reads()):
        spec, maker = graph.values[value].spec, made[value]
        if spec is not None:
            name = graph.input_of[value].name if maker == -1 else f"n{maker}"
            told.append(f'{spec.dtype} {list(spec.shape)} of "{name}"')
    return ", ".join(told[:4]) or "numbers"


def _told(item: Argument) -> str:
    if isinstance(item, tuple):
        return f"a list of {len(item)}"
    return f"{type(item).__name__} {str(item)[:40]!r}"


def _is_integer(item: Argument) -> bool:
    return type(item) is int and -(2**63) <= item < 2**63  # a bool is no integer here


def _is_number(item: Argument) -> bool:
    return isinstance(item, (bool, float)) or _is_integer(item)


#: Kinds for which an integer of the graph may stand; for a tensor, torch takes any number.
_TAKES_INTEGERS = frozenset({"int", "float", "Scalar", "Tensor"})

_CONSTANTS: dict[str, Callable[[Argument], bool]] = {
    "Tensor": _is_number,
    "Scalar": _is_number,
    "int": _is_integer,
    "float": lambda item: isinstance(item, float) or _is_integer(item),
    "bool": lambda item: isinstance(item, bool),
    "str": lambda item: isinstance(item, str) and len(item) <= MAX_TEXT and item.isprintable(),
    "ScalarType": lambda item: isinstance(item, DType) and item.name in DTYPE_BYTES,
    "Layout": lambda item: isinstance(item, Layout) and item.name == "strided",
    "MemoryFormat": lambda item: isinstance(item, MemoryFormat) and item.name in _MEMORY_FORMATS,
    "Device": lambda item: isinstance(item, Device),
}
