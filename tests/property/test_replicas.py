"""Copies of states: never with oneself, elsewhere where that can be, spread, and behind the best link."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fusion.base.ids import Epoch, Incarnation, NodeId
from fusion.plan.replicas import with_replicas
from fusion.plan.types import Cluster, Link, LinkTable, Plan, PlannedStage
from tests.support.planner import cluster, node


def plan_on(names: list[str], parameters: list[int] | None = None) -> Plan:
    sizes = parameters or [1000] * len(names)
    stages = tuple(
        PlannedStage(NodeId(f"id-{name}"), name, f"{name}:7445", Incarnation(1), at, at + 1, size, 1, 0.0, 0.0)
        for at, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
    return Plan(Epoch(1), stages, (), "1f1b", 4)


def holders(plan: Plan, machines: Cluster) -> list[int | None]:
    return [stage.replica_stage for stage in with_replicas(plan, machines).stages]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Plan, Cluster]:
    count = draw(st.integers(1, 5))
    names = [f"n{at}" for at in range(count)]
    machines = [node(name, site=draw(st.sampled_from(["", "east", "west"]))) for name in names]
    pairs = {
        (one.node, other.node): draw(
            st.one_of(st.none(), st.builds(Link, st.sampled_from([1e5, 1e6, 1e8]), st.sampled_from([0.0, 0.1])))
        )
        for one in machines
        for other in machines
        if one is not other
    }
    sizes = draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))
    return plan_on(names, sizes), cluster(machines, LinkTable(pairs, default=None))


@given(placed())
def test_a_holder_is_another_stage_that_can_be_reached_both_ways(of: tuple[Plan, Cluster]) -> None:
    plan, machines = of
    for index, holder in enumerate(holders(plan, machines)):
        can = [
            other
            for other in range(len(plan.stages))
            if other != index
            and machines.links.between(machines.nodes[index], machines.nodes[other]) is not None
            and machines.links.between(machines.nodes[other], machines.nodes[index]) is not None
        ]
        assert holder in can if can else holder is None


@given(st.integers(2, 12), st.randoms(use_true_random=False))
def test_where_all_reach_all_nobody_keeps_more_than_two(count: int, random: object) -> None:
    names = [f"n{at}" for at in range(count)]
    machines = [node(name) for name in names]
    pairs = {
        (one.node, other.node): Link(random.choice([1e5, 1e6, 1e7]))  # type: ignore[attr-defined]
        for one in machines
        for other in machines
    }
    found = holders(plan_on(names), cluster(machines, LinkTable(pairs)))
    assert None not in found
    assert max(Counter(found).values()) <= 2


@given(placed())
def test_nothing_else_of_a_plan_changes(of: tuple[Plan, Cluster]) -> None:
    plan, machines = of
    made = with_replicas(plan, machines)
    assert replace(made, stages=tuple(replace(stage, replica_stage=None) for stage in made.stages)) == plan
    assert with_replicas(made, machines) == made


def test_one_stage_has_nobody_to_keep_its_copy() -> None:
    assert holders(plan_on(["a"]), cluster([node("a"), node("b")])) == [None]


def test_two_stages_keep_each_others() -> None:
    assert holders(plan_on(["a", "b"]), cluster([node("a"), node("b")])) == [1, 0]


def test_alike_nodes_pass_their_copies_to_the_next_and_so_no_two_depend_on_each_other() -> None:
    machines = cluster([node(name) for name in "abcd"])
    assert holders(plan_on(list("abcd")), machines) == [1, 2, 3, 0]


def test_another_site_goes_before_a_faster_link() -> None:
    machines = [node("a", site="east"), node("b", site="east"), node("c", site="west")]
    links = LinkTable(sites={("east", "east"): Link(1e9)}, default=Link(1e6))
    assert holders(plan_on(["a", "b", "c"]), cluster(machines, links)) == [2, 2, 0]


def test_of_other_sites_the_fastest_for_this_state_is_taken() -> None:
    machines = [node(name) for name in "abc"]
    ab, ac = Link(1e6, 0.001), Link(1e8, 0.2)
    pairs = {(NodeId("id-a"), NodeId("id-b")): ab, (NodeId("id-a"), NodeId("id-c")): ac}
    links = LinkTable(pairs, default=Link(1e6))
    # 4 kB: 5 ms to b, 200 ms to c. 40 MB: 40 s to b, 0.6 s to c.
    assert holders(plan_on(["a", "b", "c"], [1000, 1, 1]), cluster(machines, links))[0] == 1
    assert holders(plan_on(["a", "b", "c"], [10**7, 1, 1]), cluster(machines, links))[0] == 2


def test_the_largest_states_choose_first() -> None:
    machines = [node(name) for name in "abcd"]
    fast = {(NodeId(f"id-{name}"), NodeId("id-d")): Link(1e9) for name in "abc"}
    found = holders(plan_on(list("abcd"), [10, 30, 20, 1]), cluster(machines, LinkTable(fast, default=Link(1e6))))
    assert (found[1], found[2]) == (3, 3)
    assert found[0] != 3


def test_nodes_that_the_cluster_does_not_know_still_get_holders() -> None:
    assert holders(plan_on(["a", "b", "c"]), cluster([])) == [1, 2, 0]
