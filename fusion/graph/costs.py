"""What an operator costs, from shapes alone: floating-point operations forward and backward, and bytes moved.

Multiplications and additions inside matrix products, convolutions and attention count, two operations each, as
torch's own `FlopCounterMode` counts them; everything else counts as zero, because memory limits it, not arithmetic.
Where that counter is silent (matrix times vector, fused recurrent layers, attention on a CPU) the cost is that of the
products that the operator is made of. Where it counts a grouped convolution's weight gradient `groups` times too
high, this module does not follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from fusion.base.errors import GraphError
from fusion.graph.contraction import einsum_flops
from fusion.graph.dag import Argument, Cost, Operator, Ref, TensorSpec, Value
from fusion.graph.operators import FILLS, TABLE, argument_of

Flops = tuple[float, float]  #: forward, backward


def operator_cost(op: Operator, values: Sequence[Value], saved_bytes: int = 0) -> Cost:
    """Return the cost of `op`, an operator of the table, whose arguments and results index `values`.

    `saved_bytes`, what the backward keeps from the forward, only torch knows; capture measures it.
    """
    forward, backward = flops(op, values)
    return Cost(forward, backward, saved_bytes, moved_bytes(op, values))


def flops(op: Operator, values: Sequence[Value]) -> Flops:
    """Return floating-point operations of the forward and of the backward.

    The backward computes gradients only for arguments that require them, and none at all under `no_grad`.
    Raise GraphError where the arguments do not fit together; `check_graph` lets no such call pass.
    """
    rule = _RULES.get(TABLE[op.name].cost)
    if rule is None:
        return 0.0, 0.0
    try:
        forward, backward = rule(_Call(op, values))
    except (ArithmeticError, LookupError, ValueError):
        raise GraphError(f"{op.name}: the number or the shapes of its arguments do not fit together") from None
    return float(forward), 0.0 if op.no_grad else float(backward)


def moved_bytes(op: Operator, values: Sequence[Value]) -> int:
    """Return the bytes that the forward reads and writes; a view moves none."""
    rule = TABLE[op.name].cost
    if rule == "view":
        return 0
    written = sum(values[out].bytes for out in op.outputs)
    read = list(dict.fromkeys(op.reads()))
    if rule == "convert" and op.name != "aten.contiguous.default" and _same_dtype(op, values):
        return 0
    if rule == "rows":  # as many elements as are written, and the indices
        return 2 * written + sum(values[item].bytes for item in read if _is_index(values[item]))
    if op.name in FILLS:
        read = read[1:]
    return written + sum(values[item].bytes for item in read)


def _same_dtype(op: Operator, values: Sequence[Value]) -> bool:
    before, after = values[next(op.reads())].spec, values[op.outputs[0]].spec
    return before is not None and after is not None and before.dtype == after.dtype


def _is_index(value: Value) -> bool:
    return value.spec is not None and value.spec.dtype in ("int64", "int32")


class _Call:
    """An operator's call as its rule sees it: shapes and wanted gradients by parameter name."""

    def __init__(self, op: Operator, values: Sequence[Value]) -> None:
        self.op, self.values = op, values

    def __getitem__(self, name: str) -> Argument:
        return argument_of(self.op, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spec(self[name]).shape

    def wants(self, *names: str) -> int:
        """How many of these arguments require a gradient."""
        return sum(self._grad(self[name]) for name in names)

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        return [self._spec(item).shape for item in self._items(name)]

    def grads(self, name: str) -> list[bool]:
        return [self._grad(item) for item in self._items(name)]

    @property
    def output(self) -> tuple[int, ...]:
        return self._spec(Ref(self.op.outputs[0])).shape

    def _items(self, name: str) -> tuple[Argument, ...]:
        found = self[name]
        return found if isinstance(found, tuple) else (found,)

    def _spec(self, argument: Argument) -> TensorSpec:
        spec = self.values[argument.value].spec if isinstance(argument, Ref) else None
        return spec or TensorSpec("float32", ())  # a number where a tensor may stand

    def _grad(self, argument: Argument) -> bool:
        return isinstance(argument, Ref) and self.values[argument.value].requires_grad


def _linear(call: _Call) -> Flops:
    forward = 2 * prod(call.output) * call.shape("input")[-1]
    return forward, forward * call.wants("input", "weight")


def _product(call: _Call) -> Flops:
    first, second = (item.name for item in TABLE[call.op.name].parameters[:2])
    return _pair(call, first, second)


def _added_product(call: _Call) -> Flops:
    first, second = (item.name for item in TABLE[call.op.name].parameters[1:3])
    return _pair(call, first, second)


def _pair(call: _Call, first: str, second: str) -> Flops:
    """The product of the last two dimensions, as `matmul` defines it for vectors and broadcast batches."""
    left, right = call.shape(first), call.shape(second)
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    batch = _broadcast(left[:-2], right[:-2])
    forward = 2 * prod(batch) * rows * left[-1] * columns
    return forward, forward * call.wants(first, second)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(left), len(right))
    left, right = (1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


def _einsum(call: _Call) -> Flops:
    path = call["path"]
    return einsum_flops(str(call["equation"]), call.shapes("tensors"), call.grads("tensors"), path)


def _tensordot(call: _Call) -> Flops:
    dims, shape = call["dims_self"], call.shape("self")
    summed = [shape[_integer(dim)] for dim in dims] if isinstance(dims, tuple) else []
    forward = 2 * prod(call.output) * prod(summed)
    return forward, forward * call.wants("self", "other")


def _bilinear(call: _Call) -> Flops:
    weight = call.shape("weight")  # (out, in1, in2)
    forward = 2 * prod(call.output[:-1]) * (prod(weight) + weight[0] * weight[2])
    return forward, forward * call.wants("input1", "input2", "weight")


def _cdist(call: _Call) -> Flops:
    forward = 2 * prod(call.output) * call.shape("x1")[-1]
    return forward, forward * call.wants("x1", "x2")


def _conv(call: _Call) -> Flops:
    # the weight (out, in / groups, *kernel) is applied once per output position and sample
    weight = call.shape("weight")
    positions = prod(call.output[-(len(weight) - 2) :])
    forward = 2 * _conv_batch(call, weight) * positions * prod(weight)
    return forward, forward * call.wants("input", "weight")


def _conv_transpose(call: _Call) -> Flops:
    # the weight (in, out / groups, *kernel) is applied once per input position and sample
    weight = call.shape("weight")
    positions = prod(call.shape("input")[-(len(weight) - 2) :])
    forward = 2 * _conv_batch(call, weight) * positions * prod(weight)
    return forward, forward * call.wants("input", "weight")


def _conv_batch(call: _Call, weight: tuple[int, ...]) -> int:
    shape = call.shape("input")
    return shape[0] if len(shape) == len(weight) else 1


def _attention(call: _Call) -> Flops:
    """Two products forward; the backward repeats the first and makes four more. A causal mask saves nothing here."""
    query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
    scores = 2 * prod(call.output[:-1]) * key[-2]
    forward = scores * (query[-1] + value[-1])
    backward = scores * (3 * query[-1] + 2 * value[-1])
    return forward, backward if call.wants("query", "key", "value") else 0


def _recurrent(call: _Call) -> Flops:
    """Every weight matrix of every layer and direction is applied once per sample and time step."""
    times = 2 * prod(call.shape("input")[:-1])
    directions = int(bool(call["bidirectional"])) + 1
    shapes, grads = call.shapes("params"), call.grads("params")
    per_cell = len(shapes) // (int(_integer(call["num_layers"])) * directions)
    inner = bool(any(grads) or call.wants("input") or any(call.grads("hx")))
    forward = backward = 0
    for index, (shape, grad) in enumerate(zip(shapes, grads, strict=True)):
        if len(shape) != 2:
            continue
        reads_input = index % per_cell == 0 and index // per_cell < directions
        forward += times * prod(shape)
        backward += times * prod(shape) * (grad + (call.wants("input") if reads_input else inner))
    return forward, backward


def _integer(argument: Argument) -> int:
    return argument if isinstance(argument, int) else 1


def _cell(call: _Call) -> Flops:
    samples = 2 * prod(call.shape("input")[:-1])
    by_input, by_state = samples * prod(call.shape("w_ih")), samples * prod(call.shape("w_hh"))
    state_wants = call.grads("hx")[0]
    backward = by_input * call.wants("input", "w_ih") + by_state * (state_wants + call.wants("w_hh"))
    return by_input + by_state, backward


_RULES: dict[str, Callable[[_Call], Flops]] = {
    "linear": _linear,
    "matmul": _product,
    "addmm": _added_product,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "bilinear": _bilinear,
    "cdist": _cdist,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "attention": _attention,
    "recurrent": _recurrent,
    "cell": _cell,
}
