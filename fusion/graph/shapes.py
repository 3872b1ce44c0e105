"""Which shape a result must have, for the operators where that is simple or where much memory hangs on it.

A graph states the shape of every value. These rules compare the statement with the operator's arguments, so that a
result cannot be larger than it says: whatever checks sizes against a machine's memory may trust the stated ones. The
operators without a rule here are compared by the worker, which runs the graph on tensors without memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, isfinite, prod

from fusion.graph.dag import Argument, Operator, Ref, Value
from fusion.graph.operators import TABLE, argument_of

Shape = tuple[int, ...]


class ShapeError(Exception):
    """The arguments do not fit together; the text says how."""


class ShapeCall:
    """An operator's call as a shape rule sees it."""

    def __init__(self, op: Operator, values: Sequence[Value]) -> None:
        self.op = op
        self._values = values

    def __getitem__(self, name: str) -> Argument:
        return argument_of(self.op, name)

    def has(self, name: str) -> bool:
        return name in TABLE[self.op.name].index_of

    def tensor(self, index: int) -> Shape:
        """Shape of the argument at `index`; a number counts as a scalar."""
        name = TABLE[self.op.name].parameters[index].name
        return self._shape(self[name])

    def tensors(self) -> list[Shape]:
        """Shapes of all tensors among the arguments, in order."""
        specs = (self._values[value].spec for value in self.op.reads())
        return [spec.shape for spec in specs if spec is not None]

    def integer(self, name: str, default: int = 0) -> int:
        found = self._integer(self[name])
        return default if found is None else found

    def integers(self, name: str) -> Shape | None:
        found = self[name]
        if found is None:
            return None
        items = [self._integer(item) for item in (found if isinstance(found, tuple) else (found,))]
        return tuple(item for item in items if item is not None)

    def number(self, name: str, default: float = 0.0) -> float:
        found = self[name]
        if isinstance(found, float):
            return found
        return float(self.integer(name)) if found is not None else default

    @property
    def result(self) -> Shape:
        return self._shape(Ref(self.op.outputs[0]))

    def _shape(self, argument: Argument) -> Shape:
        spec = self._values[argument.value].spec if isinstance(argument, Ref) else None
        return spec.shape if spec is not None else ()

    def _integer(self, argument: Argument) -> int | None:
        if isinstance(argument, Ref):
            value = self._values[argument.value]
            return value.nominal if value.spec is None else None
        return argument if isinstance(argument, int) else None


def expected_shape(op: Operator, values: Sequence[Value]) -> Shape | None:
    """Return the shape that the first result of `op` must have, or None where no rule says.

    `op` is a call that the table allows. Raise ShapeError where the arguments do not fit together.
    """
    rule = RULES.get(TABLE[op.name].shape)
    if rule is None:
        return None
    try:
        return rule(ShapeCall(op, values))
    except (ArithmeticError, LookupError, ValueError):
        raise ShapeError("the number or the shapes of its arguments do not fit together") from None


def _same(call: ShapeCall) -> Shape | None:
    shapes = call.tensors()
    return shapes[0] if shapes else None


def _broadcast(call: ShapeCall) -> Shape:
    return broadcast(call.tensors())


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape to which `shapes` broadcast. Raise ShapeError where they do not."""
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for place, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[place] not in (1, size):
                raise ShapeError(f"shapes {', '.join(str(list(item)) for item in shapes)} do not broadcast")
            result[place] = size if size != 1 else result[place]
    return tuple(result)


def _elements(call: ShapeCall) -> Shape | None:
    before, after = call.tensor(0), call.result
    if prod(before) != prod(after):
        raise ShapeError(f"{list(before)} has {prod(before)} elements, the result {list(after)} {prod(after)}")
    return None


def _size(call: ShapeCall) -> Shape | None:
    return call.integers("size")


def _range(call: ShapeCall) -> Shape | None:
    name = call.op.name.split(".")[1]
    if name == "scalar_tensor":
        return ()
    if name == "eye":
        return call.integer("n"), call.integer("m") if call.has("m") else call.integer("n")
    if name == "linspace":
        return (call.integer("steps"),)
    start = call.number("start") if call.has("start") else 0.0
    step = call.number("step", 1.0) if call.has("step") else 1.0
    span = (call.number("end") - start) / step if step else float("inf")
    if not isfinite(span) or span < 0:
        raise ShapeError(f"a range from {start} to {call.number('end')} by {step} has no length")
    return (ceil(span),)


def _expand(call: ShapeCall) -> Shape | None:
    before, size = call.tensor(0), call.integers("size") or ()
    if len(size) < len(before):
        raise ShapeError(f"{list(before)} cannot be expanded to {list(size)}")
    padded = (1,) * (len(size) - len(before)) + before
    for old, new in zip(padded, size, strict=True):
        if new not in (-1, old) and old != 1:
            raise ShapeError(f"{list(before)} cannot be expanded to {list(size)}")
    return tuple(old if new == -1 else new for old, new in zip(padded, size, strict=True))


def _repeat(call: ShapeCall) -> Shape | None:
    before = call.tensor(0)
    times = call.integers("repeats" if call.has("repeats") else "dims") or ()
    rank = max(len(before), len(times))
    before, times = (1,) * (rank - len(before)) + before, (1,) * (rank - len(times)) + times
    return tuple(size * count for size, count in zip(before, times, strict=True))


def _repeat_interleave(call: ShapeCall) -> Shape | None:
    before, times = call.tensor(0), call.integer("repeats")
    if call["dim"] is None:
        return (prod(before) * times,)
    place = _place(call.integer("dim"), len(before))
    return (*before[:place], before[place] * times, *before[place + 1 :])


def _pad(call: ShapeCall) -> Shape | None:
    before = call.tensor(0)
    pads = call.integers("pad" if call.has("pad") else "padding") or ()
    if len(pads) % 2 or len(pads) > 2 * len(before):
        raise ShapeError(f"padding {list(pads)} does not fit {list(before)}")
    result = list(before)
    for index in range(len(pads) // 2):
        result[-1 - index] += pads[2 * index] + pads[2 * index + 1]
    return tuple(result)


def _one_hot(call: ShapeCall) -> Shape | None:
    classes = call.integer("num_classes", -1)
    if classes < 0:
        raise ShapeError("num_classes must be given, because otherwise the data decide on the shape")
    return (*call.tensor(0), classes)


def _cat(call: ShapeCall) -> Shape | None:
    # torch lets empty tensors of rank 1 pass as neutral
    shapes = [shape for shape in call.tensors() if shape != (0,)]
    if not shapes:
        return (0,)
    place = _place(call.integer("dim"), len(shapes[0]))
    others = {(*shape[:place], *shape[place + 1 :]) for shape in shapes}
    if len(others) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise ShapeError(f"shapes {', '.join(str(list(item)) for item in shapes)} differ outside dimension {place}")
    return (*shapes[0][:place], sum(shape[place] for shape in shapes), *shapes[0][place + 1 :])


def _stack(call: ShapeCall) -> Shape | None:
    shapes = call.tensors()
    if len(set(shapes)) != 1:
        raise ShapeError(f"shapes {', '.join(str(list(item)) for item in shapes)} must all be the same")
    place = _place(call.integer("dim"), len(shapes[0]) + 1)
    return (*shapes[0][:place], len(shapes), *shapes[0][place:])


def _place(dim: int, rank: int) -> int:
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise ShapeError(f"dimension {dim} does not exist in rank {rank}")
    return dim % max(rank, 1)


def _embedding(call: ShapeCall) -> Shape | None:
    return (*call.tensor(1), *call.tensor(0)[1:])


def _linear(call: ShapeCall) -> Shape | None:
    before, weight = call.tensor(0), call.tensor(1)
    if not before or not weight or before[-1] != weight[-1]:
        raise ShapeError(f"{list(before)} does not fit the weight {list(weight)}")
    return (*before[:-1], *weight[:-1])


def _matmul(call: ShapeCall) -> Shape | None:
    return _product(call.tensor(0), call.tensor(1))


def _addmm(call: ShapeCall) -> Shape | None:
    return _product(call.tensor(1), call.tensor(2))


def _product(left: Shape, right: Shape) -> Shape:
    if not left or not right or left[-1] != right[-2 if len(right) > 1 else -1]:
        raise ShapeError(f"{list(left)} and {list(right)} cannot be multiplied")
    batch = broadcast([left[:-2], right[:-2]])
    return (*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))


def _conv(call: ShapeCall) -> Shape | None:
    before, weight = call.tensor(0), call.tensor(1)
    spatial = len(weight) - 2
    if len(before) - spatial not in (1, 2) or before[-spatial - 1] != weight[1] * call.integer("groups", 1):
        raise ShapeError(f"{list(before)} does not fit the weight {list(weight)} in {call.integer('groups', 1)} groups")
    stride, dilation = (_spread(call.integers(name), spatial, 1) for name in ("stride", "dilation"))
    padding = call["padding"]
    if padding == "same":
        return (*before[: -spatial - 1], weight[0], *before[-spatial:])
    pads = _spread(None if isinstance(padding, str) else call.integers("padding"), spatial, 0)
    sizes = zip(before[-spatial:], weight[2:], pads, stride, dilation, strict=True)
    after = [(size + 2 * pad - wide * (kernel - 1) - 1) // step + 1 for size, kernel, pad, step, wide in sizes]
    return (*before[: -spatial - 1], weight[0], *after)


def _spread(given: Shape | None, count: int, default: int) -> Shape:
    """One number for every dimension, from a list with as many, with one, or none."""
    found = given or (default,)
    found = found * count if len(found) == 1 else found
    if len(found) != count or (default and min(found) < 1):
        raise ShapeError(f"{list(found)} does not fit {count} dimensions")
    return found


def _output_size(call: ShapeCall) -> Shape | None:
    before, size = call.tensor(0), call.integers("output_size")
    if size is None:
        factors = call["scale_factors"]
        scales = [item for item in factors if isinstance(item, float)] if isinstance(factors, tuple) else []
        if not all(isfinite(scale) and 0 < scale < 2**32 for scale in scales):
            raise ShapeError(f"scale_factors {scales} must be positive")
        sizes = before[len(before) - len(scales) :]
        size = tuple(int(old * scale) for old, scale in zip(sizes, scales, strict=True))
    return (*before[: len(before) - len(size)], *size)


#: By the name that the table gives.
RULES: dict[str, Callable[[ShapeCall], Shape | None]] = {
    "same": _same,
    "broadcast": _broadcast,
    "elements": _elements,
    "size": _size,
    "range": _range,
    "expand": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "pad": _pad,
    "one_hot": _one_hot,
    "cat": _cat,
    "stack": _stack,
    "embedding": _embedding,
    "linear": _linear,
    "matmul": _matmul,
    "addmm": _addmm,
    "conv": _conv,
    "output_size": _output_size,
}
