"""Graphs survive the wire unchanged, and whatever arrives is either sound or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fusion.base.errors import GraphError
from fusion.graph.check import check_graph
from fusion.graph.dag import (
    DTYPE_BYTES,
    Argument,
    Cost,
    Device,
    DType,
    Graph,
    InputKind,
    Layout,
    MemoryFormat,
    TensorSpec,
)
from fusion.protocol.graph import graph_from_proto, graph_to_proto
from fusion.wire.v1 import graph_pb2
from tests.support.graphs import GraphBuilder, chain
from tests.support.random_graphs import graphs, untimed

INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS: st.SearchStrategy[Any] = st.one_of(st.booleans(), INT64, st.floats(allow_nan=False))
COSTS = st.builds(
    Cost,
    st.floats(0, 1e18),
    st.floats(0, 1e18),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
)


@st.composite
def wordy_graphs(draw: st.DrawFn) -> Graph:
    """Graphs whose operators take every kind of constant."""
    build = GraphBuilder(micro_batch=draw(st.integers(1, 100)))
    w = build.parameter("w", 4, 4, aliases=tuple(f"tied.{i}" for i in range(draw(st.integers(0, 2)))))
    build.input("$constant.0", InputKind.CONSTANT, TensorSpec(draw(st.sampled_from(list(DTYPE_BYTES))), (3,)))
    size = build.batch_size()
    less = draw(st.integers(0, 5))
    build.integer("python.sub", size, less, nominal=build.micro_batch - less)
    build.call("aten.add.Scalar", w, draw(NUMBERS), draw(NUMBERS), shape=(4, 4))
    build.call("aten.masked_fill.Scalar", w, w, draw(NUMBERS), shape=(4, 4))
    build.call("aten.sum.dim_IntList", w, draw(st.none() | st.lists(INT64).map(tuple)), draw(st.booleans()))
    build.call("aten.slice.Tensor", w, 0, 0, draw(st.sampled_from([None, 2**63 - 1, size])), shape=(4, 4))
    build.call("aten.index.Tensor", w, (None, w) if draw(st.booleans()) else (w,), shape=(4, 4))
    build.call("aten.einsum.default", draw(st.sampled_from(["ab,bc->ac", "ab, bc", "...,..."])), (w, w), shape=(4, 4))
    build.call("aten.upsample_nearest1d.vec", w, None, (2.0,), shape=(4, 8))
    keywords: dict[str, Argument] = {
        "dtype": DType(draw(st.sampled_from(list(DTYPE_BYTES)))),
        "layout": Layout("strided"),
        "device": Device(),
        "memory_format": MemoryFormat(draw(st.sampled_from(["preserve_format", "channels_last"]))),
        "pin_memory": draw(st.none() | st.booleans()),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(keywords))))
    build.call("aten.zeros_like.default", w, shape=(4, 4), **{name: keywords[name] for name in chosen})
    graph = build.graph(build.call("aten.sum.default", w))
    operators = tuple(
        replace(
            op,
            cost=draw(COSTS),
            no_grad=draw(st.booleans()),
            module_path=draw(st.sampled_from(["", "blocks.3.attn", "straße"])),
            autocast_dtype=draw(st.sampled_from(["", "off", "bfloat16"])),
        )
        for op in graph.operators
    )
    return replace(graph, operators=operators, dynamic_batch=draw(st.booleans()))


def travelled(graph: Graph) -> Graph:
    data = graph_to_proto(graph).SerializeToString(deterministic=True)
    return graph_from_proto(graph_pb2.Graph.FromString(data))


@untimed
@given(wordy_graphs())
def test_every_kind_of_argument_survives_with_its_type(graph: Graph) -> None:
    check_graph(graph)
    back = travelled(graph)
    assert back == graph
    # True == 1 == 1.0 in Python, so the text tells them apart
    assert [repr(op) for op in back.operators] == [repr(op) for op in graph.operators]


@untimed
@given(graphs())
def test_whole_graphs_survive_and_equal_graphs_give_equal_bytes(graph: Graph) -> None:
    back = travelled(graph)
    assert back == graph
    first, second = (graph_to_proto(item).SerializeToString(deterministic=True) for item in (graph, back))
    assert first == second


@untimed
@given(st.data())
def test_damaged_bytes_are_refused_or_give_a_sound_graph(data: st.DataObject) -> None:
    whole = bytearray(graph_to_proto(chain(2)).SerializeToString(deterministic=True))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        graph = graph_from_proto(graph_pb2.Graph.FromString(bytes(whole)))
    except (GraphError, DecodeError):
        return
    check_graph(graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "format", 2), "graph: format 2; this version reads 1"),
        (lambda m: m.values[0].Clear(), "value 0: it must be either a tensor or an integer"),
        (lambda m: setattr(m.values[0], "integer", True), "value 0: it must be either a tensor or an integer"),
        (lambda m: setattr(m.inputs[0], "kind", 77), "input 'x': kind 77 is not known"),
        (lambda m: m.operators[1].arguments[0].Clear(), 'operator "n1": an argument of no kind'),
        (lambda m: m.operators[1].arguments.add(integer=1), 'operator "n1"'),
        (lambda m: m.operators[0].keywords["x=open()"].CopyFrom(graph_pb2.Argument(none=True)), "no parameter"),
        (lambda m: m.values[0].tensor.shape.append(-5), "negative dimension"),
        (lambda m: setattr(m, "nominal_micro_batch", 0), "nominal_micro_batch: 0"),
    ],
)
def test_messages_that_are_no_sound_graph_are_refused_by_name(change: Any, message: str) -> None:
    sent = graph_to_proto(chain(2))
    change(sent)
    with pytest.raises(GraphError, match=message.replace("(", r"\(")):
        graph_from_proto(sent)


def test_b24_a_million_operators_are_refused_before_they_are_read() -> None:
    sent = graph_to_proto(chain(1))
    for _ in range(200_001):
        sent.operators.add()
    with pytest.raises(GraphError, match="200003 operators over 4 values; allowed are 200000"):
        graph_from_proto(sent)
