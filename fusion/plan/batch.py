"""Many orders of nodes at once: the dynamic program over their cuts, vectorised across orders and bottlenecks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.plan.chain import NEVER, Chain, Ints, Singles, extend

Order = tuple[int, ...]


@dataclass(frozen=True)
class Costed:
    """The best cuts of one order in the chain model."""

    step_s: float  #: at least 1e11 where there are none
    period_s: float
    places: tuple[int, ...]


def cost_orders(chain: Chain, orders: Sequence[Order], caps: npt.NDArray[np.int64]) -> list[Costed]:
    """Return the best cuts of every order, under the bottlenecks caps[order, :] of the chain's grid."""
    ranked = sorted(range(len(orders)), key=lambda index: -len(orders[index]))
    run = _Run(chain, [orders[index] for index in ranked], caps[ranked])
    found: list[Costed | None] = [None] * len(orders)
    for row, index in enumerate(ranked):
        found[index] = run.results[row]
    return [item for item in found if item is not None]


class _Run:
    """Orders are sorted by falling length, so that those still growing are always the first rows."""

    def __init__(self, chain: Chain, orders: Sequence[Order], caps: Ints) -> None:
        self.chain, self.caps = chain, caps
        self.lengths = np.array([len(order) for order in orders])
        self.nodes = np.zeros((len(orders), int(self.lengths[0])), dtype=np.int64)
        for row, order in enumerate(orders):
            self.nodes[row, : len(order)] = order
        self.limits = chain.limits_s[caps][:, :, None]
        self.origins: list[Ints] = []  #: by stage from the second: [order, cap, place]
        self.results: list[Costed | None] = [None] * len(orders)
        self._grow()

    def _grow(self) -> None:
        chain = self.chain
        fill, period = chain.first_stage(self.nodes[:, :1], chain.windows[self.caps, self.nodes[:, :1]])
        period = np.array(period)
        for stage in range(self.nodes.shape[1]):
            if stage:
                growing = int((self.lengths > stage).sum())
                fill, period = self._next(stage, fill[:growing], period[:growing])
            for row in np.flatnonzero(self.lengths == stage + 1):
                self.results[row] = self._finish(int(row), fill[row], period[row], stage)

    def _next(self, stage: int, fill: Singles, period: Singles) -> tuple[Singles, Singles]:
        chain, rows = self.chain, len(fill)
        before, node = self.nodes[:rows, stage - 1], self.nodes[:rows, stage]
        busy = chain.link_busy(before, node)[:, None]
        link = np.where(busy <= self.limits[:rows], chain.link_fill(before, node)[:, None], NEVER)
        seconds = chain.seconds[node][:, None]
        value, origin = extend(fill + link - seconds, chain.windows[self.caps[:rows], node[:, None]])
        self.origins.append(origin)
        alone = seconds - np.take_along_axis(np.broadcast_to(seconds, value.shape), origin, axis=-1)
        sent = np.take_along_axis(np.broadcast_to(busy, value.shape), origin, axis=-1)
        longest = np.maximum(np.take_along_axis(period, origin, axis=-1), np.maximum(alone, sent))
        return value + seconds, longest

    def _finish(self, row: int, fill: Singles, period: Singles, stage: int) -> Costed:
        step_s = fill[:, -1] + self.chain.waits * period[:, -1]
        step_s = np.where(fill[:, -1] < NEVER / 2, step_s, NEVER)
        cap = int(step_s.argmin())
        places = [self.chain.blocks]
        if step_s[cap] < NEVER / 2:
            for origin in reversed(self.origins[:stage]):
                places.append(int(origin[row, cap, places[-1]]))
        return Costed(float(step_s[cap]), float(period[cap, -1]), (0, *reversed(places)))
