"""In which order the nodes are, for `benchmarks.paper_testbed`: planners that know no network keep it.

Six nodes have 720 orders. For each, the step time of a plan is predicted with the links of the topology's file;
the order in the middle of that ranking stands for a baseline that knows nothing of sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from benchmarks.lab import Topology, hosts_of, link_between
from fusion.base.ids import Incarnation, NodeId
from fusion.graph.operators import TABLE
from fusion.plan.planner import Options, plan_workload
from fusion.plan.types import Cluster, ClusterNode, JobView, Link, LinkTable
from fusion.plan.workload import Workload

_MEMORY_BYTES = 2 << 30
_PAYLOAD_SHARE = 0.955  #: of the bytes on the wire: headers of TCP, IP and Ethernet take the rest
_BYTES_PER_FLOP = 1e3  #: far more than operators move: as on emulated nodes, only operations take time


def cluster_of(topology: Topology, order: Sequence[str], flops: Mapping[str, float]) -> Cluster:
    """Return the lab as planners see it, the nodes in this order."""
    efficiency = tuple((info.cost, 1.0) for info in TABLE.values())

    def node(host: str) -> ClusterNode:
        speed = flops[host]
        return ClusterNode(
            NodeId(host),
            host,
            f"{host}:1",
            Incarnation(1),
            _MEMORY_BYTES,
            speed,
            bytes_per_s=speed * _BYTES_PER_FLOP,
            efficiency=efficiency,
        )

    def link(a: str, b: str) -> Link:
        found = link_between(topology, a, b)
        return Link(found["rate_mbps"] * 1e6 / 8 * _PAYLOAD_SHARE, found["delay_ms"] / 1e3)

    pairs: dict[tuple[NodeId, NodeId], Link | None] = {
        (NodeId(a), NodeId(b)): link(a, b) for a, b in permutations(order, 2)
    }
    return Cluster(tuple(node(host) for host in order), LinkTable(pairs, default=None))


@dataclass(frozen=True, slots=True)
class Ranking:
    """All orders with their predicted step times, the fastest first."""

    orders: tuple[tuple[float, tuple[str, ...]], ...]

    @property
    def median(self) -> list[str]:
        """The order that half of all others are slower than."""
        return list(self.orders[len(self.orders) // 2][1])

    def seconds(self, share: float) -> float:
        """Return the predicted step time that a share of the orders does not exceed."""
        return self.orders[min(int(share * len(self.orders)), len(self.orders) - 1)][0]


def ranking(topology: Topology, flops: Mapping[str, float], workload: Workload, job: JobView, method: str) -> Ranking:
    """Rank all orders of the hosts, for a method that keeps them."""
    options = Options(method)
    found = [
        (plan_workload(cluster_of(topology, order, flops), workload, job, options).plan.step_s, order)
        for order in permutations(hosts_of(topology))
    ]
    return Ranking(tuple(sorted(found)))


def equal_compute_cuts(
    topology: Topology, order: Sequence[str], flops: Mapping[str, float], workload: Workload, job: JobView
) -> list[int]:
    """Return where equal compute cuts for the nodes in this order, between blocks where little crosses.

    A coordinator that is asked for "equal-compute" cuts wherever the compute is most nearly equal, whatever crosses
    there, which would be no fair baseline on slow links.
    """
    plan = plan_workload(cluster_of(topology, order, flops), workload, job, Options("equal-compute")).plan
    return [stage.first_operator for stage in plan.stages[1:]]
