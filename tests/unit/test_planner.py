"""From a graph to a plan: its figures, its errors, and what it says about nodes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from fusion.base.errors import ConfigError, GraphError, PlanError
from fusion.base.ids import StageIndex
from fusion.graph.partition import partition
from fusion.plan.explain import explain
from fusion.plan.methods import METHODS
from fusion.plan.need import stage_bytes
from fusion.plan.planner import Options, make_plan, plan_workload
from fusion.plan.types import CodecChange, Link, LinkTable, Uplink
from tests.support.graphs import chain
from tests.support.planner import GIGA, SGD, chain_load, cluster, node

MIB = 2**20


def test_a_plan_holds_every_operator_once_and_its_figures_fit_together() -> None:
    machines = cluster([node("a"), node("b", 2 * GIGA), node("c")], LinkTable(default=Link(1e8, 0.001)))
    planned = plan_workload(machines, chain_load(8, value_bytes=100_000), SGD)
    plan = planned.plan
    assert plan.stages[0].first_operator == 0
    assert plan.stages[-1].end_operator == 8
    assert all(a.end_operator == b.first_operator for a, b in zip(plan.stages, plan.stages[1:], strict=False))
    assert sum(stage.parameters for stage in plan.stages) == 8000
    assert {(link.source, link.target) for link in plan.links} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert all(link.bytes_per_step == 5 * 100_000 for link in plan.links)
    assert plan.links[0].seconds == pytest.approx(0.002)
    busiest = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    fill = sum(stage.forward_s + stage.backward_s for stage in plan.stages) + sum(link.seconds for link in plan.links)
    assert planned.evaluation.step_s == pytest.approx(fill + 4 * busiest)
    assert planned.evaluation.step_s * 0.7 < plan.step_s < planned.evaluation.step_s * 1.1  # by simulation
    assert planned.evaluation.period_s == pytest.approx(busiest)
    assert planned.bottleneck.startswith("stage ")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_plans_a_graph_within_its_nodes_memory(method: str) -> None:
    graph, job = chain(9, width=64), replace(SGD, optimizer_bytes_per_parameter=8)
    machines = cluster([node(name, memory=16 * MIB) for name in "abc"], LinkTable())
    plan = make_plan(machines, graph, job, Options(method)).plan
    parts = partition(graph, [stage.first_operator for stage in plan.stages[1:]])
    for index, stage in enumerate(plan.stages):
        assert stage.memory_bytes == stage_bytes(parts, index, job, stage.in_flight) <= stage.memory_limit_bytes


def test_a_model_that_fits_nowhere_says_how_much_is_missing() -> None:
    machines = cluster([node("a", memory=30_000_000), node("b", memory=20_000_000)])
    load = chain_load(10, weight_elements=1_000_000, value_bytes=1000)
    with pytest.raises(PlanError, match="memory: ") as caught:
        plan_workload(machines, load, SGD)
    # 10 x 8 MB of weights and gradients with 5 % of margin are 84 MB; 50 MB are there
    assert "2 with 47.7 MiB in all" in str(caught.value)
    missing_mib = float(str(caught.value).split("memory: ")[1].split(" MiB")[0])
    assert 0.99 * 34e6 <= missing_mib * MIB <= 1.35 * 34e6


def test_cuts_need_as_many_nodes_that_connect() -> None:
    nodes = [node(name) for name in "abc"]
    with pytest.raises(PlanError, match="cuts: 3 cuts make 4 stages, only 3 nodes may be used"):
        plan_workload(cluster(nodes), chain_load(8), replace(SGD, cuts=(2, 4, 6)))
    apart = cluster(nodes, LinkTable(default=None))
    with pytest.raises(PlanError, match="links: no 3 nodes of 3 connect in a row"):
        plan_workload(apart, chain_load(8), replace(SGD, cuts=(2, 4)))
    assert len(plan_workload(apart, chain_load(8), SGD).plan.stages) == 1


def test_a_baseline_that_cannot_leave_nodes_out_says_so() -> None:
    apart = cluster([node("a"), node("b")], LinkTable(default=None))
    with pytest.raises(PlanError, match=r"method op-fence finds no plan .* method fusion may leave nodes out"):
        plan_workload(apart, chain_load(8), SGD, Options("op-fence"))


def test_settings_that_make_no_sense_are_refused() -> None:
    machines = cluster([node("a")])
    with pytest.raises(PlanError, match="no node is idle"):
        plan_workload(cluster([]), chain_load(4), SGD)
    with pytest.raises(ConfigError, match="method: 'magic' is none of"):
        plan_workload(machines, chain_load(4), SGD, Options("magic"))
    with pytest.raises(ConfigError, match="compression: 'zip' is none of"):
        plan_workload(machines, chain_load(4), replace(SGD, compression="zip"))
    with pytest.raises(GraphError, match="cuts: 99 is not inside"):
        make_plan(machines, chain(4), replace(SGD, cuts=(99,)))


def test_time_is_asked_of_the_given_clock_alone() -> None:
    ticks = iter(range(10**9))
    machines = cluster([node(f"n{at}", GIGA * (1 + at % 3)) for at in range(6)], LinkTable())
    hurried = plan_workload(machines, chain_load(12), SGD, Options(budget_s=6.0, clock_s=lambda: float(next(ticks))))
    relaxed = plan_workload(machines, chain_load(12), SGD)
    assert 10 < next(ticks) < 40
    assert relaxed.plan.step_s <= hurried.plan.step_s < inf


def test_the_codec_of_every_link_is_in_the_plan() -> None:
    machines = cluster([node("a", 30 * GIGA, 20_000_000), node("b", 30 * GIGA, 20_000_000)])
    load = chain_load(4, value_bytes=1_000_000, weight_elements=700_000)
    dense = plan_workload(machines, load, replace(SGD, micro_batches=2))
    codecs = plan_workload(machines, load, replace(SGD, micro_batches=2, compression="auto:7.5"))
    assert {link.codec for link in dense.plan.links} == {"none"}
    assert codecs.plan.step_s < dense.plan.step_s / 3
    strong = [link for link in codecs.plan.links if link.codec == "int6"]
    assert strong
    assert strong[0].ratio == pytest.approx(64 * 4 / (64 * 6 / 8 + 2), rel=1e-3)
    assert strong[0].bytes_per_step == 2_000_000  # before the codec


def planned_codecs(compression: str, **changes: int) -> tuple[dict[tuple[int, int], str], list[CodecChange]]:
    machines = cluster([node("a", 30 * GIGA, 20_000_000), node("b", 30 * GIGA, 20_000_000)])
    load = chain_load(4, value_bytes=1_000_000, weight_elements=700_000)
    job = replace(SGD, micro_batches=2, compression=compression, **changes)
    found = plan_workload(machines, load, job).plan
    return {(link.source, link.target): link.codec for link in found.links}, list(found.codec_changes)


def test_a_fixed_pair_is_on_every_link_each_way() -> None:
    assert planned_codecs("int8/int4") == ({(0, 1): "int8", (1, 0): "int4"}, [])
    assert planned_codecs("mask:1/8") == ({(0, 1): "mask:1/8", (1, 0): "mask:1/8+int4"}, [])
    assert planned_codecs("int8,1>0=bf16") == ({(0, 1): "int8", (1, 0): "bf16"}, [])
    with pytest.raises(PlanError, match="link 2>1 is not in a plan of 2 stages"):
        planned_codecs("int8,2>1=bf16")


def test_the_phases_of_a_run_become_changes_at_their_steps() -> None:
    text = "mask:1/8 int8/int4@50% bf16@90%"
    first, changes = planned_codecs(text, steps=200)
    assert first == {(0, 1): "mask:1/8", (1, 0): "mask:1/8+int4"}
    assert changes == [
        CodecChange(101, ((StageIndex(0), StageIndex(1), "int8"), (StageIndex(1), StageIndex(0), "int4"))),
        CodecChange(181, ((StageIndex(0), StageIndex(1), "bf16"), (StageIndex(1), StageIndex(0), "bf16"))),
    ]
    assert planned_codecs(text, steps=200, first_step=150) == ({(0, 1): "int8", (1, 0): "int4"}, changes[1:])
    assert planned_codecs("int8 none@7", steps=200)[1][0].from_step == 7
    assert planned_codecs("int8 none@300", steps=200)[1] == []  # a step that the run does not reach


# ---- what nodes are worth ----


def test_gains_are_what_a_step_would_take_longer_without_the_node() -> None:
    machines = cluster([node("a"), node("b")], LinkTable(default=Link(1e9)))
    found = explain(plan_workload(machines, chain_load(10, value_bytes=1000), SGD))
    # alone 5 x 30 s, together 30 + 4 x 15 s
    assert [gain.gain for gain in found.gains] == pytest.approx([150 / 90 - 1] * 2, rel=0.01)
    assert [gain.seconds_without for gain in found.gains] == pytest.approx([150, 150], rel=0.01)
    assert not any(gain.useless for gain in found.gains)
    assert found.left_out == ()


def test_a_node_that_could_be_replaced_is_named_useless() -> None:
    machines = cluster([node("a"), node("b"), node("spare")], LinkTable(default=Link(1e9)))
    found = explain(plan_workload(machines, chain_load(2, value_bytes=1000), SGD))
    assert [gain.useless for gain in found.gains] == [True, True]
    assert len(found.left_out) == 1


def test_a_node_without_which_nothing_fits_has_no_price() -> None:
    load = chain_load(4, weight_elements=1_000_000, value_bytes=1000)
    machines = cluster([node("a", memory=20_000_000), node("b", memory=20_000_000)], LinkTable())
    found = explain(plan_workload(machines, load, SGD))
    assert [gain.gain for gain in found.gains] == [inf, inf]
    assert not found.gains[0].useless


def test_every_node_left_out_has_its_reason() -> None:
    nodes = [
        node("a", 10 * GIGA),
        node("b", 10 * GIGA),
        node("tiny", 10 * GIGA, memory=1000),
        node("alone", 10 * GIGA),
        node("far", 10 * GIGA),
    ]
    pairs: dict = {}
    for one in nodes:
        for other in nodes:
            if "alone" in (one.name, other.name):
                pairs[one.node, other.node] = None
            elif "far" in (one.name, other.name):
                pairs[one.node, other.node] = Link(1e4)
    found = explain(plan_workload(cluster(nodes, LinkTable(pairs, default=Link(1e9))), chain_load(8), SGD))
    reasons = {item.name: item.reason for item in found.left_out}
    assert set(reasons) == {"tiny", "alone", "far"}
    assert reasons["tiny"].startswith("memory: it offers 0.977 KiB, the smallest part of the model needs")
    assert reasons["alone"] == "links: it cannot connect to any node of the plan, both ways"
    assert "% longer (10 GFLOPS, fastest link to the plan 80 kbit/s)" in reasons["far"]


def test_the_bottleneck_is_named_whatever_it_is() -> None:
    fast = [node("a", 1000 * GIGA, 20_000_000, "x"), node("b", 1000 * GIGA, 20_000_000, "y")]
    load = chain_load(4, weight_elements=1_000_000, value_bytes=1_000_000, gradient_bytes=1000)
    assert plan_workload(cluster(fast), load, SGD).bottleneck.startswith("link ")
    shared = LinkTable(default=Link(1e9), uplinks={"x": Uplink(1e6, 1e6), "y": Uplink(1e9, 1e9)})
    assert plan_workload(cluster(fast, shared), load, SGD).bottleneck in (
        "uplink of the site of a",
        "link a -> b",
        "link b -> a",
    )
