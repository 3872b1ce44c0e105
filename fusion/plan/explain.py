"""What each node is worth to a plan, and why others were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from fusion.base.ids import NodeId
from fusion.base.units import format_bytes, format_flops, format_rate
from fusion.plan.batch import cost_orders
from fusion.plan.chain import NEVER, Chain, Order
from fusion.plan.methods import promising
from fusion.plan.planner import Planned

USELESS_BELOW = 0.01  #: a node that makes a step faster by less is not worth its place
_REPLACEMENTS = 8
_TRIED = 32  #: nodes left out whose best place is looked for
_CAP_STEPS, _WIDE_CAPS = (-3, -1, 0, 2), 6


@dataclass(frozen=True, slots=True)
class NodeGain:
    """A node of the plan."""

    node: NodeId
    name: str
    seconds_without: float  #: step time of the best plan known without it; inf: there is none
    gain: float  #: by how much longer a step takes without it, as a share of the step time

    @property
    def useless(self) -> bool:
        """Whether the plan could as well do without."""
        return self.gain < USELESS_BELOW


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A node that the plan does not use."""

    node: NodeId
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The worth of all nodes of a cluster."""

    gains: tuple[NodeGain, ...]  #: by stage
    left_out: tuple[LeftOut, ...]  #: in the cluster's order


def explain(planned: Planned) -> Explanation:
    """Return what each used node gains, by searching near the plan without it, and why the others are left out."""
    worth = _Worth(planned)
    return Explanation(tuple(worth.gains()), tuple(worth.left_out()))


class _Worth:
    """Costs of changed orders of nodes, in the chain model with the plan's own codecs to choose from."""

    def __init__(self, planned: Planned) -> None:
        self.planned, self.problem = planned, planned.problem
        self.network = self.problem.network
        self.order: Order = planned.arrangement.nodes
        pool = promising(self.problem, _TRIED + len(self.order), self.order)
        self.pool = [int(node) for node in pool]
        place = {node: index for index, node in enumerate(self.pool)}
        self.inside = tuple(place[node] for node in self.order)
        part = self.problem.subset(pool)
        self.chains = [Chain(part, planned.ladder, slope) for slope in (1.0, 0.0)]
        if any(stage.recompute for stage in planned.plan.stages):
            self.chains.append(Chain(part, planned.ladder, recompute=True))
        self.base_s = self._best([self.inside])

    def gains(self) -> list[NodeGain]:
        found = []
        unused = self._ranked_unused()[:_REPLACEMENTS]
        for at, stage in enumerate(self.planned.plan.stages):
            rest = self.inside[:at] + self.inside[at + 1 :]
            orders = [(*rest[:at], node, *rest[at:]) for node in unused]
            if rest:
                orders.append(rest)
            without_s = self._best(orders) if orders else inf
            gain = max(0.0, without_s / self.base_s - 1.0) if without_s < inf else inf
            found.append(NodeGain(stage.node, stage.node_name, self.planned.plan.step_s * (1.0 + gain), gain))
        return found

    def left_out(self) -> list[LeftOut]:
        used, found = set(self.order), []
        for index, node in enumerate(self.network.cluster.nodes):
            if index not in used:
                found.append(LeftOut(node.node, node.name, self._reason(index)))
        return found

    def _reason(self, index: int) -> str:
        least = self.problem.profile.memory_bytes(1)
        places = np.arange(self.problem.profile.blocks)
        smallest = float(least[places, places + 1].min())
        if self.network.memory_bytes[index] < smallest:
            offered = format_bytes(float(self.network.memory_bytes[index]))
            return f"memory: it offers {offered}, the smallest part of the model needs {format_bytes(smallest)}"
        others = [node for node in self.order if node != index]
        reachable = [
            node
            for node in others
            if np.isfinite(self.network.s_per_byte[index, node] + self.network.s_per_byte[node, index])
        ]
        if not reachable:
            return "links: it cannot connect to any node of the plan, both ways"
        rate = max(1.0 / float(self.network.s_per_byte[index, node]) for node in reachable)
        figures = f"{format_flops(float(self.network.flops[index]))}, fastest link to the plan {format_rate(rate)}"
        if index not in self.pool:
            return f"others are faster or better connected ({figures})"
        if len(self.order) >= self.problem.max_stages and not self.problem.whole_blocks:
            return f"the plan has as many stages as it may, {self.problem.max_stages}, on better nodes ({figures})"
        return self._price(self.pool.index(index), figures)

    def _price(self, node: int, figures: str) -> str:
        length = len(self.inside)
        orders = [(*self.inside[:at], node, *self.inside[at:]) for at in range(length + 1)]
        with_it = self._best(orders)
        if with_it == inf:
            return f"nowhere in the plan does it fit with its memory and links ({figures})"
        change = with_it / self.base_s - 1.0
        if change < USELESS_BELOW:
            return f"it would change the step by less than {USELESS_BELOW:.0%} ({figures})"
        return f"in its best place a step would take {change:.0%} longer ({figures})"

    def _ranked_unused(self) -> list[int]:
        """Nodes outside the plan, those first that are fast and well connected to it."""
        chain, used = self.chains[0], list(self.inside)
        out = float(np.median(chain.forward_out + chain.backward_out))
        link_s = (chain.there[used] + chain.back[used]).min(axis=0) * out
        score = chain.seconds[:, -1] / max(1, len(used)) + link_s
        return [int(node) for node in np.argsort(score, kind="stable") if int(node) not in set(used)]

    def _best(self, orders: Sequence[Order]) -> float:
        """Return the least step time of these orders; inf where none is possible."""
        usable = [order for order in orders if len(order) <= self.chains[0].problem.max_stages]
        best = inf
        for wide in (False, True):
            for chain in self.chains:
                if not usable or best < float(NEVER) / 2:
                    break
                near = chain.caps_near(chain.cap_of(self.planned.evaluation.busiest_s), _CAP_STEPS)
                caps = chain.caps_everywhere(_WIDE_CAPS) if wide else near
                found = cost_orders(chain, usable, np.array([caps] * len(usable)))
                best = min(best, *(one.step_s for one in found))
        return best if best < float(NEVER) / 2 else inf
