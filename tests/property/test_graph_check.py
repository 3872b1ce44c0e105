"""Whatever an operator is called with: the graph is refused with a GraphError, or everything can work with it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusion.base.errors import GraphError
from fusion.graph.check import check_graph
from fusion.graph.dag import DTYPE_BYTES, Argument, Device, DType, Graph, Layout, MemoryFormat, TensorSpec, Value
from fusion.graph.operators import TABLE, Parameter
from fusion.graph.partition import crossing_bytes, legal_cuts, partition
from fusion.protocol.graph import graph_from_proto, graph_to_proto
from tests.support.graphs import GraphBuilder
from tests.support.random_graphs import untimed

SHAPES = [(), (4,), (4, 4), (2, 4), (2, 4, 4), (2, 4, 4, 4), (0, 4)]
INTEGERS = st.integers(-5, 5) | st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])
FLOATS = st.sampled_from([0.0, 0.5, 2.0, -1.0, 1e300, float("inf"), float("nan")])
CONSTANTS: dict[str, st.SearchStrategy[Any]] = {
    "int": INTEGERS,
    "float": FLOATS,
    "bool": st.booleans(),
    "str": st.sampled_from(["", "none", "same", "ij,jk->ik", "...i,...i", "ii", "a->b->c", ",", "x" * 50]),
    "Scalar": INTEGERS | FLOATS | st.booleans(),
    "ScalarType": st.sampled_from(sorted(DTYPE_BYTES)).map(DType),
    "Layout": st.just(Layout("strided")),
    "Device": st.just(Device()),
    "MemoryFormat": st.just(MemoryFormat("contiguous_format")),
}


@st.composite
def called(draw: st.DrawFn) -> Graph:
    """One operator of the table with arguments of the right kinds, mostly, but of any size and number."""
    build = GraphBuilder(micro_batch=2)
    refs = [build.parameter(f"p{index}", *shape) for index, shape in enumerate(SHAPES)]
    integer = build.batch_size()

    def one(parameter: Parameter) -> Argument:
        if parameter.kind == "Tensor":
            return draw(st.sampled_from(refs))
        if draw(st.integers(0, 19)) == 0:
            return integer
        return draw(CONSTANTS.get(parameter.kind, st.none()))  # type: ignore[no-any-return]

    def argument(parameter: Parameter) -> Argument:
        if parameter.nullable and draw(st.booleans()):
            return None
        if parameter.is_list:
            return tuple(one(parameter) for _ in range(draw(st.integers(0, 4))))
        return one(parameter)

    info = TABLE[draw(st.sampled_from(sorted(TABLE)))]
    given_by_position = draw(st.integers(sum(item.required for item in info.positional), len(info.positional)))
    arguments = [argument(item) for item in info.positional[:given_by_position]]
    keywords = {item.name: argument(item) for item in info.parameters if item.keyword_only and draw(st.booleans())}
    shape = draw(st.sampled_from(SHAPES))
    is_integer = info.name.startswith("python.")
    result = Value(None if is_integer else TensorSpec("float32", shape), requires_grad=not is_integer)
    build.call(info.name, *arguments, outputs=[result] * (info.returns or 2), **keywords)
    return build.graph(build.call("aten.sum.default", refs[0]))


@untimed
@given(called())
def test_any_call_is_refused_or_can_be_cut_costed_and_shipped(graph: Graph) -> None:
    try:
        check_graph(graph)
    except GraphError:
        return
    legal_cuts(graph)
    crossing_bytes(graph)
    for cut in legal_cuts(graph):
        partition(graph, [cut])
    assert [op.name for op in graph_from_proto(graph_to_proto(graph)).operators] == [op.name for op in graph.operators]
