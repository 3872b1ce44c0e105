"""Many orders of nodes at once: the dynamic program over their cuts, vectorised across orders and bottlenecks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusion.plan.chain import NEVER, Chain, Ints, Order, Singles, extend


@dataclass(frozen=True)
class Costed:
    """The best cuts of one order in the chain model."""

    step_s: float  #: NEVER where there are none
    period_s: float
    places: Order


def cost_orders(chain: Chain, orders: Sequence[Order], caps: Ints) -> list[Costed]:
    """Return the best cuts of every order, under the bottlenecks caps[order, :] of the chain's grid."""
    ranked = sorted(range(len(orders)), key=lambda index: -len(orders[index]))
    run = _Run(chain, [orders[index][::-1] for index in ranked], caps[ranked])
    found = dict(zip(ranked, run.results, strict=True))
    return [found[index] for index in range(len(orders))]


class _Run:
    """Orders run from the last stage to the first. The longest come first, so those still growing are always on top."""

    def __init__(self, chain: Chain, orders: Sequence[Order], caps: Ints) -> None:
        self.chain, self.caps = chain, caps
        self.lengths = np.array([len(order) for order in orders])
        self.nodes = np.zeros((len(orders), int(self.lengths[0])), dtype=np.int64)
        for row, order in enumerate(orders):
            self.nodes[row, : len(order)] = order
        self.limits = chain.limits_s[caps][:, :, None]
        self.origins: list[Ints] = []  #: by stage from the second: [order, cap, d]
        self.results = [Costed(float(NEVER), float(NEVER), ())] * len(orders)
        self._grow()

    def _grow(self) -> None:
        seconds = self.chain.seconds[self.nodes[:, 0]][:, None]
        fill = self.chain.last_stage(seconds, self._window(0, len(self.nodes)))
        period = np.array(np.broadcast_to(seconds, fill.shape))
        for stage in range(self.nodes.shape[1]):
            if stage:
                growing = int((self.lengths > stage).sum())
                fill, period = self._next(stage, fill[:growing], period[:growing])
            for row in np.flatnonzero(self.lengths == stage + 1):
                self.results[row] = self._finish(int(row), fill[row], period[row], stage)

    def _window(self, stage: int, rows: int) -> Ints:
        """[order, cap, d]"""
        node = self.nodes[:rows, stage]
        memory = self.chain.room(stage)[node][:, None]
        return np.maximum(self.chain.windows[self.caps[:rows], node[:, None]], memory)

    def _next(self, stage: int, fill: Singles, period: Singles) -> tuple[Singles, Singles]:
        chain, rows = self.chain, len(fill)
        after, node = self.nodes[:rows, stage - 1], self.nodes[:rows, stage]
        busy = chain.link_busy(after, node)[:, None]
        link = np.where(busy <= self.limits[:rows], chain.link_fill(after, node)[:, None], NEVER)
        seconds = chain.seconds[node][:, None]
        value, origin = extend(fill + link - seconds, self._window(stage, rows))
        self.origins.append(origin)
        alone = seconds - np.take_along_axis(np.broadcast_to(seconds, value.shape), origin, axis=-1)
        sent = np.take_along_axis(np.broadcast_to(busy, value.shape), origin, axis=-1)
        longest = np.maximum(np.take_along_axis(period, origin, axis=-1), np.maximum(alone, sent))
        return value + seconds, longest

    def _finish(self, row: int, fill: Singles, period: Singles, stage: int) -> Costed:
        step_s = fill[:, -1] + self.chain.waits * period[:, -1]
        step_s = np.where(fill[:, -1] < NEVER / 2, step_s, NEVER)
        cap = int(step_s.argmin())
        if step_s[cap] >= NEVER / 2:
            return Costed(float(NEVER), float(NEVER), ())
        places = self.chain.places([origin[row, cap] for origin in self.origins[:stage]])
        return Costed(float(step_s[cap]), float(period[cap, -1]), places)
