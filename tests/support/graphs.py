"""Graphs and operator calls for tests, built by hand and without capture."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.base.ids import ValueId
from fusion.graph.dag import (
    Argument,
    Cost,
    Graph,
    Input,
    InputKind,
    Operator,
    Ref,
    TensorSpec,
    Value,
)


class GraphBuilder:
    """Adds inputs and operators one by one; every method that makes a value returns a reference to it."""

    def __init__(self, micro_batch: int = 2) -> None:
        self.micro_batch = micro_batch
        self.values: list[Value] = []
        self.inputs: list[Input] = []
        self.operators: list[Operator] = []

    def _value(self, value: Value) -> Ref:
        self.values.append(value)
        return Ref(ValueId(len(self.values) - 1))

    def parameter(self, name: str, *shape: int, trainable: bool = True, aliases: tuple[str, ...] = ()) -> Ref:
        return self.input(name, InputKind.PARAMETER, TensorSpec("float32", shape), trainable, aliases)

    def buffer(self, name: str, *shape: int, dtype: str = "float32") -> Ref:
        return self.input(name, InputKind.BUFFER, TensorSpec(dtype, shape))

    def batch(self, name: str, *shape: int, dtype: str = "float32") -> Ref:
        return self.input(name, InputKind.BATCH, TensorSpec(dtype, shape))

    def batch_size(self) -> Ref:
        ref = self._value(Value(None, nominal=self.micro_batch))
        self.inputs.append(Input("batch_size", InputKind.BATCH_SIZE, ref.value))
        return ref

    def input(
        self, name: str, kind: InputKind, spec: TensorSpec, requires_grad: bool = False, aliases: tuple[str, ...] = ()
    ) -> Ref:
        ref = self._value(Value(spec, requires_grad=requires_grad))
        self.inputs.append(Input(name, kind, ref.value, aliases))
        return ref

    def call(
        self,
        name: str,
        /,
        *arguments: Argument,
        shape: Sequence[int] = (),
        out_dtype: str = "float32",
        outputs: Sequence[Value] | None = None,
        no_grad: bool = False,
        cost: Cost | None = None,
        **keywords: Argument,
    ) -> Ref:
        """Add an operator; returns its first output. A result requires a gradient where an argument does."""
        made = Operator(name, arguments, tuple(sorted(keywords.items())))
        grad = not no_grad and out_dtype.startswith("float") and any(self.values[v].requires_grad for v in made.reads())
        wanted = outputs or [Value(TensorSpec(out_dtype, tuple(shape)), requires_grad=grad)]
        refs = [self._value(item) for item in wanted]
        self.operators.append(
            Operator(
                name,
                arguments,
                tuple(sorted(keywords.items())),
                tuple(ref.value for ref in refs),
                no_grad=no_grad,
                cost=cost or Cost(moved_bytes=sum(item.bytes for item in wanted)),
            )
        )
        return refs[0]

    def integer(self, name: str, *arguments: Argument, nominal: int) -> Ref:
        """Add arithmetic on integers."""
        return self.call(name, *arguments, outputs=[Value(None, nominal=nominal)])

    def graph(self, loss: Ref | None = None) -> Graph:
        """The graph; without `loss`, the mean of the last operator's first result becomes it."""
        loss = loss or self.call("aten.mean.default", Ref(self.operators[-1].outputs[0]))
        return Graph(tuple(self.values), tuple(self.inputs), tuple(self.operators), loss.value, self.micro_batch)


def chain(layers: int, width: int = 4, micro_batch: int = 2) -> Graph:
    """Linear layers one after another on a batch field "x"; operator i is layer i, the last one is the mean."""
    build = GraphBuilder(micro_batch)
    x = build.batch("x", micro_batch, width)
    for layer in range(layers):
        weight = build.parameter(f"layers.{layer}.weight", width, width)
        x = build.call("aten.linear.default", x, weight, shape=(micro_batch, width))
    return build.graph()
