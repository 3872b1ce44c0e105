"""The planner by equal compute: balance, memory, and what it says when nothing fits."""

from __future__ import annotations

import itertools
import random

import pytest

from fusion.base.errors import GraphError, PlanError
from fusion.base.ids import Incarnation, NodeId
from fusion.graph.dag import Cost
from fusion.graph.partition import legal_cuts, partition
from fusion.plan import plan
from fusion.plan.inforce import with_flights
from fusion.plan.need import in_flight, operator_work, shard_work, stage_bytes
from fusion.plan.schedule import make_schedule, most_in_flight
from fusion.plan.spans import spans_of
from fusion.plan.types import Cluster, ClusterNode, JobView, Link, LinkTable
from fusion.plan.workload import workload_of
from tests.support.graphs import GraphBuilder

GFLOP = 1e9
WIDTH, BATCH = 4, 2
VALUE = 4 * WIDTH * BATCH  # bytes of every activation
WEIGHT = 4 * WIDTH * WIDTH  # bytes of every weight


def node(index, flops=GFLOP, memory_bytes=2**40):
    return ClusterNode(
        NodeId(f"{index:020}"), f"n{index}", f"10.0.0.{index}:7445", Incarnation(index + 1), memory_bytes, flops
    )


def cluster(*nodes):
    return Cluster(tuple(nodes))


def nodes(count, **fields):
    return cluster(*(node(index, **fields) for index in range(count)))


def job(micro_batches=4, schedule="1f1b", optimizer=8, **fields):
    return JobView(micro_batches, schedule, optimizer, **fields)


def layers(costs, moved=0):
    """Linear layers with the given forward FLOPs; backward is twice that; each saves `VALUE` bytes."""
    build = GraphBuilder(BATCH)
    x = build.batch("x", BATCH, WIDTH)
    for index, flops in enumerate(costs):
        weight = build.parameter(f"w{index}", WIDTH, WIDTH)
        cost = Cost(flops, 2 * flops, VALUE, moved)
        x = build.call("aten.linear.default", x, weight, shape=(BATCH, WIDTH), cost=cost)
    return build.graph(x)


def bounds(found):
    return [(stage.first_operator, stage.end_operator) for stage in found.stages]


# ---- balance ----


def test_equal_nodes_share_equal_layers_equally():
    found = plan(nodes(4), layers([1e6] * 12), job())
    assert bounds(found) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [stage.node_name for stage in found.stages] == ["n0", "n1", "n2", "n3"]
    assert [stage.forward_s for stage in found.stages] == pytest.approx([3e6 / GFLOP] * 4, rel=1e-3)
    assert [stage.backward_s for stage in found.stages] == pytest.approx([6e6 / GFLOP] * 4, rel=1e-3)
    assert [stage.parameters for stage in found.stages] == [3 * WIDTH * WIDTH] * 4
    assert (found.epoch, found.schedule, found.micro_batches) == (1, "1f1b", 4)


def test_a_faster_node_gets_more_wherever_it_stands():
    graph = layers([1e6] * 12)
    for order in itertools.permutations([1, 2, 3]):
        found = plan(cluster(*(node(index, speed * GFLOP) for index, speed in enumerate(order))), graph, job())
        assert [end - first for first, end in bounds(found)] == [2 * speed for speed in order]


def test_the_remainder_is_spread_and_not_left_to_the_last():
    found = plan(nodes(4), layers([1e6] * 10), job())
    assert sorted(end - first for first, end in bounds(found)) == [2, 2, 3, 3]


def test_operators_without_flops_count_by_the_bytes_that_they_move():
    found = plan(nodes(2), layers([0.0] * 8, moved=1000), job())
    assert bounds(found) == [(0, 4), (4, 8)]
    heavy_front = layers([0.0] * 8)
    works = [operator_work(heavy_front, position).total for position in range(8)]
    assert all(work > 0 for work in works)


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize("operators", [1, 2, 3, 5, 7, 13])
def test_p16_no_count_of_layers_loses_an_operator_or_leaves_a_stage_empty(operators, count):
    found = plan(nodes(count), layers([1e6] * operators), job())
    assert len(found.stages) == min(count, operators)
    assert bounds(found)[0][0] == 0
    assert bounds(found)[-1][1] == operators
    for (first, end), (following, _) in itertools.pairwise([*bounds(found), (operators, 0)]):
        assert first < end == following


def test_no_split_is_faster_than_the_one_found():
    """Against every other split, on small graphs with random costs, speeds and memories."""
    rng = random.Random(7)
    for _ in range(60):
        graph = layers([rng.choice([1e5, 1e6, 1e7]) for _ in range(rng.randint(3, 7))])
        count = rng.randint(2, 3)
        machines = [
            node(index, rng.choice([1, 2, 4]) * GFLOP, rng.choice([1500, 2500, 2**30])) for index in range(count)
        ]
        view = job(rng.randint(1, 4), rng.choice(["1f1b", "gpipe"]))
        best = None
        for cuts in itertools.combinations(legal_cuts(graph), count - 1):
            parts = partition(graph, cuts)
            if all(stage_bytes(parts, k, view) <= machine.memory_bytes for k, machine in enumerate(machines)):
                slowest = max(
                    shard_work(graph, shard).total / machine.flops
                    for shard, machine in zip(parts.shards, machines, strict=True)
                )
                best = slowest if best is None else min(best, slowest)
        if best is None:
            continue
        found = plan(cluster(*machines), graph, view)
        assert len(found.stages) == count
        assert max(stage.forward_s + stage.backward_s for stage in found.stages) == pytest.approx(best)


def test_the_same_question_has_the_same_answer():
    graph = layers([1e6, 3e6, 2e6, 5e6, 1e6, 1e6, 4e6])
    assert plan(nodes(3), graph, job()) == plan(nodes(3), graph, job())


def test_large_graphs_are_cut_almost_as_evenly():
    graph = layers([1e6] * 3000)
    found = plan(nodes(4), graph, job())
    assert all(abs(end - first - 750) <= 12 for first, end in bounds(found))
    assert spans_of(graph, job()).pieces <= 300


# ---- which nodes ----


def test_max_stages_takes_the_fastest_nodes_in_the_clusters_order():
    machines = cluster(node(0, 1 * GFLOP), node(1, 4 * GFLOP), node(2, 2 * GFLOP), node(3, 3 * GFLOP))
    found = plan(machines, layers([1e6] * 14), job(max_stages=2))
    assert [stage.node_name for stage in found.stages] == ["n1", "n3"]
    assert bounds(found) == [(0, 8), (8, 14)]
    assert len(plan(machines, layers([1e6] * 14), job(max_stages=1)).stages) == 1
    assert len(plan(machines, layers([1e6] * 14), job(max_stages=99)).stages) == 4


def test_without_nodes_there_is_no_plan():
    with pytest.raises(PlanError, match="no node is idle"):
        plan(cluster(), layers([1e6]), job())


# ---- memory ----


def test_p9_the_first_stage_holds_the_most_micro_batches():
    view = job(micro_batches=8)
    assert [in_flight(view, stage, 4) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(job(micro_batches=2), stage, 4) for stage in range(4)] == [2, 2, 2, 1]
    assert [in_flight(job(8, "gpipe"), stage, 4) for stage in range(4)] == [8] * 4
    for name, stages, micro_batches in itertools.product(("1f1b", "gpipe"), (1, 2, 5), (1, 3, 8)):
        expected = [most_in_flight(schedule) for schedule in make_schedule(name, stages, micro_batches)]
        assert [in_flight(job(micro_batches, name), stage, stages) for stage in range(stages)] == expected


def test_a_stages_memory_is_what_it_holds():
    graph = layers([1e6] * 4, moved=1000)
    parts = partition(graph, [2])
    # two weights, each with gradient and AdamW's 8 bytes per scalar; per micro-batch in flight two saved values and
    # one received or sent; twice the traffic of one operator; 5 % on top
    resident = 2 * (2 * WEIGHT + 8 * WIDTH * WIDTH)
    assert stage_bytes(parts, 0, job()) == int(1.05 * (resident + 2 * 3 * VALUE + 2000))
    assert stage_bytes(parts, 1, job()) == int(1.05 * (resident + 1 * 3 * VALUE + 2000))
    assert stage_bytes(parts, 1, job(schedule="gpipe")) == int(1.05 * (resident + 4 * 3 * VALUE + 2000))
    assert stage_bytes(parts, 0, job(optimizer=0)) == int(1.05 * (4 * WEIGHT + 2 * 3 * VALUE + 2000))


def test_p9_a_node_with_little_memory_gets_little_whatever_its_speed():
    graph = layers([1e6] * 12)
    small = stage_bytes(partition(graph, [2]), 0, job())
    found = plan(cluster(node(0, 9 * GFLOP, small), node(1), node(2)), graph, job())
    assert bounds(found)[0][1] <= 2
    assert all(stage.memory_bytes <= 2**40 for stage in found.stages)
    assert found.stages[0].memory_bytes <= small


def test_a_node_that_cannot_hold_anything_is_left_out():
    found = plan(cluster(node(0), node(1, 100 * GFLOP, memory_bytes=10), node(2)), layers([1e6] * 4), job())
    assert [stage.node_name for stage in found.stages] == ["n0", "n2"]


def test_when_memory_is_short_the_error_says_how_much_is_missing():
    graph = layers([1e6] * 6)
    need = stage_bytes(partition(graph, []), 0, job())
    with pytest.raises(PlanError, match=r"^memory: 100 B more are needed even in 1 stage") as caught:
        plan(nodes(1, memory_bytes=need - 100), graph, job())
    assert "\n" not in str(caught.value)
    assert len(plan(nodes(1, memory_bytes=need), graph, job()).stages) == 1


def test_shared_parameters_take_memory_on_both_sides_and_travel_between_them():
    build = GraphBuilder(BATCH)
    x, tied = build.batch("x", BATCH, WIDTH), build.parameter("tied", WIDTH, WIDTH)
    own = build.parameter("own", WIDTH, WIDTH)
    x = build.call("aten.linear.default", x, tied, shape=(BATCH, WIDTH), cost=Cost(1e6, 2e6, 0, 0))
    x = build.call("aten.linear.default", x, own, shape=(BATCH, WIDTH), cost=Cost(1e6, 2e6, 0, 0))
    x = build.call("aten.linear.default", x, tied, shape=(BATCH, WIDTH), cost=Cost(1e6, 2e6, 0, 0))
    graph = build.graph(x)
    found = plan(nodes(3), graph, job())
    assert [stage.parameters for stage in found.stages] == [16, 16, 16]
    traffic = {(link.source, link.target): link.bytes_per_step for link in found.links}
    assert traffic == {
        (0, 1): 4 * VALUE,
        (1, 0): 4 * VALUE,
        (1, 2): 4 * VALUE,
        (2, 1): 4 * VALUE,
        (0, 2): WEIGHT,
        (2, 0): WEIGHT,
    }
    # on one node it is held once, with a gradient for each use
    whole = stage_bytes(partition(graph, []), 0, job())
    assert whole == int(1.05 * (3 * WEIGHT + 8 * 16 + 2 * WEIGHT + 8 * 16))


def test_what_a_stage_computes_again_takes_its_memory():
    def graph(saved):
        build = GraphBuilder(BATCH)
        x, mask = build.batch("x", BATCH, WIDTH), build.batch("mask", BATCH, WIDTH)
        mask = build.call("aten.neg.default", mask, shape=(BATCH, WIDTH), cost=Cost(0, 0, saved, 0))
        for index in range(4):
            weight = build.parameter(f"w{index}", WIDTH, WIDTH)
            x = build.call("aten.linear.default", x, weight, shape=(BATCH, WIDTH), cost=Cost(1e6, 2e6, VALUE, 0))
            x = build.call("aten.mul.Tensor", x, mask, shape=(BATCH, WIDTH), cost=Cost(0, 0, VALUE, 0))
        return build.graph(x)

    parts = partition(graph(5000), [5])
    assert parts.shards[1].recomputed == (0,)
    without = stage_bytes(partition(graph(0), [5]), 1, job())
    assert stage_bytes(parts, 1, job()) - without == pytest.approx(1.05 * 5000, abs=1)
    tight = cluster(node(0), node(1, memory_bytes=without + 4000))
    assert len(plan(tight, graph(0), job()).stages) == 2
    assert [stage.node_name for stage in plan(tight, graph(9000), job()).stages] == ["n0"]


def test_a_value_that_skips_a_stage_is_a_link_of_its_own():
    build = GraphBuilder(BATCH)
    x = build.batch("x", BATCH, WIDTH)
    weights = [build.parameter(f"w{index}", WIDTH, WIDTH) for index in range(3)]
    skip = build.call("aten.linear.default", x, weights[0], shape=(BATCH, WIDTH), cost=Cost(2e6, 0, 0, 0))
    y = build.call("aten.linear.default", skip, weights[1], shape=(BATCH, WIDTH), cost=Cost(2e6, 0, 0, 0))
    z = build.call("aten.linear.default", y, weights[2], shape=(BATCH, WIDTH), cost=Cost(1e6, 0, 0, 0))
    out = build.call("aten.add.Tensor", z, skip, shape=(BATCH, WIDTH), cost=Cost(0, 0, 0, 0))
    found = plan(nodes(3), build.graph(out), job(cuts=(1, 2)))
    assert {(link.source, link.target) for link in found.links} == {(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)}
    assert all(link.codec == "none" for link in found.links)


# ---- cuts that the job states ----


def test_stated_cuts_are_taken_as_they_are():
    machines = cluster(node(0), node(1, 5 * GFLOP), node(2, 3 * GFLOP))
    found = plan(machines, layers([1e6] * 9), job(cuts=(1,)))
    assert bounds(found) == [(0, 1), (1, 9)]
    assert [stage.node_name for stage in found.stages] == ["n1", "n2"]


def test_stated_cuts_that_cannot_be_are_an_error():
    with pytest.raises(GraphError, match="cuts: 9"):
        plan(nodes(2), layers([1e6] * 4), job(cuts=(9,)))
    with pytest.raises(PlanError, match="3 stages, only 2 nodes are idle"):
        plan(nodes(2), layers([1e6] * 4), job(cuts=(1, 2)))
    need = stage_bytes(partition(layers([1e6] * 4), [1]), 1, job())
    with pytest.raises(PlanError, match=r"100 B more are needed for these cuts; stage 1 needs .*, node n1 offers"):
        plan(cluster(node(0), node(1, memory_bytes=need - 100)), layers([1e6] * 4), job(cuts=(1,)))


def test_stated_cuts_find_the_nodes_with_enough_memory():
    machines = cluster(node(0, 9 * GFLOP, 10), node(1), node(2))
    assert [stage.node_name for stage in plan(machines, layers([1e6] * 4), job(cuts=(2,))).stages] == ["n1", "n2"]


# ---- micro-batches in flight for the links ----


def with_links(found, machines, graph, view, delay_s):
    linked = Cluster(machines.nodes, LinkTable(default=Link(1e12, delay_s)))
    return with_flights(found, linked, graph, workload_of(graph), view)


def test_slow_links_get_more_micro_batches_in_flight_than_1f1b_has():
    graph, machines, view = layers([GFLOP] * 4), nodes(2), job(micro_batches=16)
    found = plan(machines, graph, view)  # two stages of 2 s forward and 4 s backward
    assert [stage.in_flight for stage in with_links(found, machines, graph, view, 0.0).stages] == [2, 1]
    # a micro-batch comes back to stage 0 after 6 + 12 + 6 s, in which it could have run three more
    far = with_links(found, machines, graph, view, 6.0)
    assert [stage.in_flight for stage in far.stages] == [4, 1]
    assert [(stage.forward_s, stage.backward_s) for stage in far.stages] == [(pytest.approx(2), pytest.approx(4))] * 2


def test_memory_limits_the_micro_batches_in_flight_but_not_below_the_schedules_own():
    graph, view = layers([GFLOP] * 4), job(micro_batches=16, recompute="never")
    found = plan(nodes(2), graph, view)
    parts = partition(graph, [found.stages[1].first_operator])
    three, least = (stage_bytes(parts, 0, view, flights) for flights in (3, 2))
    tight = cluster(node(0, memory_bytes=three), node(1))
    assert [stage.in_flight for stage in with_links(found, tight, graph, view, 6.0).stages] == [3, 1]
    full = cluster(node(0, memory_bytes=least), node(1))
    stages = with_links(found, full, graph, view, 6.0).stages
    assert [stage.in_flight for stage in stages] == [2, 1]
    assert stages[0].memory_bytes == least


def test_a_job_that_fits_no_other_way_runs_forwards_again():
    graph, view = layers([GFLOP] * 4), job(micro_batches=16, schedule="gpipe")
    parts = partition(graph, [found.first_operator for found in plan(nodes(2), graph, view).stages[1:]])
    again = max(stage_bytes(parts, stage, view, 16, recompute=True) for stage in (0, 1))
    small = nodes(2, memory_bytes=again)
    with pytest.raises(PlanError, match="memory"):
        plan(small, graph, job(micro_batches=16, schedule="gpipe", recompute="never"))
    found = plan(small, graph, view)
    assert [stage.recompute for stage in found.stages] == [True, True]
    assert [(stage.forward_s, stage.backward_s) for stage in found.stages] == [(pytest.approx(2), pytest.approx(6))] * 2
    linked = with_links(found, small, graph, view, 6.0)
    assert [(stage.recompute, stage.in_flight) for stage in linked.stages] == [(True, 16)] * 2
    assert all(stage.memory_bytes <= again for stage in linked.stages)
    assert [stage.backward_s for stage in linked.stages] == pytest.approx([6, 6])
    by_cuts = plan(small, graph, job(micro_batches=16, schedule="gpipe", cuts=(2,)))
    assert [stage.recompute for stage in by_cuts.stages] == [True, True]
