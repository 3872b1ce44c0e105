"""Workloads and clusters for the planner's tests, with round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.base.ids import Incarnation, NodeId
from fusion.plan.cost import Problem
from fusion.plan.network import network_of
from fusion.plan.profile import profile_of
from fusion.plan.types import Cluster, ClusterNode, JobView, Link, LinkTable
from fusion.plan.workload import HeldLoad, OperatorLoad, ValueLoad, Workload

GIGA = 1e9
PLENTY = 10**12
SGD = JobView(micro_batches=5, schedule="1f1b", optimizer_bytes_per_parameter=0)


def chain_load(
    operators: int,
    *,
    flops: float = GIGA,
    value_bytes: int = 1_000_000,
    gradient_bytes: int | None = None,
    weight_elements: int = 1000,
    saved_bytes: int = 0,
    extra_values: Sequence[ValueLoad] = (),
    extra_held: Sequence[HeldLoad] = (),
) -> Workload:
    """Matrix products in a row: one unit of work forward, two backward, a weight each."""
    gradient = value_bytes if gradient_bytes is None else gradient_bytes
    return Workload(
        [OperatorLoad("linear", flops, 2 * flops, saved_bytes=saved_bytes)] * operators,
        [ValueLoad(at, (at + 1,), value_bytes, gradient) for at in range(operators - 1)] + list(extra_values),
        [HeldLoad((at,), 4 * weight_elements, weight_elements, trainable=True) for at in range(operators)]
        + list(extra_held),
        range(1, operators),
    )


def node(name: str, flops: float = GIGA, memory: int = PLENTY, site: str = "") -> ClusterNode:
    return ClusterNode(NodeId(f"id-{name}"), name, f"{name}:7445", Incarnation(1), memory, flops, site)


def cluster(nodes: Sequence[ClusterNode], links: LinkTable | None = None) -> Cluster:
    """Nodes that are all 1 MB/s and no time apart, unless `links` says otherwise."""
    return Cluster(tuple(nodes), links or LinkTable(default=Link(1e6)))


def problem(load: Workload, machines: Cluster, job: JobView = SGD, **changes: object) -> Problem:
    job = replace(job, **changes)  # type: ignore[arg-type]
    return Problem(profile_of(load, job.optimizer_bytes_per_parameter, cuts=job.cuts), network_of(machines), job)
