"""Cutting graphs: which positions are legal, what crosses, what is made again, which parameters are shared."""

from __future__ import annotations

import pytest

from fusion.base.errors import GraphError
from fusion.graph.dag import Cost, Graph, InputKind, Ref, TensorSpec, Value
from fusion.graph.partition import (
    Edge,
    ParameterUse,
    Partition,
    SharedParameter,
    crossing_bytes,
    legal_cuts,
    operators_of,
    parameter_bytes,
    parameter_count,
    partition,
    stage_cost,
)
from tests.support.graphs import GraphBuilder, chain


def edges_of(found: Partition) -> list[tuple[int, int, int]]:
    return [(edge.source, edge.value, edge.target) for edge in found.edges]


def test_a_chain_may_be_cut_anywhere_inside() -> None:
    assert legal_cuts(chain(3)) == (1, 2, 3)


def test_a_chain_in_three_pieces_sends_one_value_at_each_cut() -> None:
    graph = chain(4)
    found = partition(graph, [1, 3])
    made = [op.outputs[0] for op in graph.operators]
    assert found.edges == (Edge(0, made[0], 0, 1), Edge(1, made[2], 1, 2))
    assert [(s.first_operator, s.end_operator) for s in found.shards] == [(0, 1), (1, 3), (3, 5)]
    assert [s.incoming for s in found.shards] == [(), (0,), (1,)]
    assert [s.outgoing for s in found.shards] == [(0,), (1,), ()]
    names = {item.value: item.name for item in graph.inputs}
    assert [[names[v] for v in s.inputs] for s in found.shards] == [
        ["x", "layers.0.weight"],
        ["layers.1.weight", "layers.2.weight"],
        ["layers.3.weight"],
    ]
    assert found.shared == ()


def test_without_cuts_there_is_one_shard_and_nothing_crosses() -> None:
    graph = chain(3)
    found = partition(graph, ())
    assert found.edges == ()
    assert operators_of(found.shards[0]) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((0,), "cuts: 0 is not inside"),
        ((4,), "cuts: 4 is not inside the graph; allowed: 1 to 3"),
        ((-1,), "cuts: -1"),
        ((2, 2), "leaves a stage without operators"),
        ((3, 1), "must ascend"),
    ],
)
def test_cuts_that_leave_a_stage_empty_or_lie_outside_are_refused(cuts: tuple[int, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        partition(chain(3), cuts)


def skip_graph() -> Graph:
    """x -> a -> b -> c, where c adds a again."""
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    a = build.call("aten.linear.default", x, w, shape=(2, 4))
    b = build.call("aten.relu.default", a, shape=(2, 4))
    c = build.call("aten.add.Tensor", b, a, shape=(2, 4))
    return build.graph(build.call("aten.sum.default", c))


def test_a_skip_goes_straight_to_the_stage_that_reads_it() -> None:
    graph = skip_graph()
    a, b = graph.operators[0].outputs[0], graph.operators[1].outputs[0]
    found = partition(graph, [1, 2])
    assert edges_of(found) == [(0, a, 1), (0, a, 2), (1, b, 2)]


def test_a_value_with_two_readers_in_a_stage_is_sent_there_once() -> None:
    graph = skip_graph()
    assert edges_of(partition(graph, [1])) == [(0, graph.operators[0].outputs[0], 1)]


def test_every_stage_reads_batch_fields_for_itself() -> None:
    build = GraphBuilder()
    x, y, w = build.batch("x", 2, 4), build.batch("y", 2, 4), build.parameter("w", 4, 4)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    h = build.call("aten.add.Tensor", h, x, shape=(2, 4))
    graph = build.graph(build.call("aten.mse_loss.default", h, y))
    found = partition(graph, [1, 2])
    assert [set(s.inputs) for s in found.shards] == [{x.value, w.value}, {x.value}, {y.value}]
    assert len(found.edges) == 2


def test_no_cut_between_the_making_of_memory_and_its_last_write_through_a_view() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    base = build.call("aten.linear.default", x, w, shape=(2, 4))  # 0
    view = build.call("aten.view.default", base, (8,), shape=(8,))  # 1
    other = build.call("aten.linear.default", x, w, shape=(2, 4))  # 2
    build.call("aten.relu_.default", view, shape=(8,))  # 3 writes
    total = build.call("aten.add.Tensor", base, other, shape=(2, 4))  # 4
    graph = build.graph(build.call("aten.sum.default", total))  # 5
    assert legal_cuts(graph) == (4, 5)
    assert edges_of(partition(graph, [4])) == [(0, base.value, 1), (0, other.value, 1)]
    with pytest.raises(GraphError, match=r"cuts: 2 would split memory that is written in place; nearest legal: 4"):
        partition(graph, [2])


def test_a_write_after_a_copy_leaves_the_original_free_to_be_cut() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    base = build.call("aten.linear.default", x, w, shape=(2, 4))  # 0
    copy = build.call("aten.clone.default", base, shape=(2, 4))  # 1
    written = build.call("aten.relu_.default", copy, shape=(2, 4))  # 2
    graph = build.graph(build.call("aten.sum.default", written))  # 3
    assert legal_cuts(graph) == (1, 3)


@pytest.mark.parametrize("maybe_view", ["aten.reshape.default", "aten.contiguous.default", "aten.type_as.default"])
def test_a_result_that_may_share_memory_counts_as_a_view(maybe_view: str) -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    base = build.call("aten.linear.default", x, w, shape=(2, 4))  # 0
    further = {"aten.reshape.default": ((2, 4),), "aten.type_as.default": (x,)}.get(maybe_view, ())
    view = build.call(maybe_view, base, *further, shape=(2, 4))  # 1
    build.call("aten.relu_.default", view, shape=(2, 4))  # 2
    graph = build.graph(build.call("aten.sum.default", base))  # 3
    assert legal_cuts(graph) == (3,)


def norm(build: GraphBuilder, x: Ref, mean: Ref, var: Ref) -> Ref:
    return build.call("aten.batch_norm.default", x, None, None, mean, var, True, 0.1, 1e-5, True, shape=(2, 4, 3))


def test_all_operators_that_touch_written_statistics_stay_in_one_stage() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4, 3), build.parameter("w", 3, 3)
    mean, var = build.buffer("mean", 4), build.buffer("var", 4)
    h = build.call("aten.linear.default", x, w, shape=(2, 4, 3))  # 0
    h = norm(build, h, mean, var)  # 1 writes although its schema denies it
    h = build.call("aten.linear.default", h, w, shape=(2, 4, 3))  # 2
    h = norm(build, h, mean, var)  # 3
    graph = build.graph(build.call("aten.sum.default", h))  # 4
    assert legal_cuts(graph) == (1, 4)


def test_a_counter_and_its_reader_stay_together() -> None:
    build = GraphBuilder()
    x, w, count = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.buffer("count", dtype="int64")
    build.call("aten.add_.Tensor", count, 1, out_dtype="int64")  # 0
    h = build.call("aten.linear.default", x, w, shape=(2, 4))  # 1
    h = build.call("aten.mul.Tensor", h, count, shape=(2, 4))  # 2
    graph = build.graph(build.call("aten.sum.default", h))  # 3
    assert legal_cuts(graph) == (3,)


def test_frozen_buffers_may_be_read_by_several_stages() -> None:
    build = GraphBuilder()
    x, scale, w = build.batch("x", 2, 4), build.buffer("scale", 4), build.parameter("w", 4, 4)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    h = build.call("aten.mul.Tensor", h, scale, shape=(2, 4))
    h = build.call("aten.add.Tensor", h, scale, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [2])
    assert all(scale.value in shard.inputs for shard in found.shards)
    assert found.shared == ()


def mask_graph(*, random: bool = False, in_place: bool = False) -> Graph:
    """A mask made once at the start and used by two layers."""
    build = GraphBuilder()
    x, w = build.batch("x", 2, 8, 8), build.parameter("w", 8, 8)
    maker = "aten.rand.default" if random else "aten.ones.default"
    mask = build.call(maker, (8, 8), shape=(8, 8))  # 0
    mask = build.call("aten.tril.default", mask, shape=(8, 8))  # 1
    if in_place:
        mask = build.call("aten.mul_.Scalar", mask, 2.0, shape=(8, 8))
    h = build.call("aten.linear.default", x, w, shape=(2, 8, 8))  # 2
    h = build.call("aten.mul.Tensor", h, mask, shape=(2, 8, 8))  # 3
    h = build.call("aten.linear.default", h, w, shape=(2, 8, 8))  # 4
    h = build.call("aten.mul.Tensor", h, mask, shape=(2, 8, 8))  # 5
    return build.graph(build.call("aten.sum.default", h))  # 6


def test_a_mask_is_made_again_instead_of_being_sent() -> None:
    graph = mask_graph()
    found = partition(graph, [3, 5])
    assert [shard.recomputed for shard in found.shards] == [(), (0, 1), (0, 1)]
    assert [(s, t) for s, _, t in edges_of(found)] == [(0, 1), (1, 2)]
    assert operators_of(found.shards[2]) == (0, 1, 5, 6)


def test_a_mask_that_is_written_in_place_is_made_again_with_its_writers() -> None:
    found = partition(mask_graph(in_place=True), [4])
    assert found.shards[1].recomputed == (0, 1, 2)
    assert len(found.edges) == 1


def test_random_values_are_sent_and_never_made_again() -> None:
    graph = mask_graph(random=True)
    found = partition(graph, [4])
    assert found.shards[1].recomputed == ()
    assert (0, graph.operators[1].outputs[0], 1) in edges_of(found)


def test_a_mask_that_something_random_is_written_into_is_sent() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    mask = build.call("aten.zeros.default", (2, 4), shape=(2, 4))  # 0, an ancestor of nothing random
    view = build.call("aten.view.default", mask, (8,), shape=(8,))  # 1
    build.call("aten.bernoulli_.float", view, 0.5, shape=(8,))  # 2
    h = build.call("aten.linear.default", x, w, shape=(2, 4))  # 3
    graph = build.graph(build.call("aten.mse_loss.default", h, mask))  # 4
    found = partition(graph, [4])
    assert found.shards[1].recomputed == ()
    assert (0, mask.value, 1) in edges_of(found)


def test_what_follows_from_a_written_buffer_is_sent() -> None:
    build = GraphBuilder()
    x, w, seen = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.buffer("seen", 4)
    build.call("aten.add_.Tensor", seen, 1, shape=(4,))  # 0
    mask = build.call("aten.gt.Scalar", seen, 3, shape=(4,), out_dtype="bool")  # 1
    h = build.call("aten.linear.default", x, w, shape=(2, 4))  # 2
    h = build.call("aten.mul.Tensor", h, mask, shape=(2, 4))  # 3
    graph = build.graph(build.call("aten.sum.default", h))  # 4
    found = partition(graph, [3])
    assert found.shards[1].recomputed == ()
    assert (0, mask.value, 1) in edges_of(found)


def test_a_dropout_of_probability_zero_is_no_reason_to_send() -> None:
    for probability, expected in ((0.0, (0, 1)), (0.5, ())):
        build = GraphBuilder()
        x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
        mask = build.call("aten.zeros.default", (2, 4), shape=(2, 4))
        mask = build.call("fusion.dropout.default", mask, probability, True, shape=(2, 4))
        h = build.call("aten.linear.default", x, w, shape=(2, 4))
        graph = build.graph(build.call("aten.mse_loss.default", h, mask))
        assert partition(graph, [3]).shards[1].recomputed == expected


def test_a_value_is_sent_when_making_it_again_costs_too_much() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 512, 512), build.parameter("w", 512, 512)
    product = build.call("aten.matmul.default", x, x, shape=(2, 512, 512))  # 0: 5e8 operations
    half = build.call("aten.mul.Scalar", product, 0.5, shape=(2, 512, 512))  # 1
    h = build.call("aten.linear.default", x, w, shape=(2, 512, 512))  # 2
    h = build.call("aten.add.Tensor", h, half, shape=(2, 512, 512))  # 3
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [3])
    assert found.shards[1].recomputed == ()
    assert (0, half.value, 1) in edges_of(found)


def test_a_small_digest_of_much_data_is_sent() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 1024, 1024), build.parameter("w", 4, 4)
    means = build.call("aten.mean.dim", x, (1, 2), shape=(2,))  # 0 reads 8 MiB, makes 8 bytes
    h = build.call("aten.linear.default", build.batch("y", 2, 4), w, shape=(2, 4))  # 1
    h = build.call("aten.mul.Tensor", h, means, shape=(2, 4))  # 2
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [2])
    assert (0, means.value, 1) in edges_of(found)


def test_a_value_recomputed_for_another_one_is_not_sent_as_well() -> None:
    # the mean over the batch field is too dear for its own eight bytes, but the wide product of it is not
    build = GraphBuilder()
    x, w = build.batch("x", 2, 1024, 1024), build.parameter("w", 4, 4)
    means = build.call("aten.mean.dim", x, (1, 2), True, shape=(2, 1, 1))  # 0
    wide = build.call("aten.expand.default", means, (2, 1024, 1024), shape=(2, 1024, 1024))  # 1
    h = build.call("aten.linear.default", build.batch("y", 2, 4), w, shape=(2, 4))  # 2
    h = build.call("aten.add.Tensor", h, means, shape=(2, 2, 4))  # 3
    h = build.call("aten.add.Tensor", build.call("aten.sum.default", wide), h, shape=(2, 2, 4))  # 4, 5
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [3])
    assert found.shards[1].recomputed == (0, 1)
    assert [value for _, value, _ in edges_of(found)] == [graph.operators[2].outputs[0]]


def bias_graph(buckets: int) -> tuple[Graph, Ref]:
    """A relative position bias from a small table, as T5 has it: made once, used by two layers."""
    build = GraphBuilder()
    x, w, table = build.batch("x", 2, 8, 16, 16), build.parameter("w", 16, 16), build.parameter("table", buckets, 8)
    positions = build.call("aten.arange.default", 16, shape=(16,), out_dtype="int64")  # 0
    column = build.call("aten.unsqueeze.default", positions, 1, shape=(16, 1), out_dtype="int64")  # 1
    distance = build.call("aten.sub.Tensor", positions, column, shape=(16, 16), out_dtype="int64")  # 2
    bias = build.call("aten.embedding.default", table, distance, shape=(16, 16, 8))  # 3
    bias = build.call("aten.permute.default", bias, (2, 0, 1), shape=(8, 16, 16))  # 4
    h = build.call("aten.linear.default", x, w, shape=(2, 8, 16, 16))  # 5
    h = build.call("aten.add.Tensor", h, bias, shape=(2, 8, 16, 16))  # 6
    h = build.call("aten.linear.default", h, w, shape=(2, 8, 16, 16))  # 7
    h = build.call("aten.add.Tensor", h, bias, shape=(2, 8, 16, 16))  # 8
    return build.graph(build.call("aten.sum.default", h)), table  # 9


def test_a_small_parameter_used_all_over_is_replicated_like_a_tied_weight() -> None:
    graph, table = bias_graph(buckets=32)
    found = partition(graph, [7])
    assert found.shards[1].recomputed == (0, 1, 2, 3, 4)
    shared = {item.value: item for item in found.shared}
    assert shared[table.value] == SharedParameter(table.value, (ParameterUse(0, 3, 0), ParameterUse(1, 3, 0)), (0, 1))
    assert len(found.edges) == 1


def test_a_parameter_larger_than_what_is_made_of_it_is_not_replicated() -> None:
    graph, table = bias_graph(buckets=1000)
    found = partition(graph, [7])
    assert found.shards[1].recomputed == ()
    assert table.value not in {item.value for item in found.shared}
    assert len(found.edges) == 2


def test_integers_never_cross_but_are_computed_again_from_the_batch_size() -> None:
    build = GraphBuilder()
    x, w, size = build.batch("x", 2, 3, 4), build.parameter("w", 4, 4), build.batch_size()
    rows = build.integer("python.mul", size, 3, nominal=6)  # 0
    h = build.call("aten.linear.default", x, w, shape=(2, 3, 4))  # 1
    h = build.call("aten.view.default", h, (rows, 4), shape=(6, 4))  # 2
    h = build.call("aten.relu.default", h, shape=(6, 4))  # 3
    h = build.call("aten.view.default", h, (size, rows, 2), shape=(2, 6, 2))  # 4
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [2, 4])
    assert [shard.recomputed for shard in found.shards] == [(), (0,), (0,)]
    assert all(graph.values[edge.value].spec is not None for edge in found.edges)
    assert size.value in found.shards[1].inputs
    assert size.value in found.shards[2].inputs


def test_a_tied_weight_lists_its_uses_in_order_and_its_holders() -> None:
    build = GraphBuilder()
    ids, w, inner = build.batch("ids", 2, 3, dtype="int64"), build.parameter("w", 10, 4), build.parameter("v", 4, 4)
    h = build.call("aten.embedding.default", w, ids, shape=(2, 3, 4))  # 0
    h = build.call("aten.linear.default", h, inner, shape=(2, 3, 4))  # 1
    h = build.call("aten.linear.default", h, w, shape=(2, 3, 10))  # 2
    graph = build.graph(build.call("aten.sum.default", h))
    for cuts, stages, holders in (((), (0, 0), (0,)), ((1,), (0, 1), (0, 1)), ((1, 2), (0, 2), (0, 2))):
        assert partition(graph, cuts).shared == (
            SharedParameter(w.value, (ParameterUse(stages[0], 0, 0), ParameterUse(stages[1], 2, 1)), holders),
        )


def test_one_operator_that_reads_a_parameter_twice_uses_it_twice() -> None:
    build = GraphBuilder()
    w = build.parameter("w", 4, 4)
    graph = build.graph(build.call("aten.matmul.default", w, w, shape=(4, 4)))
    assert partition(graph, ()).shared[0].uses == (ParameterUse(0, 0, 0), ParameterUse(0, 0, 1))


def test_a_frozen_parameter_on_two_stages_is_not_shared() -> None:
    build = GraphBuilder()
    x, w, v = build.batch("x", 2, 4), build.parameter("w", 4, 4, trainable=False), build.parameter("v", 4, 4)
    h = build.call("aten.linear.default", x, v, shape=(2, 4))
    h = build.call("aten.linear.default", h, w, shape=(2, 4))
    h = build.call("aten.linear.default", h, w, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", h))
    found = partition(graph, [2])
    assert found.shared == ()
    assert [w.value in shard.inputs for shard in found.shards] == [True, True]


def test_a_read_without_gradients_holds_a_parameter_but_does_not_use_it() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))  # 0
    target = build.call("aten.linear.default", x, w, shape=(2, 4), no_grad=True)  # 1
    graph = build.graph(build.call("aten.mse_loss.default", h, target))
    assert partition(graph, [1]).shared == (SharedParameter(w.value, (ParameterUse(0, 0, 1),), (0, 1)),)
    assert partition(graph, ()).shared == ()


def test_the_loss_may_be_made_before_the_last_stage() -> None:
    build = GraphBuilder()
    x, w, seen = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.buffer("seen", dtype="int64")
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    loss = build.call("aten.sum.default", h)
    build.call("aten.add_.Tensor", seen, 1, out_dtype="int64")
    graph = build.graph(loss)
    assert partition(graph, [2]).loss_stage == 0
    assert partition(graph, [1]).loss_stage == 1


def test_stages_are_found_by_operator() -> None:
    found = partition(chain(4), [1, 3])
    assert [found.stage_of_operator(position) for position in range(5)] == [0, 1, 1, 2, 2]


def test_stage_costs_add_up_own_and_recomputed_operators() -> None:
    build = GraphBuilder()
    cost = Cost(forward_flops=10, backward_flops=20, saved_bytes=3, moved_bytes=5)
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    mask = build.call("aten.ones.default", (2, 4), shape=(2, 4), cost=cost)
    h = build.call("aten.linear.default", x, w, shape=(2, 4), cost=cost)
    h = build.call("aten.mul.Tensor", h, mask, shape=(2, 4), cost=cost)
    graph = build.graph(build.call("aten.sum.default", h, cost=cost))
    found = partition(graph, [2])
    assert stage_cost(graph, found.shards[0]) == Cost(20, 40, 6, 10)
    assert stage_cost(graph, found.shards[1]) == Cost(30, 60, 9, 15)
    assert [parameter_bytes(graph, shard) for shard in found.shards] == [64, 0]


def test_parameter_counts_tell_trainable_from_frozen() -> None:
    build = GraphBuilder()
    x, w, v = build.batch("x", 2, 4), build.parameter("w", 4, 4), build.parameter("v", 4, 4, trainable=False)
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", build.call("aten.linear.default", h, v, shape=(2, 4))))
    shard = partition(graph, ()).shards[0]
    assert parameter_count(graph, shard) == 32
    assert parameter_count(graph, shard, trainable_only=True) == 16


def test_crossing_bytes_count_a_sent_value_once_at_each_cut_that_it_crosses() -> None:
    size = 2 * 4 * 4
    assert crossing_bytes(skip_graph()) == (0, size, 2 * size, size, 0)


def test_crossing_bytes_leave_out_what_is_made_again() -> None:
    size = 2 * 8 * 8 * 4
    assert crossing_bytes(mask_graph()) == (0, 0, 0, size, size, size, size, 0)


def test_a_list_of_results_crosses_by_the_elements_that_are_read() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 12, 4)
    h = build.call("aten.linear.default", x, w, shape=(2, 12))
    part = Value(TensorSpec("float32", (2, 4)), requires_grad=True)
    first = build.call("aten.split.Tensor", h, 4, -1, outputs=[part, part, part])
    third = Ref(build.operators[-1].outputs[2])
    h = build.call("aten.mul.Tensor", first, third, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", h))
    assert [value for _, value, _ in edges_of(partition(graph, [2]))] == [first.value, third.value]


def test_constants_are_read_like_buffers() -> None:
    build = GraphBuilder()
    x, w = build.batch("x", 2, 4), build.parameter("w", 4, 4)
    scale = build.input("$constant.0", InputKind.CONSTANT, TensorSpec("float32", (4,)))
    double = build.call("aten.add.Tensor", scale, scale, shape=(4,))
    h = build.call("aten.linear.default", x, w, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", build.call("aten.mul.Tensor", h, double, shape=(2, 4))))
    found = partition(graph, [2])
    assert found.shards[1].recomputed == (0,)
    assert scale.value in found.shards[1].inputs


def test_five_thousand_operators_are_cut_without_quadratic_work() -> None:
    layers = 2500
    build = GraphBuilder()
    x, mask = build.batch("x", 2, 4), build.call("aten.ones.default", (2, 4), shape=(2, 4))
    for layer in range(layers):
        w = build.parameter(f"w{layer}", 4, 4)
        x = build.call("aten.linear.default", x, w, shape=(2, 4))
        x = build.call("aten.mul.Tensor", x, mask, shape=(2, 4))
    graph = build.graph(build.call("aten.sum.default", x))
    legal = legal_cuts(graph)
    assert len(legal) == len(graph.operators) - 1
    found = partition(graph, legal[1::50])
    assert len(found.edges) == len(found.shards) - 1
    assert all(shard.recomputed == (0,) for shard in found.shards[1:])
