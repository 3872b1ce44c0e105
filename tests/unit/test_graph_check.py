"""Hostile and broken graphs: each is refused with a message that names the place."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fusion.base.errors import GraphError
from fusion.base.ids import ValueId
from fusion.graph import check
from fusion.graph.check import check_graph
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
from tests.support.graphs import GraphBuilder, chain


def refused(graph: Graph, message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        check_graph(graph)
    assert "\n" not in str(caught.value)


def with_operator(graph: Graph, position: int, **changes: Any) -> Graph:
    operators = list(graph.operators)
    operators[position] = replace(operators[position], **changes)
    return replace(graph, operators=tuple(operators))


def with_value(graph: Graph, index: int, value: Value) -> Graph:
    return replace(graph, values=(*graph.values[:index], value, *graph.values[index + 1 :]))


def with_input(graph: Graph, index: int, **changes: Any) -> Graph:
    inputs = list(graph.inputs)
    inputs[index] = replace(inputs[index], **changes)
    return replace(graph, inputs=tuple(inputs))


def call_graph(name: str, *arguments: Argument, shape: tuple[int, ...] = (2, 4), **keywords: Argument) -> Graph:
    """A linear layer "n0" whose result is value 2, then the call as "n1"; x is value 0, its weight value 1."""
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    build.call("aten.linear.default", x, w, shape=(2, 4))
    call = build.call(name, *arguments, shape=shape, **keywords)
    return build.graph(build.call("aten.sum.default", call))


H = Ref(ValueId(2))


def test_a_sound_graph_passes() -> None:
    check_graph(chain(3))


def test_a_graph_with_every_kind_of_argument_passes() -> None:
    build = GraphBuilder()
    x, w, size = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.batch_size()
    rows = build.integer("python.mul", size, 3, nominal=6)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    h = build.call("aten.repeat.default", h, (3, 1), shape=(6, 4))
    h = build.call("aten.view.default", h, (rows, -1), shape=(6, 4))
    h = build.call("aten.clone.default", h, shape=(6, 4), memory_format=MemoryFormat("contiguous_format"))
    mask = build.call("aten.full.default", (rows, 4), True, shape=(6, 4), layout=Layout("strided"), device=Device())
    h = build.call("aten.mul.Tensor", h, mask, shape=(6, 4))
    h = build.call("aten.mul.Tensor", h, 0.5, shape=(6, 4))
    h = build.call("aten.div.Tensor", h, size, shape=(6, 4))
    h = build.call("aten.gelu.default", h, shape=(6, 4), approximate="tanh")
    h = build.call("aten.index.Tensor", h, (None, build.call("aten.arange.default", 2, shape=(2,))), shape=(6, 2))
    h = build.call("aten.upsample_nearest1d.vec", build.call("aten.unsqueeze.default", h, 0, shape=(1, 6, 2)), None,
                   (2.0,), shape=(1, 6, 4))  # fmt: skip
    h = build.call("aten.softmax.int", h, -1, DType("float32"), shape=(1, 6, 4))
    check_graph(build.graph(build.call("aten.sum.default", h)))


# B24: structure


def test_b24_an_operator_outside_the_table_is_refused_by_name() -> None:
    graph = with_operator(chain(2), 1, name="aten.from_file.default")
    refused(graph, r"operator \"n1\" \('aten.from_file.default'\): this operator is not in the table")


@pytest.mark.parametrize("name", ["", "aten.linear", "linear", "torch.ops.load_library", "aten.resize_.default", "x\n"])
def test_t5_no_other_name_passes(name: str) -> None:
    refused(with_operator(chain(2), 0, name=name), "not in the table")


def test_t4_a_keyword_that_is_code_is_refused() -> None:
    graph = with_operator(chain(1), 1, keywords=(("a=open('/tmp/pwn','w'),b", 1),))
    refused(graph, r'operator "n1" .*: it has no parameter "a=open')


@pytest.mark.parametrize("name", ["x=open('/tmp/pwn','w')", "", "a b", ".w", "-w", "w\n", "ü", "w" * 257])
def test_t4_an_input_name_that_is_code_or_unprintable_is_refused(name: str) -> None:
    refused(with_input(chain(1), 1, name=name), "is not allowed; allowed: 1 to 256 of A-Z a-z 0-9")


@pytest.mark.parametrize("name", ["w", "0.weight", "layers.11.attn.qkv-proj", "$buffer.mask", "$constant.0", "_x"])
def test_module_names_of_every_usual_kind_pass(name: str) -> None:
    check_graph(with_input(chain(1), 1, name=name))


def test_two_inputs_may_not_have_the_same_name_or_alias() -> None:
    refused(with_input(chain(1), 1, name="x"), "'x' is given twice")
    refused(with_input(chain(2), 2, aliases=("layers.0.weight",)), "'layers.0.weight' is given twice")
    refused(with_input(chain(1), 1, aliases=("a b",)), "'a b' is not allowed")


def test_b24_a_use_before_its_definition_names_both_operators() -> None:
    graph = chain(2)
    swapped = replace(graph, operators=(graph.operators[1], graph.operators[0], graph.operators[2]))
    refused(swapped, r'operator "n0" .*: it reads value 2, which only operator "n1" makes; operators must stand after')


def test_b24_a_self_edge_is_refused() -> None:
    graph = chain(2)
    own = Ref(graph.operators[1].outputs[0])
    looped = with_operator(graph, 1, arguments=(own, graph.operators[1].arguments[1]))
    refused(looped, r'operator "n1" .* which only operator "n1" makes')


def test_b24_a_cycle_is_refused() -> None:
    graph = chain(2)
    later = Ref(graph.operators[1].outputs[0])
    refused(with_operator(graph, 0, arguments=(later, graph.operators[0].arguments[1])), "must stand after")


def test_b24_a_value_made_twice_names_both_operators() -> None:
    graph = chain(2)
    twice = with_operator(graph, 1, outputs=graph.operators[0].outputs)
    refused(twice, r'operator "n1" .*: it makes value 2, which operator "n0" makes already')
    refused(with_operator(graph, 1, outputs=(ValueId(0),)), "which an input brings already")


def test_b24_values_that_do_not_exist_are_refused() -> None:
    graph = chain(1)
    refused(with_operator(graph, 0, arguments=(Ref(ValueId(99)), Ref(ValueId(1)))), "it reads value 99")
    refused(with_operator(graph, 0, arguments=(Ref(ValueId(-1)), Ref(ValueId(1)))), "it reads value -1")
    refused(with_operator(graph, 1, outputs=(ValueId(99),)), "it makes value 99; the graph has 4")
    refused(replace(graph, loss=ValueId(99)), "loss: value 99 does not exist")
    refused(with_input(graph, 0, value=ValueId(99)), "input 'x': value 99 does not exist")


def test_b24_a_dangling_value_is_refused() -> None:
    graph = chain(1)
    refused(
        replace(graph, values=(*graph.values, graph.values[0])), "value 4: no input brings it and no operator makes"
    )


def test_b24_two_inputs_for_one_value_are_refused() -> None:
    refused(with_input(chain(1), 1, value=ValueId(0)), "is brought by another input already")


def test_b24_too_many_operators_are_refused_before_they_are_looked_at() -> None:
    graph = chain(1)
    flood = replace(graph, operators=(replace(graph.operators[0], name="evil"),) * (check.MAX_OPERATORS + 1))
    refused(flood, "graph: 200001 operators; allowed are 200000")


def test_b24_a_graph_without_operators_is_refused() -> None:
    refused(replace(chain(1), operators=()), "no operators")


# B24: arguments


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "message"),
    [
        ("aten.relu.default", (), {}, "parameter 'self' is missing"),
        ("aten.relu.default", (H, 1), {}, "2 arguments by position; allowed are 1"),
        ("aten.relu.default", (H,), {"self": H}, "parameter 'self' is given twice"),
        ("aten.relu.default", (H,), {"inplace": True}, "no parameter 'inplace'; allowed: self"),
        ("aten.gelu.default", (H, "none"), {}, "2 arguments by position"),
        ("aten.relu.default", (1.0,), {}, "parameter 'self' is float '1.0'; allowed: Tensor"),
        ("aten.relu.default", (None,), {}, "parameter 'self' must not be None"),
        ("aten.softmax.int", (H, 1.0), {}, "parameter 'dim' is float '1.0'; allowed: int"),
        ("aten.softmax.int", (H, True), {}, "parameter 'dim' is bool"),
        ("aten.softmax.int", (H, 2**63), {}, "parameter 'dim' is int"),
        ("aten.softmax.int", (H, H), {}, "parameter 'dim' is a tensor"),
        ("aten.softmax.int", (H, (1,)), {}, "parameter 'dim' is a list of 1"),
        ("aten.softmax.int", (H, 1, "float32"), {}, "parameter 'dtype' is str"),
        ("aten.softmax.int", (H, 1, DType("float8_e5m2")), {}, "parameter 'dtype' is DType"),
        ("aten.permute.default", (H, (0, 1.5)), {}, "parameter 'dims' is float"),
        ("aten.permute.default", (H, ((0, 1),)), {}, "parameter 'dims' is a list of 2"),
        ("aten.cat.default", (H,), {}, "parameter 'tensors' is Ref"),
        ("aten.cat.default", ((H, None),), {}, "parameter 'tensors' is NoneType"),
        ("aten.sum.dim_IntList", (H, 1, 1), {}, "parameter 'keepdim' is int '1'; allowed: bool"),
        ("aten.gelu.default", (H,), {"approximate": 3}, "parameter 'approximate' is int"),
        ("aten.gelu.default", (H,), {"approximate": "x" * 2000}, "parameter 'approximate' is str"),
        ("aten.zeros_like.default", (H,), {"layout": Layout("sparse")}, "parameter 'layout' is Layout"),
        ("aten.zeros_like.default", (H,), {"device": "cuda:0"}, "parameter 'device' is str"),
        ("aten.clone.default", (H,), {"memory_format": MemoryFormat("x")}, "parameter 'memory_format' is MemoryFormat"),
        ("aten.bernoulli.default", (H,), {"generator": 1}, "parameter 'generator' is int"),
        ("aten.permute.default", (H, (0,) * 20_000), {}, "lists 20000 items; allowed are 16384"),
    ],
)
def test_b24_arguments_that_do_not_fit_the_signature_are_refused(
    name: str, arguments: tuple[Argument, ...], keywords: dict[str, Argument], message: str
) -> None:
    refused(call_graph(name, *arguments, **keywords), r'operator "n1" .*' + re.escape(message))


def test_keywords_have_one_order_so_that_reads_have_one() -> None:
    graph = call_graph("aten.zeros_like.default", H, device=Device(), dtype=DType("float32"))
    check_graph(graph)
    keywords = tuple(reversed(graph.operators[1].keywords))
    refused(with_operator(graph, 1, keywords=keywords), "sorted by name")
    refused(with_operator(graph, 1, keywords=(keywords[0], keywords[0])), "must differ")


@pytest.mark.parametrize(
    ("name", "outputs"), [("aten.relu.default", 2), ("aten.max.dim", 1), ("aten.chunk.default", 0)]
)
def test_b24_a_wrong_number_of_results_is_refused(name: str, outputs: int) -> None:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    further = () if name == "aten.relu.default" else (1,)
    build.operators.append(Operator(name, (w, *further), outputs=tuple(ValueId(1 + i) for i in range(outputs))))
    build.values.extend([Value(TensorSpec("float32", (4, 4)))] * outputs)
    refused(build.graph(build.call("aten.sum.default", w)), f"it states {outputs} results")


def test_a_list_of_results_may_have_any_length() -> None:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    part = Value(TensorSpec("float32", (2, 4)), requires_grad=True)
    first = build.call("aten.split.Tensor", w, 2, outputs=[part, part])
    check_graph(build.graph(build.call("aten.sum.default", first)))


# B25: shapes


def test_b25_a_stated_shape_that_does_not_follow_names_both_operators_and_shapes() -> None:
    graph = call_graph("aten.relu.default", H, shape=(2, 5))
    refused(graph, r'operator "n1" .*stated as \[2, 5\], but follows as \[2, 4\] from float32 \[2, 4\] of "n0"')


def test_b25_arguments_that_do_not_fit_name_where_they_come_from() -> None:
    build = GraphBuilder()
    x, w, v = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.parameter("v", 4, 5)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    h = build.call("aten.linear.default", h, v, shape=(2, 4))
    refused(
        build.graph(h),
        r'operator "n1" .*\[2, 4\] does not fit the weight \[4, 5\]; its arguments: float32 \[2, 4\] of "n0", '
        r'float32 \[4, 5\] of "v"',
    )


def test_t7_an_allocation_larger_than_stated_is_refused() -> None:
    refused(call_graph("aten.zeros.default", (2**40, 2**10), shape=(2, 4)), "stated as .2, 4., but follows as")
    refused(call_graph("aten.repeat.default", H, (2**40, 1), shape=(2, 4)), "follows as")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("float32", (2**40, 2**10)), "needs 4 PiB; allowed are 64 GiB"),
        (TensorSpec("float32", (0, 2**62)), "allowed are 64 GiB"),
        (TensorSpec("float32", (2**62,) * 16), "allowed are 64 GiB"),
        (TensorSpec("float32", (1,) * 17), "rank 17; allowed are 0 to 16"),
        (TensorSpec("float32", (2, -1)), "negative dimension"),
        (TensorSpec("quint8", (2,)), "dtype 'quint8' is not known"),
    ],
)
def test_t7_sizes_are_bounded_before_anything_is_made(spec: TensorSpec, message: str) -> None:
    refused(with_value(chain(1), 1, Value(spec)), f"value 1: .*{message}")


def test_batch_fields_start_with_the_nominal_micro_batch() -> None:
    refused(with_value(chain(1), 0, Value(TensorSpec("float32", (3, 4)))), "must start with the nominal micro-batch 2")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.einsum.default", ("ij,jk->ik", (H,))),
        ("aten.einsum.default", ("ijk->i", (H,))),
        ("aten.einsum.default", ("ij->ij", (H,) * 65)),
        ("aten.tensordot.default", (H, H, (7,), (0,))),
        ("aten.bilinear.default", (H, H, H)),
        ("aten.scaled_dot_product_attention.default", (Ref(ValueId(3)), H, H)),
        ("aten.gru.input", (H, H, (H,), True, 0, 0.0, True, False, False)),
        ("aten.conv2d.default", (H, H)),
    ],
)
def test_arguments_that_no_cost_rule_can_follow_are_refused(name: str, arguments: tuple[Argument, ...]) -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    build.call("aten.linear.default", x, w, shape=(2, 4))
    build.call("aten.sum.default", H)  # value 3, a scalar
    results = [Value(TensorSpec("float32", ()))] * (2 if name == "aten.gru.input" else 1)
    call = build.call(name, *arguments, outputs=results)
    refused(build.graph(build.call("aten.sum.default", call)), r'operator "n2" ')


# integers


def integer_graph(name: str, *operands: Argument, nominal: int) -> Graph:
    build = GraphBuilder()
    w, size = build.parameter("w", 4, 4), build.batch_size()
    build.integer(name, *(operands or (size, size)), nominal=nominal)
    return build.graph(build.call("aten.sum.default", w))


def test_integers_must_be_what_follows_from_the_batch_size() -> None:
    check_graph(integer_graph("python.mul", nominal=4))
    refused(integer_graph("python.mul", nominal=5), "value 2 is stated as 5, but follows as 4")
    refused(integer_graph("python.floordiv", 4, 0, nominal=0), "python.floordiv divides 4 by zero")
    refused(integer_graph("python.mod", 4, 0, nominal=0), "divides 4 by zero")
    refused(integer_graph("python.mul", 2**40, 2**40, nominal=0), "does not fit into 64 bits")
    refused(integer_graph("python.mul", 1.5, 2, nominal=3), "parameter 'a' is float")


def test_integers_and_tensors_do_not_take_each_others_place() -> None:
    refused(integer_graph("python.add", Ref(ValueId(0)), 1, nominal=3), "parameter 'a' is a tensor")
    build = GraphBuilder()
    size = build.batch_size()
    refused(build.graph(build.call("aten.relu.default", size)), "parameter 'self' is an integer")
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    build.call("aten.relu.default", w, outputs=[Value(None, nominal=3)])
    refused(build.graph(build.call("aten.sum.default", w)), "value 1 must be a tensor")
    build = GraphBuilder()
    w, size = build.parameter("w", 4, 4), build.batch_size()
    build.call("python.add", size, 1, shape=(2,))
    refused(build.graph(build.call("aten.sum.default", w)), "value 2 must be an integer")


def test_the_batch_size_is_the_nominal_one_and_given_once() -> None:
    graph = integer_graph("python.mul", nominal=4)
    refused(replace(graph, nominal_micro_batch=3), "it is 2, but the nominal micro-batch is 3")
    twice = replace(
        graph,
        values=(*graph.values, Value(None, nominal=2)),
        inputs=(*graph.inputs, Input("again", InputKind.BATCH_SIZE, ValueId(len(graph.values)))),
    )
    refused(twice, "the batch size is given twice")
    refused(replace(chain(1), nominal_micro_batch=0), "nominal_micro_batch: 0; allowed: 1 to")


# inputs, gradients, loss


def test_kinds_of_inputs_fit_their_values() -> None:
    graph = chain(1)
    refused(with_input(graph, 0, kind=InputKind.BATCH_SIZE), "a batch_size must be an integer")
    refused(with_value(graph, 0, Value(None, nominal=2)), "a batch must be a tensor")
    refused(with_input(graph, 1, kind=InputKind.BUFFER), "only parameters require gradients, not a buffer")
    refused(with_input(graph, 0, aliases=("y",)), "only parameters and buffers have further names")


def test_only_floating_values_require_gradients() -> None:
    refused(
        with_value(chain(1), 1, Value(TensorSpec("int64", (4, 4)), requires_grad=True)), "cannot require a gradient"
    )
    refused(with_value(chain(1), 0, Value(None, nominal=2, requires_grad=True)), "cannot require a gradient")


def test_the_loss_is_a_floating_scalar_that_an_operator_makes() -> None:
    graph = chain(1)
    refused(replace(graph, loss=graph.operators[0].outputs[0]), r"loss: value 2 is float32 \[2, 4\]; it must be")
    loss = int(graph.loss)
    refused(with_value(graph, loss, Value(TensorSpec("int64", ()))), r"is int64 \[\]")
    build = GraphBuilder()
    w = build.parameter("w")
    build.call("aten.relu.default", w)
    refused(build.graph(w), "loss: value 0 is an input")


# T5: writes and uninitialised memory


def test_writing_to_a_parameter_is_refused_also_through_a_view() -> None:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    build.call("aten.mul_.Scalar", w, 2.0, shape=(4, 4))
    refused(build.graph(build.call("aten.sum.default", w)), r'operator "n0" .*: it writes to the parameter \'w\'')
    build = GraphBuilder()
    w = build.parameter("w", 4, 4, trainable=False)
    view = build.call("aten.transpose.int", w, 0, 1, shape=(4, 4))
    view = build.call("aten.select.int", view, 0, 1, shape=(4,))
    build.call("aten.zero_.default", view, shape=(4,))
    refused(build.graph(build.call("aten.sum.default", w)), r'operator "n2" .*: it writes to the parameter \'w\'')


@pytest.mark.parametrize("kind", [InputKind.BATCH, InputKind.CONSTANT])
def test_writing_to_the_batch_or_a_constant_is_refused(kind: InputKind) -> None:
    build = GraphBuilder()
    x = build.input("x", kind, TensorSpec("float32", (2, 4)))
    build.call("aten.relu_.default", x, shape=(2, 4))
    refused(build.graph(build.call("aten.sum.default", x)), f"it writes to the {kind} 'x'; only buffers")


def test_writing_to_buffers_and_to_copies_is_allowed() -> None:
    build = GraphBuilder()
    w, mean = build.parameter("w", 4, 4), build.buffer("mean", 4)
    build.call("aten.mul_.Scalar", mean, 2.0, shape=(4,))
    copy = build.call("aten.clone.default", w, shape=(4, 4))
    h = build.call("aten.relu_.default", copy, shape=(4, 4))
    check_graph(build.graph(build.call("aten.sum.default", h)))


def uninitialised(*further: str) -> Graph:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    fresh = build.call("aten.new_empty.default", w, (4, 4), shape=(4, 4))
    arguments = {"aten.fill_.Scalar": (0.0,), "aten.copy_.default": (w,), "aten.mul.Tensor": (w,)}
    for name in further:
        build.call(name, fresh, *arguments.get(name, ()), shape=(4, 4))
    return build.graph(build.call("aten.sum.default", fresh))


def test_t5_uninitialised_memory_must_be_filled_by_what_touches_it_first() -> None:
    for fill in ("aten.fill_.Scalar", "aten.zero_.default", "aten.copy_.default", "aten.uniform_.default"):
        check_graph(uninitialised(fill))
    refused(uninitialised(), r'operator "n1" .*: it reads uninitialised memory of operator "n0"; overwrite the whole')
    refused(uninitialised("aten.mul.Tensor", "aten.zero_.default"), 'operator "n1"')
    refused(uninitialised("aten.relu_.default"), 'operator "n1"')


def test_t5_a_fill_with_itself_or_of_a_part_is_no_fill() -> None:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    fresh = build.call("aten.new_empty.default", w, (4, 4), shape=(4, 4))
    build.call("aten.copy_.default", fresh, fresh, shape=(4, 4))
    refused(build.graph(build.call("aten.sum.default", fresh)), "uninitialised")
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    fresh = build.call("aten.new_empty.default", w, (4, 4), shape=(4, 4))
    part = build.call("aten.select.int", fresh, 0, 0, shape=(4,))
    build.call("aten.zero_.default", part, shape=(4,))
    refused(build.graph(build.call("aten.sum.default", fresh)), "uninitialised")


# labels and costs


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0, 2.0**63])
@pytest.mark.parametrize("name", ["forward_flops", "backward_flops", "saved_bytes", "moved_bytes"])
def test_costs_that_would_upset_a_planner_are_refused(name: str, figure: float) -> None:
    refused(with_operator(chain(1), 0, cost=replace(Cost(), **{name: figure})), f"cost {name} is ")


def test_labels_that_could_upset_a_terminal_are_refused() -> None:
    refused(with_operator(chain(1), 0, module_path="\x1b[2J"), "module_path must be printable")
    refused(with_operator(chain(1), 0, module_path="m" * 1025), "at most 1024")
    refused(with_operator(chain(1), 0, autocast_dtype="float8"), "autocast_dtype 'float8'; allowed")


@pytest.mark.slow
def test_the_largest_graph_is_checked_in_linear_time() -> None:
    # 200,000 operators that all read the same value: any quadratic step would run into the test's time limit
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    size = TensorSpec("float32", (4, 4))
    count = check.MAX_OPERATORS - 1
    build.values.extend([Value(size, requires_grad=True)] * count)
    build.operators.extend(Operator("aten.add.Tensor", (w, w), outputs=(ValueId(1 + i),)) for i in range(count))
    check_graph(build.graph(build.call("aten.sum.default", w)))
