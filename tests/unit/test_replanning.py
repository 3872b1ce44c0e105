"""When a running job moves: worth its cost, clearly, twice in a row, and not soon after another move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.base.ids import Incarnation, NodeId
from fusion.plan.types import Cluster, ClusterNode, Link, LinkTable
from fusion_coordinator.decide.replanning import (
    Limits,
    Memory,
    Offer,
    judge,
    move_cost_s,
    settled,
    slowness,
    with_usual,
)
from fusion_coordinator.planmaking import measured, slowed
from fusion_coordinator.replanner import typical_rates

LIMITS = Limits(ratio=1.25, wins=2, hold_off_s=60.0)
GOOD = Offer(present_s=10.0, best_s=5.0, move_s=30.0, steps_left=100)
A, B, C = NodeId("a" * 20), NodeId("b" * 20), NodeId("c" * 20)


def verdicts(offers: list[Offer], first_s: float, every_s: float = 10.0) -> list[bool]:
    memory, found = Memory(running_since_s=0.0), []
    for number, offer in enumerate(offers):
        verdict, memory = judge(offer, memory, first_s + number * every_s, LIMITS)
        found.append(verdict.move)
    return found


def test_a_better_plan_must_be_found_twice_in_a_row():
    assert verdicts([GOOD, GOOD], 100.0) == [False, True]
    bad = replace(GOOD, best_s=9.0)
    assert verdicts([GOOD, bad, GOOD, bad, GOOD], 100.0) == [False] * 5
    assert verdicts([GOOD, bad, GOOD, GOOD], 100.0) == [False, False, False, True]


def test_nothing_moves_before_the_hold_off_is_over_and_then_at_once():
    assert verdicts([GOOD] * 7, 10.0) == [False] * 5 + [True, False]


@pytest.mark.parametrize(
    ("offer", "word"),
    [
        (replace(GOOD, best_s=8.1), "not better by 1.25x"),
        (replace(GOOD, best_s=12.0), "not better"),
        (replace(GOOD, steps_left=6), "not worth it for 6 steps"),  # 6 x 5 s are what the move takes
        (replace(GOOD, steps_left=0), "not worth it"),
        (replace(GOOD, move_s=600.0), "not worth it"),
    ],
)
def test_what_is_not_clearly_worth_it_is_left_alone_with_the_reason(offer: Offer, word: str):
    memory = Memory(0.0, wins=1)
    verdict, memory = judge(offer, memory, 1000.0, LIMITS)
    assert not verdict.move
    assert word in verdict.reason
    assert memory.wins == 0


def test_the_reason_of_a_move_states_the_figures():
    _, memory = judge(GOOD, Memory(0.0), 100.0, LIMITS)
    verdict, _ = judge(GOOD, memory, 110.0, LIMITS)
    assert verdict.move
    assert "10 s per step by what was measured, another plan 5 s (2.00x), moving takes 30.0 s" in verdict.reason
    assert "saves 7 min 50 s" in verdict.reason  # 100 steps x 5 s - 30 s


@pytest.mark.parametrize(
    ("measured_s", "expected"),
    [
        ([1.0, 1.0], False),  # too few
        ([1.0, 1.1, 0.9], True),
        ([1.0, 1.0, 1.0, 9.0, 1.0], True),  # one slow step is nothing
        ([1.0, 1.0, 1.0, 3.0, 3.0], False),  # is it going to stay so?
        ([1.0, 1.0, 3.0, 3.0, 3.0], True),
        ([3.0, 3.0, 3.0, 1.0, 1.0], False),
    ],
)
def test_while_a_nodes_speed_changes_nothing_is_decided_by_it(measured_s: list[float], expected: bool):
    assert settled(measured_s) is expected


def test_a_node_is_as_slow_as_it_was_measured_beside_what_its_stated_speed_says():
    found = slowness([A, B], [10.0, 10.0], [10.0, 30.0], micro_batches=4)
    assert found[A] == pytest.approx(1.0, rel=1e-3)
    assert found[B] == pytest.approx(3.0, rel=1e-3)


def test_t24_a_node_that_claims_a_hundred_times_its_speed_is_planned_by_its_true_one():
    honest, liar = 4.0, 0.04  # both compute for 4 s; the second said that it would take 0.04 s
    found = slowness([A, B], [honest, liar], [4.0, 4.0], micro_batches=8)
    assert found[B] / found[A] == pytest.approx(100.0, rel=0.10)


def test_next_to_no_work_tells_nothing_of_a_node():
    found = slowness([A, B, C], [10.0, 10.0, 1e-6], [20.0, 20.0, 0.004], micro_batches=8)
    assert 0.5 < found[C] / found[A] < 2.0  # and not thousands


def test_what_was_not_measured_is_taken_to_be_as_slow_as_the_others_are():
    assert with_usual({A: 2.0, B: 4.0, C: 3.0}, [A, NodeId("d")]) == {A: 2.0, NodeId("d"): 3.0}
    assert with_usual({}, [A]) == {A: 1.0}
    assert slowness([A], [0.0], [1.0], 1) == {}


def test_moving_costs_the_restart_and_the_slowest_way_out_and_in():
    cost_s = move_cost_s({A: 1000, B: 100}, {B: 600, C: 500}, {A: (100.0, 1.0), B: (10.0, 50.0)}, restart_s=7.0)
    assert cost_s == 7.0 + 10.0 + 12.0  # a sends 1000 at 100, b 100 at 10; b takes 600 at 50; c has no known limit


def node(identity: NodeId, flops: float) -> ClusterNode:
    return ClusterNode(identity, identity[:1], "10.0.0.1:1", Incarnation(1), 2**30, flops, bytes_per_s=2 * flops)


def test_a_slowed_cluster_computes_and_moves_bytes_more_slowly():
    cluster = Cluster((node(A, 100.0), node(B, 100.0)))
    slow = slowed(cluster, {A: 4.0, B: 1.0})
    assert [(one.flops, one.bytes_per_s) for one in slow.nodes] == [(25.0, 50.0), (100.0, 200.0)]


def test_rates_of_a_node_are_the_median_of_its_links_and_a_cluster_of_absent_links_is_unmeasured():
    pairs = {(A, B): Link(10.0), (A, C): Link(30.0), (B, A): Link(7.0), (C, A): None, (B, C): None}
    links = LinkTable(pairs)
    assert typical_rates(links) == {A: (20.0, 7.0), B: (7.0, 10.0)}
    assert measured(Cluster((), links))
    assert not measured(Cluster((), LinkTable({(A, B): None})))
