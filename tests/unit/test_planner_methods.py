"""Planning methods: what they use, what they leave out, and how near to the optimum they come."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from fusion.base.errors import ConfigError, PlanError
from fusion.plan.baselines import equal_compute, equal_number, op_fence
from fusion.plan.codecs import Compression, Ladder, adatopk_ratio, parse_compression
from fusion.plan.communities import communities
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.methods import METHODS, Settings, arrange
from fusion.plan.network import network_of
from fusion.plan.relax import SLACK, relax, strength
from fusion.plan.types import Cluster, Link, LinkTable
from fusion.plan.workload import OperatorLoad
from tests.support.planner import GIGA, chain_load, cluster, node, problem


def wanted(text: str) -> Compression:
    phase, *_ = parse_compression(text)
    return phase.compression


AUTO = wanted("auto:6.7")


def never() -> bool:
    return False


def best(of: Problem, method: str = "fusion", compression: str = "none", seed: int = 0) -> Arrangement:
    found = arrange(of, Settings(method, wanted(compression), seed), never)
    assert found is not None
    return found


def random_cluster(seed: int, count: int) -> Cluster:
    """Nodes of tenfold speeds at three sites, each pair with its own rates."""
    draw = np.random.default_rng(seed)
    nodes = [node(f"n{at}", float(draw.uniform(1, 10)) * GIGA, site=f"s{draw.integers(3)}") for at in range(count)]
    pairs = {
        (a.node, b.node): Link(float(np.exp(draw.uniform(np.log(1e5), np.log(1e8)))), float(draw.uniform(0, 0.05)))
        for a in nodes
        for b in nodes
        if a is not b
    }
    return Cluster(tuple(nodes), LinkTable(pairs, default=None))


def by_brute_force(of: Problem) -> float:
    """Try every order of every subset of the nodes with every way to cut."""
    count, blocks = len(of.network.flops), of.profile.blocks
    return min(
        of.step_s(Arrangement(order, (0, *cuts, blocks)))
        for size in range(1, count + 1)
        for order in permutations(range(count), size)
        for cuts in combinations(range(1, blocks), size - 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_exact_is_the_best_of_all_orders_subsets_and_cuts(seed: int) -> None:
    of = problem(chain_load(6), random_cluster(seed, 4))
    assert of.step_s(best(of, "exact")) == pytest.approx(by_brute_force(of), rel=1.1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_exact_is_also_right_where_memory_decides(seed: int) -> None:
    load = chain_load(5, weight_elements=1000, saved_bytes=4000, value_bytes=1000)
    machines = random_cluster(seed, 4)
    nodes = tuple(
        replace(one, memory_bytes=[30_000, 42_000, 60_000, 25_000][at]) for at, one in enumerate(machines.nodes)
    )
    of = problem(load, replace(machines, nodes=nodes))
    assert of.step_s(best(of, "exact")) == pytest.approx(by_brute_force(of), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_ours_is_within_two_percent_of_exact(seed: int) -> None:
    of = problem(chain_load(16), random_cluster(seed, 7))
    assert of.step_s(best(of)) <= 1.02 * of.step_s(best(of, "exact"))


def test_a_node_behind_a_slow_link_is_left_out_and_a_slow_node_too() -> None:
    nodes = [node("a"), node("far"), node("b"), node("slow", GIGA / 50)]
    far = {(x.node, y.node): Link(1e3) for x in nodes for y in nodes if x is not y and "far" in (x.name, y.name)}
    of = problem(chain_load(8), cluster(nodes, LinkTable(far, default=Link(1e8))))
    assert set(best(of).nodes) == {0, 2}
    assert set(op_fence(of).nodes) == {0, 1, 2, 3}


def test_the_fast_link_is_used_even_if_the_clusters_order_hides_it() -> None:
    nodes = [node(name) for name in "abcd"]
    fast = {(nodes[x].node, nodes[y].node): Link(1e9) for x, y in ((0, 2), (2, 0), (2, 1), (1, 2), (1, 3), (3, 1))}
    of = problem(chain_load(16, value_bytes=10_000_000), cluster(nodes, LinkTable(fast, default=Link(1e6))))
    assert best(of).nodes in ((0, 2, 1, 3), (3, 1, 2, 0))


def test_memory_is_never_exceeded_and_decides_who_gets_how_much() -> None:
    load = chain_load(8, weight_elements=1_000_000, value_bytes=1000)  # 8 MB per operator with its gradient
    machines = cluster([node("big", GIGA, 60_000_000), node("fast", 50 * GIGA, 20_000_000)], LinkTable())
    of = problem(load, machines)
    found = best(of)
    assert of.evaluate(found).fits
    assert {of.network.cluster.nodes[at].name for at in found.nodes} == {"big", "fast"}
    assert dict(zip(found.nodes, np.diff(found.places), strict=True)) == {0: 6, 1: 2}


def test_absent_links_are_never_used() -> None:
    nodes = [node(name) for name in "abc"]
    only = {(nodes[x].node, nodes[y].node): Link(1e8) for x, y in ((0, 2), (2, 0))}
    of = problem(chain_load(9), cluster(nodes, LinkTable(only, default=None)))
    assert set(best(of).nodes) == {0, 2}
    assert arrange(of, Settings("op-fence"), never) is None


def test_no_node_is_kept_that_makes_no_difference() -> None:
    load = chain_load(2, value_bytes=1000)
    found = best(problem(load, cluster([node("a"), node("b"), node("c", GIGA / 1000)], LinkTable())))
    assert sorted(found.nodes) == [0, 1]
    one_large = replace(load, operators=[load.operators[0], OperatorLoad("linear", 1.0, 2.0)])
    machines = cluster([node("a"), node("b")], LinkTable(default=Link(1e12)))
    assert len(best(problem(one_large, machines)).nodes) == 1


def test_the_jobs_limits_hold() -> None:
    machines = cluster([node(str(at)) for at in range(6)], LinkTable())
    assert len(best(problem(chain_load(12), machines, max_stages=2)).nodes) == 2
    with_cuts = problem(chain_load(12), machines, cuts=(3, 4, 9))
    for method in METHODS:
        found = best(with_cuts, method)
        assert found.places == (0, 1, 2, 3, 4), method
        assert list(with_cuts.profile.positions) == [0, 3, 4, 9, 12]


def test_the_same_seed_gives_the_same_plan_and_time_running_out_gives_the_best_so_far() -> None:
    of = problem(chain_load(24), random_cluster(5, 14))
    first, second = best(of, seed=3), best(of, seed=3)
    assert (first.nodes, first.places) == (second.nodes, second.places)
    calls = iter(range(10**9))
    hurried = arrange(of, Settings(), lambda: next(calls) > 8)
    assert hurried is not None
    assert of.step_s(first) <= of.step_s(hurried) < np.inf


def test_a_large_cluster_is_searched_where_it_is_fast_and_well_connected() -> None:
    nodes = [
        node(f"n{at}", GIGA * (8 if at % 10 == 0 else 1), site="near" if at % 2 == 0 else f"s{at}") for at in range(300)
    ]
    links = LinkTable(sites={("near", "near"): Link(1e9)}, default=Link(1e5, 0.05))
    of = problem(chain_load(12), cluster(nodes, links))
    assert all(at % 10 == 0 for at in best(of).nodes)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_more_freedom_never_plans_worse(schedule: str) -> None:
    of = problem(chain_load(24, value_bytes=3_000_000), random_cluster(11, 10), schedule=schedule)
    dense, codecs = of.step_s(best(of)), of.step_s(best(of, compression="auto"))
    assert codecs <= dense
    assert dense <= of.step_s(best(of, "op-fence"))


def test_unknown_methods_and_too_many_nodes_for_exact_are_refused() -> None:
    of = problem(chain_load(4), cluster([node(str(at)) for at in range(13)]))
    with pytest.raises(ConfigError, match="'best' is none of fusion, op-fence"):
        arrange(of, Settings("best"), never)
    with pytest.raises(PlanError, match="at most 12 nodes"):
        arrange(of, Settings("exact"), never)


# ---- baselines ----


def test_equal_number_and_equal_compute_use_every_node_in_order() -> None:
    machines = cluster([node("a", 3 * GIGA), node("b", GIGA), node("c", 2 * GIGA)])
    of = problem(chain_load(12), machines)
    assert (equal_number(of).nodes, equal_number(of).places) == ((0, 1, 2), (0, 4, 8, 12))
    assert (equal_compute(of).nodes, equal_compute(of).places) == ((0, 1, 2), (0, 6, 8, 12))


def test_equal_compute_regards_memory() -> None:
    load = chain_load(6, weight_elements=1_000_000, value_bytes=1000)
    machines = cluster([node("a", 5 * GIGA, 20_000_000), node("b", GIGA)])
    assert equal_compute(problem(load, machines)).places == (0, 2, 6)


def test_more_nodes_than_operators_leave_the_slowest_unused() -> None:
    machines = cluster([node(f"n{at}", GIGA * (at + 1)) for at in range(9)])
    assert equal_compute(problem(chain_load(4), machines)).nodes == (5, 6, 7, 8)


def test_op_fence_puts_communities_one_after_another() -> None:
    nodes = [node(f"n{at}", site="xyz"[at % 3]) for at in range(9)]
    sites = {(s, s): Link(1e9) for s in "xyz"} | {("x", "z"): Link(3e6), ("z", "x"): Link(3e6)}
    machines = cluster(nodes, LinkTable(sites=sites, default=Link(1e6)))
    groups = communities(network_of(machines))
    assert sorted(map(tuple, groups)) == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    order = op_fence(problem(chain_load(18), machines)).nodes
    assert [nodes[at].site for at in order] in (
        list("yyyxxxzzz"),
        list("yyyzzzxxx"),
        list("xxxzzzyyy"),
        list("zzzxxxyyy"),
    )


def test_nodes_that_are_all_alike_are_one_community() -> None:
    assert communities(network_of(cluster([node(name) for name in "abcd"]))) == [[0, 1, 2, 3]]


# ---- codecs ----


def test_adatopk_sends_r_times_less_on_the_slowest_link_and_less_strongly_on_others() -> None:
    assert adatopk_ratio(100, 2.0, 2.0) == pytest.approx(100)
    assert adatopk_ratio(100, 0.5, 2.0) == pytest.approx(25)
    assert adatopk_ratio(100, 0.001, 2.0) == 1.0


def test_adatopk_and_uniform_topk_on_a_plan() -> None:
    nodes = [node(name, 100 * GIGA) for name in "abc"]
    slow = {(nodes[0].node, nodes[1].node): Link(1e5)}
    of = problem(chain_load(3), cluster(nodes, LinkTable(slow, default=Link(1e6))))
    ada, uniform = best(of, "equal-number", "adatopk:50"), best(of, "equal-number", "topk:50")
    assert [ada.codec(0, 1).ratio, ada.codec(1, 0).ratio, ada.codec(1, 2).ratio] == pytest.approx([50, 5, 5], rel=0.01)
    assert uniform.codec(1, 2).ratio == pytest.approx(50, rel=0.05)
    assert {uniform.codec(1, 2).name, uniform.codec(2, 1).name} == {"topk:50"}


def test_relaxed_codecs_are_few_and_mild_and_only_where_the_time_needs_them() -> None:
    nodes = [node(name, 30 * GIGA) for name in "abcd"]
    slow = {(nodes[x].node, nodes[y].node): Link(1e6) for x, y in ((1, 2), (2, 1))}
    of = problem(chain_load(4), cluster(nodes, LinkTable(slow, default=Link(1e9))))
    ladder = wanted("auto:8").ladder()
    strongest = np.triu(np.full((4, 4), len(ladder) - 1)) + np.tril(np.full((4, 4), 2 * len(ladder) - 1), -1)
    strong = Arrangement((0, 1, 2, 3), (0, 1, 2, 3, 4), ladder.both, strongest)
    limit_s = SLACK * of.step_s(strong)
    found = relax(of, strong, ladder, limit_s)
    assert of.step_s(found) <= limit_s
    assert {pair for pair in np.ndindex(4, 4) if found.codec(*pair).name != "none"} == {(1, 2), (2, 1)}
    assert strength(of, found) < strength(of, strong)


def test_no_codec_is_used_where_links_cost_nothing() -> None:
    of = problem(chain_load(8), cluster([node(name) for name in "abcd"], LinkTable(default=Link(1e12))))
    found = best(of, compression="auto")
    assert strength(of, found) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("auto:", "topk", "topk:0.5", "adatopk:nan", "auto:x", "zip", "none:3", "topk:1e9", "", "int8@5", "auto/int8"),
        *("int8 int4", "int8 int4@0", "int8 int4@1", "int8 int4@100%", "int8 int4@9 none@9", "int8 int4@9 none@50%"),
        *("int8,0>0=int4", "int8,0>1", "int8,0>1=zip", "none,0>1=int8+ef", "none,0>1=mask:1/8,1>0=int4"),
        *(" ".join(["int8"] * 65), "int8+ef", "mask:1/8/int8/int4"),
    ],
)
def test_compression_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="compression: "):
        parse_compression(text)


def names(ladder: Ladder) -> list[tuple[str, str]]:
    return [(there.name, back.name) for there, back in zip(ladder.forward, ladder.backward, strict=True)]


def test_auto_uses_no_codec_beyond_its_limit() -> None:
    assert names(wanted("auto:4").ladder()) == [("none", "none"), ("bf16", "bf16"), ("int8", "int8")]
    assert names(wanted("auto:5.1").ladder())[-1] == ("int8", "int4+dither")
    assert names(AUTO.ladder())[-1] == ("int6", "int3+dither")  # 2 / (6.25 / 32 + 3.25 / 32) = 6.7 times fewer bytes


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("auto", [(None, "mask:3/8"), (0.7, "int6")]),
        ("auto:17", [(None, "mask:1/4"), (0.7, "int6")]),
        ("auto,0>1=bf16", [(None, "mask:3/8"), (0.7, "int6")]),
        ("auto:6.7", [(None, "int6")]),
        ("auto:4", [(None, "int8")]),
        ("auto int8@90%", [(None, "int6"), (0.9, "int8")]),
        ("auto:31 auto:4@50%", [(None, "mask:1/8"), (0.5, "int8")]),
    ],
)
def test_auto_by_itself_is_stronger_early_and_milder_towards_the_end(text: str, phases: list[object]) -> None:
    found = parse_compression(text)
    assert [(phase.from_share, phase.compression.ladder().forward[-1].name) for phase in found] == phases
    assert all(phase.compression.links == found[0].compression.links for phase in found)
