"""The cluster's links as the coordinator knows them: whom to let measure what, and what came of it.

Kept in memory only: after a restart everything is measured again, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fusion.base.ids import NodeId
from fusion.links import LinkBook, LinkView, ProbeWish, next_probes, under_load, view_of
from fusion.links.probing import MOST_BYTES, all_measured
from fusion.wire.v1 import node_pb2
from fusion_coordinator.liveness import Presences
from fusion_coordinator.state import State
from fusion_coordinator.state.records import NodeState

ORDER_S = 45.0  #: an order that was not answered for that long is lost


@dataclass(frozen=True, slots=True)
class _Order:
    """A measurement under way."""

    wish: ProbeWish
    given_s: float


class LinkWatch:
    """Orders measurements, and keeps their results. `now_s` is monotonic."""

    def __init__(self) -> None:
        self.book = LinkBook()
        self._orders: dict[str, _Order] = {}  #: by the node that dials
        self._addresses: dict[NodeId, str] = {}

    def moved(self, node: NodeId, address: str) -> None:
        """A node has registered; what was measured at another address no longer holds."""
        if self._addresses.setdefault(node, address) != address:
            self.book.forget(node)
        self._addresses[node] = address
        self._orders.pop(node, None)

    def next_orders(
        self, state: State, presences: Presences, idle: Collection[NodeId], now_s: float
    ) -> list[tuple[NodeId, node_pb2.Command]]:
        """Return commands to nodes: who is to be let in first, then who dials."""
        self._orders = {node: order for node, order in self._orders.items() if now_s - order.given_s < ORDER_S}
        engaged = {node for order in self._orders.values() for node in (order.wish.source, order.wish.target)}
        commands: list[tuple[NodeId, node_pb2.Command]] = []
        for wish in next_probes(self.book, in_contact(state, presences), idle, engaged, now_s):
            source, target = NodeId(wish.source), NodeId(wish.target)
            self._orders[source] = _Order(wish, now_s)
            let_in = node_pb2.ProbeOrder(callers=[source])
            commands.append((target, node_pb2.Command(probe=let_in)))
            dial = node_pb2.ProbeTarget(
                node_id=target, address=state.nodes[target].address, bytes=min(wish.size_bytes, MOST_BYTES)
            )
            commands.append((source, node_pb2.Command(probe=node_pb2.ProbeOrder(targets=[dial]))))
        return commands

    def reported(
        self, node: NodeId, links: Iterable[node_pb2.LinkReport], idle: Collection[NodeId], now_s: float
    ) -> None:
        """Take what a node found. Only what it was asked for counts, and no failure to reach a node that got busy."""
        order = self._orders.pop(node, None)
        for link in links:
            if order is None or link.node_id != order.wish.target:
                continue
            if link.reachable:
                self.book.probed(
                    node,
                    link.node_id,
                    now_s,
                    round_trip_s=link.round_trip_s,
                    there_bytes_per_s=link.there_bytes_per_s,
                    back_bytes_per_s=link.back_bytes_per_s,
                    probe_bytes=min(link.bytes, MOST_BYTES),
                    relayed=link.relayed,
                )
            elif link.node_id in idle:
                self.book.failed(node, link.node_id, now_s, " ".join(link.reason.split())[:300])

    def measures(self, source: NodeId, target: NodeId) -> bool:
        """Whether `source` was told to measure the link to `target` and has not reported yet."""
        order = self._orders.get(source)
        return order is not None and order.wish.target == target

    def measuring(self, state: State, presences: Presences, idle: Collection[NodeId], now_s: float) -> bool:
        """Whether something about the nodes in contact is yet to be measured for the first time."""
        return not all_measured(self.book, in_contact(state, presences), idle, now_s)

    def view(self, nodes: Sequence[NodeId]) -> LinkView:
        """Return the links between some nodes."""
        return view_of(self.book, nodes)

    def view_under_load(self, nodes: Sequence[NodeId]) -> LinkView:
        """Return the same for comparing the links that a job uses with those that it does not."""
        return under_load(self.view(nodes), self.book)


def in_contact(state: State, presences: Presences) -> list[NodeId]:
    """Return the members that take commands, in the order in which they were first seen."""
    return [
        node.node
        for node in state.nodes.values()
        if node.state is NodeState.MEMBER
        and node.node not in state.revoked
        and (presence := presences.get(node.node)) is not None
        and presence.incarnation == node.incarnation
        and presence.watching
    ]
