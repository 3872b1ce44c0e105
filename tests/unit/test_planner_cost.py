"""T = fill + (n - 1) x bottleneck, worked out by hand; operators take 1 s forward and 2 s backward at 1 GFLOPS."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.plan.codecs import PlanCodec
from fusion.plan.cost import Arrangement
from fusion.plan.types import Link, LinkTable, Uplink
from fusion.plan.workload import HeldLoad, ValueLoad
from tests.support.planner import GIGA, chain_load, cluster, node, problem


def about(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-6)


def test_one_stage_takes_n_times_its_work() -> None:
    found = problem(chain_load(4), cluster([node("a")])).evaluate(Arrangement((0,), (0, 4)))
    assert found.step_s == about(5 * 4 * 3)
    assert found.bottleneck == (0, 0)


def test_a_slow_stage_is_the_bottleneck_and_links_fill_the_pipeline() -> None:
    machines = cluster([node("a", 4 * GIGA), node("b", GIGA)], LinkTable(default=Link(1e6, 0.25)))
    found = problem(chain_load(4), machines).evaluate(Arrangement((0, 1), (0, 2, 4)))
    # a: 2 operators at 4 GFLOPS, b: 2 at 1 GFLOPS; 1 MB each way at 1 MB/s, 0.25 s of delay each way
    assert found.fill_s == about(1.5 + 6 + 2 * (1 + 0.25))
    assert found.period_s == about(6)
    assert found.step_s == about(10 + 4 * 6)


def test_a_link_direction_can_be_the_bottleneck_but_never_its_delay() -> None:
    links = LinkTable({(node("a").node, node("b").node): Link(1e5, 7.0)}, default=Link(1e6, 7.0))
    machines = cluster([node("a", 100 * GIGA), node("b", 100 * GIGA)], links)
    found = problem(chain_load(2), machines).evaluate(Arrangement((0, 1), (0, 1, 2)))
    assert found.period_s == about(10)  # forward; the gradient takes 1 s the other way at the same time
    assert found.bottleneck == (0, 1)


def test_gpipe_waits_for_the_forward_and_for_the_backward_bottleneck() -> None:
    machines = cluster([node("a"), node("b", 2 * GIGA)])
    found = problem(chain_load(2, gradient_bytes=4_000_000), machines, schedule="gpipe").evaluate(
        Arrangement((0, 1), (0, 1, 2))
    )
    # forward: a computes 1 s, the link takes 1 s; backward: a 2 s, the link 4 s
    assert found.period_s == about(1 + 4)
    assert found.in_flight == (5, 5)


def test_a_value_that_skips_stages_is_sent_once_and_straight_to_each_stage_that_reads_it() -> None:
    load = chain_load(6, extra_values=[ValueLoad(0, (3, 4, 5), 500_000, 0)])
    machines = cluster([node("a"), node("b"), node("c")])
    found = problem(load, machines).evaluate(Arrangement((0, 1, 2), (0, 2, 4, 6)))
    assert found.raw_bytes[0, 2] == 500_000
    assert found.raw_bytes[0, 1] == 1_500_000
    assert found.raw_bytes[1, 2] == 1_000_000
    assert found.raw_bytes[1, 0] == 1_000_000


def test_the_fill_is_the_longest_way_not_the_sum_when_edges_skip() -> None:
    load = chain_load(3, extra_values=[ValueLoad(0, (2,), 10_000_000, 0)])
    found = problem(load, cluster([node("a"), node("b"), node("c")])).evaluate(Arrangement((0, 1, 2), (0, 1, 2, 3)))
    # straight: 1 s + 10 s of link; by way of b: 1 + 1 + 1 + 1 s. Then c: 1 s, and back with 2 s each and two links
    assert found.fill_s == about(1 + 10 + 1 + 3 * 2 + 2 * 1)


def test_a_shared_uplink_is_busy_with_all_that_leaves_its_site() -> None:
    load = chain_load(3, extra_values=[ValueLoad(0, (2,), 1_000_000, 0)])
    sites = [node("a", 100 * GIGA, site="x"), node("b", 100 * GIGA, site="y"), node("c", 100 * GIGA, site="z")]
    links = LinkTable(default=Link(1e9), uplinks={"x": Uplink(1e6, 1e9)})
    found = problem(load, cluster(sites, links)).evaluate(Arrangement((0, 1, 2), (0, 1, 2, 3)))
    assert found.period_s == about(2.0)  # 2 MB leave x for every micro-batch
    assert found.bottleneck == (-1, 0)


def test_a_codec_shrinks_the_transfer_and_costs_both_ends_time() -> None:
    codec = PlanCodec("half", 2.0, 1e7, 1e6)
    machines = cluster([node("a", 100 * GIGA), node("b", 100 * GIGA)])
    found = problem(chain_load(2), machines).evaluate(Arrangement((0, 1), (0, 1, 2), (codec,)))
    assert found.link_s[0, 1] == about(0.5 + 0.1 + 1.0)
    assert found.transfer_s[0, 1] == about(0.5)
    assert found.period_s == about(1.0)  # the far thread decodes; the near one encodes and sends in 0.6 s


def test_tied_weights_add_their_exchange_once_a_step() -> None:
    load = chain_load(2, extra_held=[HeldLoad((0, 1), 8_000_000, 2_000_000, trainable=True)])
    machines = cluster([node("a"), node("b")])
    found = problem(load, machines).evaluate(Arrangement((0, 1), (0, 1, 2)))
    assert found.tied_s == about(8)
    assert found.step_s == about(found.fill_s + 4 * found.period_s + 8)
    alone = problem(load, machines).evaluate(Arrangement((0,), (0, 2)))
    assert alone.tied_s == 0


def test_memory_counts_weights_gradients_optimizer_state_and_micro_batches_in_flight() -> None:
    load = chain_load(2, value_bytes=1000, weight_elements=100, saved_bytes=5000)
    found = problem(load, cluster([node("a"), node("b")]), optimizer_bytes_per_parameter=8).evaluate(
        Arrangement((0, 1), (0, 1, 2))
    )
    # weight 400, gradient 400, state 800; in flight twice at a and once at b: 5000 saved and 1000 sent or received
    assert found.in_flight == (2, 1)
    assert found.memory_bytes == pytest.approx([1.05 * (1600 + 2 * 6000), 1.05 * (1600 + 6000)])


def test_what_does_not_fit_is_said_in_bytes_and_never_chosen() -> None:
    load = chain_load(2, value_bytes=1000, weight_elements=10_000)
    machines = cluster([node("a", memory=50_000), node("b")])
    found = problem(load, machines).evaluate(Arrangement((0, 1), (0, 1, 2)))
    assert not found.fits
    assert found.missing_bytes[0] == pytest.approx(1.05 * (80_000 + 1000) - 50_000)  # one in flight is the least
    assert found.missing_bytes[1] == 0


def test_too_little_memory_for_the_micro_batches_in_flight_makes_the_pipeline_wait() -> None:
    load = chain_load(4, value_bytes=1000, saved_bytes=100_000, weight_elements=1)
    small = int(1.05 * (100_000 + 1000 + 1000 + 100))
    machines = cluster([node(name, memory=small) for name in "abcd"], LinkTable(default=Link(1e9)))
    found = problem(load, machines, recompute="never").evaluate(Arrangement((0, 1, 2, 3), (0, 1, 2, 3, 4)))
    assert found.in_flight == (1, 1, 1, 1)
    assert found.waits
    assert found.period_s == pytest.approx(12, rel=1e-3)  # each micro-batch goes all the way before the next one


def test_slow_links_are_hidden_by_more_micro_batches_in_flight() -> None:
    machines = cluster([node("a"), node("b")], LinkTable(default=Link(1e6, 4.0)))
    found = problem(chain_load(2), machines, micro_batches=50).evaluate(Arrangement((0, 1), (0, 1, 2)))
    # a stage is busy 3 s; stage, link, stage, link take 3 + 5 + 3 + 5 = 16 s, in which 16 / 3 more enter
    assert found.in_flight == (6, 1)
    assert found.period_s == about(3)


def test_nodes_that_cannot_connect_both_ways_are_no_neighbours() -> None:
    nodes = [node("a"), node("b")]
    one_way = LinkTable({(nodes[0].node, nodes[1].node): Link(1e6)}, default=None)
    found = problem(chain_load(2), cluster(nodes, one_way)).evaluate(Arrangement((0, 1), (0, 1, 2)))
    assert found.step_s == np.inf
