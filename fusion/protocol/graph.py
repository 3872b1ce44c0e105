"""The OP-DAG, to and from protobuf. What comes in is checked whole before anybody looks at it."""

from __future__ import annotations

from fusion.base.errors import GraphError
from fusion.base.ids import ValueId
from fusion.graph.check import MAX_OPERATORS, MAX_VALUES, check_graph
from fusion.graph.dag import (
    Argument,
    Cost,
    Device,
    DType,
    Graph,
    Input,
    InputKind,
    Layout,
    MemoryFormat,
    Operator,
    Ref,
    TensorSpec,
    Value,
)
from fusion.wire.v1 import graph_pb2

FORMAT = 1

_KINDS = {
    InputKind.PARAMETER: graph_pb2.INPUT_KIND_PARAMETER,
    InputKind.BUFFER: graph_pb2.INPUT_KIND_BUFFER,
    InputKind.CONSTANT: graph_pb2.INPUT_KIND_CONSTANT,
    InputKind.BATCH: graph_pb2.INPUT_KIND_BATCH,
    InputKind.BATCH_SIZE: graph_pb2.INPUT_KIND_BATCH_SIZE,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def graph_to_proto(graph: Graph) -> graph_pb2.Graph:
    """Return the message for a graph."""
    message = graph_pb2.Graph(
        format=FORMAT,
        loss=graph.loss,
        nominal_micro_batch=graph.nominal_micro_batch,
        dynamic_batch=graph.dynamic_batch,
    )
    for value in graph.values:
        entry = message.values.add(requires_grad=value.requires_grad)
        if value.spec is None:
            entry.integer, entry.nominal = True, value.nominal
        else:
            entry.tensor.dtype = value.spec.dtype
            entry.tensor.shape.extend(value.spec.shape)
    for item in graph.inputs:
        message.inputs.add(name=item.name, kind=_KINDS[item.kind], value=item.value, aliases=item.aliases)
    for op in graph.operators:
        _write_operator(op, message.operators.add())
    return message


def _write_operator(op: Operator, message: graph_pb2.Operator) -> None:
    message.name, message.module_path = op.name, op.module_path
    message.no_grad, message.autocast_dtype = op.no_grad, op.autocast_dtype
    message.outputs.extend(op.outputs)
    message.cost.forward_flops = op.cost.forward_flops
    message.cost.backward_flops = op.cost.backward_flops
    message.cost.saved_bytes = op.cost.saved_bytes
    message.cost.moved_bytes = op.cost.moved_bytes
    for argument in op.arguments:
        _write_argument(argument, message.arguments.add())
    for name, argument in op.keywords:
        _write_argument(argument, message.keywords[name])


def _write_argument(argument: Argument, message: graph_pb2.Argument) -> None:
    match argument:
        case None:
            message.none = True
        case bool():  # before int, of which it is a kind
            message.boolean = argument
        case int():
            message.integer = argument
        case float():
            message.real = argument
        case str():
            message.text = argument
        case Ref():
            message.value = argument.value
        case DType():
            message.dtype = argument.name
        case MemoryFormat():
            message.memory_format = argument.name
        case Layout():
            message.layout = argument.name
        case Device():
            message.device = True
        case tuple():
            message.list.SetInParent()
            for item in argument:
                _write_argument(item, message.list.items.add())


def graph_from_proto(message: graph_pb2.Graph) -> Graph:
    """Return the graph of a message, checked by `check_graph`; GraphError names what is wrong."""
    if message.format != FORMAT:
        raise GraphError(f"graph: format {message.format}; this version reads {FORMAT}")
    if len(message.operators) > MAX_OPERATORS or len(message.values) > MAX_VALUES:
        raise GraphError(
            f"graph: {len(message.operators)} operators over {len(message.values)} values; "
            f"allowed are {MAX_OPERATORS} over {MAX_VALUES}"
        )
    graph = Graph(
        values=tuple(_read_value(index, item) for index, item in enumerate(message.values)),
        inputs=tuple(_read_input(item) for item in message.inputs),
        operators=tuple(_read_operator(position, item) for position, item in enumerate(message.operators)),
        loss=ValueId(message.loss),
        nominal_micro_batch=message.nominal_micro_batch,
        dynamic_batch=message.dynamic_batch,
    )
    check_graph(graph)
    return graph


def _read_value(index: int, message: graph_pb2.Value) -> Value:
    if message.integer == message.HasField("tensor"):
        raise GraphError(f"value {index}: it must be either a tensor or an integer")
    if message.integer:
        return Value(None, message.nominal, message.requires_grad)
    spec = TensorSpec(message.tensor.dtype, tuple(message.tensor.shape))
    return Value(spec, requires_grad=message.requires_grad)


def _read_input(message: graph_pb2.Input) -> Input:
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise GraphError(f"input {message.name[:80]!r}: kind {message.kind} is not known")
    return Input(message.name, kind, ValueId(message.value), tuple(message.aliases))


def _read_operator(position: int, message: graph_pb2.Operator) -> Operator:
    cost = message.cost
    return Operator(
        name=message.name,
        arguments=tuple(_read_argument(position, item) for item in message.arguments),
        keywords=tuple((name, _read_argument(position, message.keywords[name])) for name in sorted(message.keywords)),
        outputs=tuple(ValueId(out) for out in message.outputs),
        module_path=message.module_path,
        no_grad=message.no_grad,
        autocast_dtype=message.autocast_dtype,
        cost=Cost(cost.forward_flops, cost.backward_flops, cost.saved_bytes, cost.moved_bytes),
    )


def _read_argument(position: int, message: graph_pb2.Argument) -> Argument:
    match message.WhichOneof("kind"):
        case "value":
            return Ref(ValueId(message.value))
        case "integer":
            return message.integer
        case "real":
            return message.real
        case "boolean":
            return message.boolean
        case "text":
            return message.text
        case "none":
            return None
        case "dtype":
            return DType(message.dtype)
        case "memory_format":
            return MemoryFormat(message.memory_format)
        case "layout":
            return Layout(message.layout)
        case "device":
            return Device()
        case "list":
            return tuple(_read_argument(position, item) for item in message.list.items)
        case _:
            raise GraphError(f'operator "n{position}": an argument of no kind')
