"""Random graphs for property tests, and a tiny machine that runs them on symbols instead of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

from fusion.base.ids import ValueId
from fusion.graph.dag import Graph, InputKind, Operator, Ref
from fusion.graph.partition import Partition, operators_of
from tests.support.graphs import GraphBuilder

SHAPE = (2, 4)

#: For property tests: no example fails because the machine is busy.
untimed = settings(deadline=None)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs of up to 14 operators with skips, views, writes, counters, masks, dropout, tied weights and integers."""
    build = GraphBuilder()
    batch = [build.batch("x", *SHAPE), build.batch("y", *SHAPE)]
    parameters = [build.parameter(f"w{i}", 4, 4, trainable=i < 2) for i in range(3)]
    buffers = [build.buffer(f"b{i}", *SHAPE) for i in range(2)]
    integers = [build.batch_size()]
    made: list[Ref] = []  # may be written to: never a view of a batch field or a parameter

    def some() -> Ref:
        return draw(st.sampled_from([*batch, *buffers, *made, *made]))

    kinds = ["linear", "add", "view", "write", "write buffer", "ones", "tril", "dropout", "integer", "by integer"]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=13)):
        match kind:
            case "linear":
                made.append(build.call("aten.linear.default", some(), draw(st.sampled_from(parameters)), shape=SHAPE))
            case "add":
                made.append(build.call("aten.add.Tensor", some(), some(), shape=SHAPE))
            case "view" if made:
                made.append(build.call("aten.view.default", draw(st.sampled_from(made)), SHAPE, shape=SHAPE))
            case "write" if made:
                made.append(build.call("aten.add_.Tensor", draw(st.sampled_from(made)), some(), shape=SHAPE))
            case "write buffer":
                build.call("aten.add_.Tensor", draw(st.sampled_from(buffers)), some(), shape=SHAPE)
            case "ones":
                made.append(build.call("aten.ones.default", SHAPE, shape=SHAPE))
            case "tril":
                made.append(build.call("aten.tril.default", some(), shape=SHAPE))
            case "dropout":
                made.append(build.call("fusion.dropout.default", some(), 0.5, True, shape=SHAPE))
            case "integer":
                operand = draw(st.sampled_from(integers))
                nominal = 1 + build.values[operand.value].nominal
                integers.append(build.integer("python.add", operand, 1, nominal=nominal))
            case "by integer":
                made.append(build.call("aten.mul.Tensor", some(), draw(st.sampled_from(integers)), shape=SHAPE))
    return build.graph(build.call("aten.mse_loss.default", some(), some()))


@dataclass
class Cell:
    """A piece of memory; several values may be views of it."""

    content: object


class Machine:
    """One stage: what an operator returns is the expression of what it was given."""

    def __init__(self, graph: Graph, inputs: Iterable[ValueId]) -> None:
        self.graph = graph
        self.cells: dict[ValueId, Cell] = {value: Cell(graph.input_of[value].name) for value in inputs}

    def run(self, positions: Iterable[int]) -> None:
        for position in positions:
            self._step(position, self.graph.operators[position])

    def contents(self, values: Iterable[ValueId]) -> dict[ValueId, object]:
        return {value: self.cells[value].content for value in values}

    def _step(self, position: int, op: Operator) -> None:
        given = [self.cells[item.value] if isinstance(item, Ref) else Cell(item) for item in op.arguments]
        if op.name == "aten.view.default":
            result = given[0]
        else:
            where = position if op.name == "fusion.dropout.default" else None
            expression = (op.name, where, *(cell.content for cell in given))
            result = given[0] if op.name == "aten.add_.Tensor" else Cell(None)
            result.content = expression
        self.cells[op.outputs[0]] = result


def run_whole(graph: Graph) -> Machine:
    machine = Machine(graph, [item.value for item in graph.inputs])
    machine.run(range(len(graph.operators)))
    return machine


def run_in_pieces(found: Partition) -> list[Machine]:
    """Run stage after stage; each gets nothing but its inputs and the edges' contents when their source has ended."""
    machines: list[Machine] = []
    for shard in found.shards:
        machine = Machine(found.graph, shard.inputs)
        for index in shard.incoming:
            edge = found.edges[index]
            machine.cells[edge.value] = Cell(machines[edge.source].cells[edge.value].content)
        machine.run(operators_of(shard))
        machines.append(machine)
    return machines


def buffers_of(graph: Graph) -> list[ValueId]:
    return [item.value for item in graph.inputs if item.kind is InputKind.BUFFER]
