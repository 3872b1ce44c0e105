"""Who keeps the copy of each stage's state: the worker of another stage, in another place if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusion.base.ids import NodeId, StageIndex
from fusion.plan.types import UNMEASURED_LINK, Cluster, ClusterNode, Link, Plan, site_of

MOST_COPIES = 2  #: that one stage keeps of others: one more than its fair share
_NOWHERE = float("inf")


def with_replicas(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with `replica_stage` set for each stage; a plan of one stage has nobody to keep a copy.

    A holder is on another site where one can be reached, and there behind the fastest link for this state. The largest
    states choose first, and nobody keeps more than `MOST_COPIES`, unless nobody else can be reached. A stage that
    reaches no other has no holder. A node that `cluster` does not know counts as unmeasured, on a site of its own.
    """
    nodes = {node.node: node for node in cluster.nodes}
    copies = [0] * len(plan.stages)
    holders: dict[int, StageIndex | None] = {}
    for stage in sorted(range(len(plan.stages)), key=lambda index: (-plan.stages[index].parameters, index)):
        holders[stage] = holder = _holder(plan, cluster, nodes, stage, copies)
        if holder is not None:
            copies[holder] += 1
    stages = tuple(replace(stage, replica_stage=holders[index]) for index, stage in enumerate(plan.stages))
    return replace(plan, stages=stages)


def _holder(
    plan: Plan, cluster: Cluster, nodes: Mapping[NodeId, ClusterNode], stage: int, copies: list[int]
) -> StageIndex | None:
    """Return the best holder: with room, on another site, fastest; of equals, the one that follows first."""
    best: tuple[tuple[bool, bool, float, int], StageIndex] | None = None
    for distance in range(1, len(plan.stages)):
        other = (stage + distance) % len(plan.stages)
        seconds = _seconds(plan, cluster, nodes, stage, other)
        if seconds == _NOWHERE:
            continue
        full = copies[other] >= MOST_COPIES
        key = (full, _same_site(plan, nodes, stage, other), seconds, distance)
        if best is None or key < best[0]:
            best = (key, StageIndex(other))
    return None if best is None else best[1]


def _seconds(plan: Plan, cluster: Cluster, nodes: Mapping[NodeId, ClusterNode], source: int, target: int) -> float:
    """Return how long one scalar for each parameter takes from one stage to another; infinity where it cannot get."""
    one, other = nodes.get(plan.stages[source].node), nodes.get(plan.stages[target].node)
    there: Link | None = UNMEASURED_LINK
    back: Link | None = UNMEASURED_LINK
    if one is not None and other is not None:
        there, back = cluster.links.between(one, other), cluster.links.between(other, one)
    if there is None or back is None or there.rate_bytes_per_s <= 0:
        return _NOWHERE
    return there.delay_s + 4 * plan.stages[source].parameters / there.rate_bytes_per_s


def _same_site(plan: Plan, nodes: Mapping[NodeId, ClusterNode], stage: int, other: int) -> bool:
    sites = [
        site_of(nodes[node]) if (node := plan.stages[index].node) in nodes else f"\0{node}" for index in (stage, other)
    ]
    return sites[0] == sites[1]
