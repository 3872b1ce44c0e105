"""From a plan, a workload and a cluster to a simulated pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.base.errors import PlanError
from fusion.base.ids import Epoch, Incarnation, NodeId, StageIndex
from fusion.compress.catalog import parse_codec, speeds
from fusion.plan.plan_simulation import pipeline_of, schedules_of, simulate_plan
from fusion.plan.schedule import format_schedule
from fusion.plan.simulation import SharedLoad, Wire
from fusion.plan.types import Cluster, ClusterNode, Link, LinkTable, Plan, PlannedLink, PlannedStage, Uplink
from fusion.plan.workload import HeldLoad, OperatorLoad, ValueLoad, Workload

NODES = tuple(
    ClusterNode(NodeId(name), name, f"{name}:1", Incarnation(1), 10**9, 1000.0, site, bytes_per_s=800.0)
    for name, site in (("a", "east"), ("b", "east"), ("c", "west"))
)
LINKS = LinkTable(default=Link(100.0, 0.5), uplinks={"east": Uplink(50.0, 60.0)})
CLUSTER = Cluster(NODES, LINKS)
#: five operators: 0 1 | 2 3 | 4; value 0 goes to the next stage and skips to the last, 3 only on; no gradient of 1
WORKLOAD = Workload(
    operators=[OperatorLoad("linear")] * 5,
    values=[ValueLoad(0, (1, 2, 3, 4), 80, 80), ValueLoad(1, (2,), 10, 0), ValueLoad(3, (4,), 40, 40)],
    held=[
        HeldLoad((0, 4), 600, 150, trainable=True),  # tied
        HeldLoad((2,), 40, 10, trainable=True),
        HeldLoad((3, 4), 8, 2),  # a buffer
    ],
    cuts=[1, 2, 3, 4],
)


def stage(node: ClusterNode, first: int, end: int, in_flight: int = 0) -> PlannedStage:
    return PlannedStage(
        node.node, node.name, node.address, node.incarnation, first, end, 20, 0, 1.0, 2.0, in_flight=in_flight
    )


PLAN = Plan(
    Epoch(1),
    (stage(NODES[0], 0, 2), stage(NODES[1], 2, 4), stage(NODES[2], 4, 5)),
    (PlannedLink(StageIndex(1), StageIndex(2), "int8", 0, ratio=4.0),),
    "1f1b",
    4,
)


def test_values_travel_to_every_stage_that_reads_them_once_and_shrink_by_the_links_ratio() -> None:
    made = pipeline_of(PLAN, WORKLOAD, CLUSTER)
    assert [(edge.source, edge.target, edge.forward_bytes, edge.backward_bytes) for edge in made.edges] == [
        (0, 1, 80, 80),
        (0, 2, 80, 80),
        (0, 1, 10, None),
        (1, 2, 10, 40),
    ]


def test_a_codec_takes_its_time_at_both_ends() -> None:
    edge = pipeline_of(PLAN, WORKLOAD, CLUSTER).edges[3]
    encode, decode = speeds(parse_codec("int8"))
    # 40 bytes are nothing beside what a message costs in any case
    assert (edge.forward_encode_s, edge.forward_decode_s) == pytest.approx((40 / encode + 2e-4, 40 / decode + 1.5e-4))
    assert (edge.backward_encode_s, edge.backward_decode_s) == (0, 0)
    link = replace(PLAN.links[0], codec="bf16", ratio=2.0)
    edge = pipeline_of(replace(PLAN, links=(link,)), WORKLOAD, CLUSTER).edges[3]
    encode, decode = speeds(parse_codec("bf16"))
    assert (edge.forward_encode_s, edge.forward_decode_s) == pytest.approx((40 / encode + 3e-5, 40 / decode + 3e-5))


def test_parameters_of_several_stages_are_exchanged_and_the_first_answers_for_the_norm() -> None:
    made = pipeline_of(PLAN, WORKLOAD, CLUSTER)
    assert made.shared == [SharedLoad((0, 2), (0, 2), 600)]
    assert [load.tensors for load in made.stages] == [1, 1, 0]


def test_links_between_sites_go_through_their_uplinks() -> None:
    wires = {(wire.source, wire.target): wire for wire in pipeline_of(PLAN, WORKLOAD, CLUSTER, 8, 1000).wires}
    assert sorted(wires) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert wires[0, 1] == Wire(0, 1, 100.0, 0.5, 1000)  # within a site
    assert wires[0, 2] == Wire(0, 2, 50.0, 0.5, 1000, (0,))
    assert wires[2, 1] == Wire(2, 1, 60.0, 0.5, 1000, (1,))
    assert pipeline_of(PLAN, WORKLOAD, CLUSTER).pipe_rates_bytes_per_s == [50.0, 60.0]


def test_the_update_takes_the_time_of_its_memory_traffic() -> None:
    # 20 parameters: 12 bytes each for weight and gradient, and 8 bytes of state read and written, at 800 bytes/s
    made = pipeline_of(PLAN, WORKLOAD, CLUSTER, optimizer_bytes_per_parameter=8)
    assert made.stages[0].update_s == pytest.approx(20 * (12 + 16) / 800)


def test_numbers_in_flight_go_before_the_schedules_name() -> None:
    deep = replace(PLAN, stages=(*PLAN.stages[:2], stage(NODES[2], 4, 5, in_flight=2)))
    assert [format_schedule(item) for item in schedules_of(deep)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
    ]


def test_a_simulated_plan_takes_what_its_slowest_link_takes() -> None:
    one = Workload(WORKLOAD.operators, [ValueLoad(1, (2,), 1000, 0)], [], WORKLOAD.cuts)
    plan = replace(PLAN, stages=(stage(NODES[0], 0, 2), stage(NODES[1], 2, 5)), links=(), schedule="gpipe")
    result = simulate_plan(plan, one, Cluster(NODES, LinkTable(default=Link(100.0))), steps=2)
    # forward, four transfers of 10 s, then the last stage's forward and four backwards
    assert result.steps[0].backward_end_s == pytest.approx(1 + 40 + 1 + 8)
    assert result.bottleneck == (0, 1)
    assert result.names == ("a", "b")


def test_a_plan_over_an_absent_link_is_refused() -> None:
    cut = replace(LINKS, pairs={(NodeId("c"), NodeId("a")): None})
    with pytest.raises(PlanError, match="stage 2 on c and stage 0 on a have no link"):
        simulate_plan(PLAN, WORKLOAD, Cluster(NODES, cut))
    with pytest.raises(PlanError, match="node c, which is not in the cluster"):
        simulate_plan(PLAN, WORKLOAD, Cluster(NODES[:2], LINKS))
