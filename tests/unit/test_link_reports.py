"""What a step's links did, from the transport's counters to the coordinator's book and the owner's screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace as struct_replace

from fusion.base.errors import ConfigError, WireError
from fusion.base.ids import Epoch, Incarnation, NodeId, StageIndex
from fusion.cli.linkview import link_lines, links_as_json
from fusion.cli.planview import plan_as_json, plan_lines
from fusion.cli.status import status as status_command
from fusion.compress.catalog import parse_codec, parse_pair
from fusion.compress.linkcodecs import CodecSchedule
from fusion.graph.partition import partition
from fusion.plan.codecs import parse_compression
from fusion.plan.types import Cluster, ClusterNode, CodecChange, Link, LinkTable, Plan, PlannedLink, PlannedStage
from fusion.protocol.cluster import cluster_from_proto, cluster_to_proto
from fusion.protocol.jobstatus import JobState, JobStatus, status_from_proto
from fusion.protocol.messages import MessageKind
from fusion.protocol.metrics import (
    CodingMetrics,
    LinkMetrics,
    StageMetrics,
    StepMetrics,
    metrics_from_proto,
    metrics_to_proto,
)
from fusion.protocol.plan import plan_to_proto
from fusion.runtime.coding import StageCoder
from fusion.runtime.machine import Key
from fusion.transport.assembler import ReceiveCounters
from fusion.transport.outbox import SendCounters
from fusion.wire.v1 import coordinator_pb2, node_pb2
from fusion_coordinator.decide import scheduling
from fusion_coordinator.linkwatch import ORDER_S, LinkWatch
from fusion_coordinator.liveness import Presence
from fusion_coordinator.state import State
from fusion_coordinator.state.records import HardwareRecord, NodeRecord
from fusion_node.ipc import Received, Sending, StepReport, decode_report, encode
from fusion_node.linkmeter import LinkMeter
from fusion_node.outbox import step_message
from tests.support.graphs import chain

S0, S1, S2 = StageIndex(0), StageIndex(1), StageIndex(2)


# ---- from the worker ----


def small_coder(stage: StageIndex) -> StageCoder:
    """Of two stages with the codecs int8 and, from step 3 on, bf16."""
    graph = chain(2)
    codecs = CodecSchedule.always(parse_pair("int8")).changed(3, {(0, 1): parse_codec("bf16")})
    return StageCoder(partition(graph, [1]), stage, codecs)


def test_the_meter_tells_what_each_step_added_and_leaves_idle_links_out():
    sent, got = SendCounters(payload_bytes=10, sending_s=1.0), ReceiveCounters(timed_bytes=5, busy_s=0.5)
    quiet = (SendCounters(), ReceiveCounters())
    coder = small_coder(S0)
    meter = LinkMeter(lambda: {S1: (sent, got), S2: quiet}, coder)
    assert meter.step(1, {}) == ({}, {})
    sent.payload_bytes, sent.sending_s, sent.blocked_s = 110, 1.25, 0.125
    got.payload_bytes, got.timed_bytes, got.busy_s, got.timed_messages = 1100, 1005, 2.5, 3
    value = torch.zeros(2, 4)
    out = coder.encode(Key(MessageKind.ACTIVATION, 2, 0, 0), value, requires_grad=True)
    back = small_coder(S1).encode(Key(MessageKind.GRADIENT, 2, 0, 0), value, requires_grad=False)
    coder.decode(Key(MessageKind.GRADIENT, 2, 0, 0), back.layout, back.payload, back.codec, requires_grad=False)
    ((one, sending),), ((other, received),) = (part.items() for part in meter.step(2, {S1: 0.75}))
    assert (one, other) == (1, 1)
    assert (sending.busy_s, sending.blocked_s, sending.codec) == (0.25, 0.125, "int8")
    assert (sending.raw_bytes, sending.coded_bytes) == (32, len(out.payload))
    assert (received.bytes, received.busy_s, received.waited_s) == (1000, 2.0, 0.75)
    assert received.messages == 3
    assert sending.encode_s > 0
    assert received.decode_s > 0
    assert meter.step(3, {}) == ({}, {})
    sent.payload_bytes += 1
    assert meter.step(3, {})[0][1].codec == "bf16"


def test_links_figures_pass_from_the_worker_to_the_owner():
    report = StepReport(
        step=3,
        sent={1: 50},
        sending={1: Sending(0.25, 0.125, 200, 40, 0.5, "int4")},
        received={1: Received(1000, 2.0, 0.0625, 0.75, 4)},
        codec_revision=2,
    )
    decoded = decode_report(encode(report))
    assert decoded == report
    assert isinstance(decoded, StepReport)
    message = step_message(0, decoded)
    metrics = metrics_from_proto(coordinator_pb2.StepMetrics(step=3, stages=[message]))
    (stage,) = metrics.stages
    assert stage.received == {S1: LinkMetrics(1000, 2.0, 0.0625, 0.75, 4)}
    assert stage.received[S1].bytes_per_s == 0.0  # of messages so small it says little
    assert LinkMetrics(400_000, 2.0, messages=4).bytes_per_s == LinkMetrics(400_000, 2.0).bytes_per_s == 200_000
    assert stage.blocked_s == {S1: 0.125}
    assert stage.coding == {S1: CodingMetrics("int4", 200, 40, 0.5)}
    assert stage.coding[S1].ratio == 5.0
    assert stage.codec_revision == 2
    assert metrics_from_proto(metrics_to_proto(metrics)) == metrics


# ---- at the coordinator ----


def node_record(name: str, address: str = "10.0.0.1:7445") -> NodeRecord:
    hardware = HardwareRecord("cpu", "x", 2**30, 1e9, 1, "linux", "3.11", "2.13.0", "0.1")
    return NodeRecord(NodeId(name * 20), name, address, "10.0.0.1", hardware, 1)


A, B, C = (NodeId(letter * 20) for letter in "abc")
NODES = {one.node: one for one in map(node_record, "abc")}
STATE = State(nodes=NODES)
PRESENCES = {one: Presence(1, 0.0, 0.0, watching=True) for one in NODES}


def report(node: NodeId, **fields: Any) -> node_pb2.LinkReport:
    return node_pb2.LinkReport(**{"node_id": node, "reachable": True, "round_trip_s": 0.01} | fields)


def test_who_is_dialled_is_told_first_whom_to_let_in():
    watch = LinkWatch()
    commands = watch.next_orders(STATE, PRESENCES, NODES, 0.0)
    (target, let_in), (source, dial) = commands[:2]
    assert list(let_in.probe.callers) == [source]
    (order,) = dial.probe.targets
    assert (order.node_id, order.address) == (target, "10.0.0.1:7445")
    assert watch.measuring(STATE, PRESENCES, NODES, 0.0)


def test_only_what_was_asked_for_counts_and_a_lost_order_is_given_again():
    watch = LinkWatch()
    commands = watch.next_orders(STATE, PRESENCES, NODES, 0.0)
    source, target = commands[1][0], commands[0][0]
    other = ({A, B, C} - {source, target}).pop()
    watch.reported(other, [report(source)], NODES, 1.0)
    assert watch.book.record(other, source).dialled_s is None
    watch.reported(source, [report(other), report(target)], NODES, 1.0)
    assert watch.book.record(source, target).round_trip_s == 0.01
    assert watch.book.record(source, other).dialled_s is None
    watch.reported(source, [report(target, round_trip_s=9.0)], NODES, 1.0)  # a second answer to the same order
    assert watch.book.record(source, target).round_trips_s == (0.01,)

    lost = LinkWatch()
    lost.next_orders(STATE, PRESENCES, {A}, 0.0)
    assert lost.next_orders(STATE, PRESENCES, {A}, ORDER_S - 1) == []
    assert lost.next_orders(STATE, PRESENCES, {A}, ORDER_S) != []


def test_a_node_that_got_busy_meanwhile_is_not_taken_for_unreachable():
    watch = LinkWatch()
    commands = watch.next_orders(STATE, PRESENCES, NODES, 0.0)
    source, target = commands[1][0], commands[0][0]
    failed = report(target, reachable=False, reason="refused")
    watch.reported(source, [failed], set(NODES) - {target}, 1.0)
    assert watch.book.record(source, target).failures == 0


def test_a_node_at_a_new_address_is_measured_anew():
    watch = LinkWatch()
    watch.moved(A, "10.0.0.1:7445")
    watch.book.probed(A, B, 0.0, round_trip_s=0.01, there_bytes_per_s=1e6, back_bytes_per_s=1e6)
    watch.moved(A, "10.0.0.1:7445")
    assert watch.book.estimate(A, B) is not None
    watch.moved(A, "10.0.0.9:7445")
    assert watch.book.estimate(A, B) is None


def test_planners_get_sites_by_name_one_way_delays_and_absent_links():
    watch = LinkWatch()
    watch.book.probed(A, B, 0.0, round_trip_s=0.080, there_bytes_per_s=2e6, back_bytes_per_s=1e6)
    watch.book.probed(A, C, 0.0, round_trip_s=0.001, there_bytes_per_s=9e6, back_bytes_per_s=9e6)
    watch.book.failed(B, C, 0.0, "refused")
    cluster = scheduling.cluster_of(list(NODES.values()), watch.view([A, B, C]))
    sites = {node.name: node.site for node in cluster.nodes}
    assert sites == {"a": "a", "b": "b", "c": "a"}
    one, two, three = cluster.nodes
    assert cluster.links.between(one, two) == Link(2e6, 0.040)
    assert cluster.links.between(two, three) is None
    assert cluster.links.between(three, two) == Link(2e6, 0.040)  # not measured: as between the sites
    assert scheduling.cluster_of([NODES[A]]).links == LinkTable()


def test_planners_get_what_a_node_was_calibrated_to():
    hardware = struct_replace(NODES[A].hardware, bytes_per_s=5e9, efficiency={"norm": 0.5, "conv": 0.25})
    (node,) = scheduling.cluster_of([struct_replace(NODES[A], hardware=hardware)]).nodes
    assert (node.bytes_per_s, node.efficiency) == (5e9, (("conv", 0.25), ("norm", 0.5)))


# ---- to the owner ----

CLUSTER = Cluster(
    (
        ClusterNode(A, "a", "10.0.0.1:1", Incarnation(3), 2**30, 1e9, "here", 5e8, (("linear", 0.5),)),
        ClusterNode(B, "b", "10.0.0.2:1", Incarnation(4), 2**31, 2e9, "there"),
    ),
    LinkTable({(A, B): Link(1e6, 0.04), (B, A): None}, {("here", "there"): Link(3e6, 0.01)}, Link(5e5, 0.1)),
)


def test_a_cluster_comes_back_the_same_and_its_idle_nodes_alone():
    message = cluster_to_proto(CLUSTER, {B})
    assert cluster_from_proto(message) == CLUSTER
    assert [node.name for node in cluster_from_proto(message, idle_only=True).nodes] == ["b"]


@pytest.mark.parametrize(
    "broken", [{"flops": 0.0}, {"flops": float("nan")}, {"memory_bytes": 0}, {"bytes_per_s": -1.0}]
)
def test_a_cluster_with_absurd_nodes_is_refused(broken: dict[str, float]):
    message = cluster_to_proto(CLUSTER)
    for name, value in broken.items():
        setattr(message.nodes[0], name, value)
    with pytest.raises(WireError, match=r"node a (has|moves)"):
        cluster_from_proto(message)


def test_a_cluster_whose_node_never_ends_an_operator_is_refused():
    message = cluster_to_proto(CLUSTER)
    message.nodes[0].efficiency["linear"] = 0.0
    with pytest.raises(WireError, match="node a has an efficiency that is not above 0"):
        cluster_from_proto(message)


def test_a_cluster_with_absurd_links_is_refused():
    message = cluster_to_proto(CLUSTER)
    message.links[0].rate_bytes_per_s = -1
    with pytest.raises(WireError, match="link a"):
        cluster_from_proto(message)


STAGES = (
    PlannedStage(A, "a", "10.0.0.1:1", Incarnation(3), 0, 7, 1000, 2**20, 0.25, 0.5, 2**30, 2),
    PlannedStage(B, "b", "10.0.0.2:1", Incarnation(4), 7, 9, 10, 2**21, 0.125, 0.25, 2**31, 3, recompute=True),
)
PLAN = Plan(Epoch(2), STAGES, (PlannedLink(S0, S1, "int8", 4000, 4.0, 0.5),), "1f1b", 4, 7.5)
LAST = StepMetrics(
    step=5,
    loss=1.0,
    step_s=9.0,
    stages=(
        StageMetrics(S0, 9.0, 3.5, sent_bytes={S1: 1010}),
        StageMetrics(S1, 9.0, 1.0, peak_memory_bytes=2**22, received={S0: LinkMetrics(1000, 0.25)}),
    ),
)


def job_status(last: StepMetrics | None = LAST) -> JobStatus:
    message = coordinator_pb2.JobStatus(job_id="job-aaaaaaaaaa", name="j", state=3, plan=plan_to_proto(PLAN), steps=10)
    if last is not None:
        message.last.CopyFrom(metrics_to_proto(last))
    return status_from_proto(message)


def test_the_plan_is_shown_with_predicted_and_measured_figures():
    assert job_status().plan == PLAN
    found = plan_as_json(job_status())
    assert found is not None
    assert found["step_s"] == {"predicted": 7.5, "measured": 9.0}
    first, second = found["stages"]
    assert first["compute_s"] == {"predicted": 3.0, "measured": 3.5}  # 4 x (0.25 + 0.5)
    assert second["memory_bytes"] == {"predicted": 2**21, "measured": 2**22}
    assert [(stage["in_flight"], stage["recompute"]) for stage in found["stages"]] == [(2, False), (3, True)]
    (link,) = found["links"]
    assert link["bytes"] == {"predicted": 1000.0, "measured": 1010}
    assert link["seconds"] == {"predicted": 2.0, "measured": 0.25}
    assert link["bytes_per_s"] == 4000.0
    lines = plan_lines(job_status())
    assert "plan 2: 2 stages, 1f1b, 4 micro-batches; a step takes 9.0 s, predicted 7.5 s" in lines[0]
    assert [line.count("3, recomputed") for line in lines if " b " in f" {line} "] == [1]
    assert any("0 -> 1" in line and "32 kbit/s" in line for line in lines)


def test_figures_of_an_earlier_plan_are_not_set_beside_the_present_one():
    before = replace(LAST, stages=LAST.stages[:1])
    found = plan_as_json(job_status(before))
    assert found is not None
    assert found["step_s"]["measured"] is None
    assert [stage["compute_s"]["measured"] for stage in found["stages"]] == [None, None]
    assert plan_as_json(JobStatus("j", "j", JobState.QUEUED, "", 0, 1, (), (), None, 0, 0, "")) is None


@pytest.mark.parametrize("option", ["--plan", "--links"])
def test_the_plan_of_no_job_in_particular_cannot_be_shown(option: str):
    result = CliRunner().invoke(status_command, [option])
    assert result.exit_code != 0
    assert f"{option} needs a job" in str(result.exception)


def test_links_are_shown_with_their_codec_now_and_what_it_costs():
    coded = replace(
        LAST,
        step=12,
        stages=(
            replace(LAST.stages[0], coding={S1: CodingMetrics("bf16", 2000, 1000, 0.5)}),
            replace(LAST.stages[1], received={S0: LinkMetrics(1000, 0.25, 0.125, 4.5)}),
        ),
    )
    changing = replace(PLAN, codec_changes=(CodecChange(12, ((S0, S1, "bf16"),)),))
    message = coordinator_pb2.JobStatus(job_id="j", name="j", state=3, plan=plan_to_proto(changing), step=12, steps=20)
    message.last.CopyFrom(metrics_to_proto(coded))
    status = status_from_proto(message)
    found = links_as_json(status)
    assert found is not None
    assert found["compression"] == "none,0>1=int8 none,0>1=bf16@12"
    parse_compression(found["compression"])
    (link,) = found["links"]
    assert link == {
        "source": 0,
        "target": 1,
        "from_node": "a",
        "to_node": "b",
        "codec": "bf16",
        "ratio": 2.0,
        "bytes": 1010,
        "raw_bytes": 2000,
        "bytes_per_s": 4000.0,
        "encode_s": 0.5,
        "decode_s": 0.125,
        "relayed_by": None,
        "waited_share": 0.5,
    }
    lines = link_lines(status)
    assert "0 -> 1  a -> b  bf16   2.0" in lines[1]
    assert lines[1].split()[-2:] == ["50%", "-"]
    message.relayed.add(source=0, target=1, by="coordinator", bytes=70)
    assert link_lines(status_from_proto(message))[1].split()[-2:] == ["50%", "coordinator"]
    message.ClearField("last")
    unmeasured = links_as_json(status_from_proto(message))
    assert unmeasured is not None
    assert unmeasured["links"][0]["codec"] == "bf16"  # of step 12
    assert unmeasured["links"][0]["ratio"] is None


def test_a_job_says_who_plans_it_and_whether_it_may_move():
    import torch
    from torch import nn

    import fusion

    x = torch.zeros(4, 2)

    def make(**settings: Any) -> fusion.Job:
        return fusion.Job(
            nn.Linear(2, 2),
            {"input": x},
            fusion.SGD(0.1),
            steps=1,
            batch_size=2,
            loss=lambda out, _: out.sum(),
            **settings,
        )

    assert (make().planner, make().replan) == ("fusion", True)
    assert (make(planner="op-fence", replan=False).planner, make(replan=False).replan) == ("op-fence", False)
    with pytest.raises(ConfigError, match="planner must be one of fusion, op-fence"):
        make(planner="greedy")
    with pytest.raises(ConfigError, match="replan must be True or False"):
        make(replan=1)
