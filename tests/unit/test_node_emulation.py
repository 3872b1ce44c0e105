"""A device that is only emulated: planners expect of it exactly what its worker's waiting makes it take."""

from __future__ import annotations

import pytest

from fusion.base.ids import Incarnation, NodeId
from fusion.cli.models import mini_gpt_job
from fusion.graph.partition import partition, stage_cost
from fusion.job.prepare import captured_graph
from fusion.plan.planner import Options, make_plan
from fusion.plan.types import Cluster, ClusterNode, JobView, Link, LinkTable
from fusion.wire.v1 import node_pb2
from fusion_node.emulation import as_emulated

SPEEDS = (0.5e9, 1e9)


def as_seen(name: str, flops: float) -> ClusterNode:
    told = as_emulated(node_pb2.Hardware(device="cpu", memory_bytes=2**30, flops=flops))
    assert (told.device, told.memory_bytes, told.flops) == ("cpu", 2**30, flops)
    return ClusterNode(
        NodeId(name),
        name,
        "",
        Incarnation(1),
        told.memory_bytes,
        told.flops,
        bytes_per_s=told.bytes_per_s,
        efficiency=tuple(told.efficiency.items()),
    )


def test_a_plan_expects_of_each_emulated_stage_its_operations_over_its_speed() -> None:
    _, graph = captured_graph(mini_gpt_job(2))
    nodes = tuple(as_seen(f"n{speed:g}", speed) for speed in SPEEDS)
    cluster = Cluster(nodes, LinkTable(default=Link(1e8)))
    plan = make_plan(cluster, graph, JobView(8, "1f1b", 8), Options("equal-number")).plan
    parts = partition(graph, [stage.first_operator for stage in plan.stages[1:]])
    for stage, shard, speed in zip(plan.stages, parts.shards, SPEEDS, strict=True):
        cost = stage_cost(graph, shard)
        # waiting for a norm or an embedding would be of no use: they are not counted in FLOPs
        assert stage.forward_s == pytest.approx(cost.forward_flops / speed, rel=0.01)
        assert stage.backward_s == pytest.approx(cost.backward_flops / speed, rel=0.01)
