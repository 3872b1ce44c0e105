"""A first plan: stage by stage, over all nodes at once.

A dynamic program whose state is (last node, place) keeps one best way to each state and remembers the nodes on it, so
that none is used twice. That loses some optima, where the best way to a state uses a node that is wanted later, and
keeps the work at stages x nodes^2 x places.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fusion.plan.chain import NEVER, Chain, Ints, Singles, extend
from fusion.plan.cost import Arrangement

_COARSE, _FINE = 6, 2  #: steps in the grid of bottlenecks
_PATIENCE = 3  #: stages more without an improvement


def layered_plan(chain: Chain, out_of_time: Callable[[], bool], below_s: float = np.inf) -> Arrangement | None:
    """Return the best plan over a search of the bottleneck, if there is one that takes less than `below_s`."""
    best: tuple[float, int, Arrangement | None] = (below_s, 0, None)
    tried: set[int] = set()
    for step in (_COARSE, _FINE):
        centre, reach = (0, len(chain.caps_s)) if best[2] is None else (best[1], _COARSE)
        for cap in range(max(0, centre - reach), min(len(chain.caps_s), centre + reach), step):
            if cap in tried or out_of_time():
                continue
            tried.add(cap)
            order = _Layers(chain, cap, best[0]).order()
            if order is None:
                continue
            found = chain.best_cuts(order, chain.caps_near(cap, (-1, 0)))
            step_s = np.inf if found is None else chain.problem.step_s(found)
            if step_s < best[0]:
                best = (step_s, cap, found)
    return best[2]


class _Layers:
    """The dynamic program below one bottleneck."""

    def __init__(self, chain: Chain, cap: int, best_s: float) -> None:
        self.chain, self.window = chain, chain.window(cap)
        self.most_s = np.float32(min(best_s - (chain.problem.micro_batches - 1) * chain.caps_s[cap] * 0.9, NEVER / 2))
        nodes = np.arange(chain.nodes)
        pair = np.ix_(nodes, nodes)
        busy = chain.link_busy(*pair)
        self.link = np.where(busy <= chain.limits_s[cap], chain.link_fill(*pair), NEVER).transpose(0, 2, 1).copy()
        self.rest = chain.seconds[:, -1:] - chain.seconds
        self.rest = self.rest.min(axis=0)  #: by place: what is left takes at least this
        self.origins: list[tuple[Ints, Ints]] = []  #: by stage from the second: (node, place) before, [node, place]

    def order(self) -> list[int] | None:
        """Return the nodes of the best way, if there is one."""
        chain = self.chain
        nodes = np.arange(chain.nodes)
        fill, _ = chain.first_stage(nodes, self.window)
        used = np.zeros((chain.nodes, chain.blocks + 1, chain.nodes), dtype=bool)
        used[nodes, :, nodes] = True
        best_s, best_end, best_stage = self.most_s, -1, 0
        for stage in range(chain.problem.max_stages):
            if stage:
                fill, used = self._next(fill, used)
            last = int(fill[:, -1].argmin())
            if fill[last, -1] < best_s:
                best_s, best_end, best_stage = fill[last, -1], last, stage
            fill = np.where(fill + self.rest < best_s, fill, NEVER)
            if (best_end >= 0 and stage > best_stage + _PATIENCE) or fill.min() >= NEVER / 2:
                break
        return None if best_end < 0 else self._back(best_end, best_stage)

    def _next(self, fill: Singles, used: npt.NDArray[np.bool_]) -> tuple[Singles, npt.NDArray[np.bool_]]:
        chain = self.chain
        alive = np.flatnonzero(fill.min(axis=1) < NEVER / 2)  # the last nodes so far
        reach = self.link[alive] + fill[alive][:, :, None]
        reach[used[alive]] = NEVER  # [p, place, q]
        before = reach.argmin(axis=0)  # [place, q]
        start = np.take_along_axis(reach, before[None], axis=0)[0].T  # [q, place]
        value, place = extend(start - chain.seconds, self.window)
        nodes = np.arange(chain.nodes)[:, None]
        node = alive[before[place, nodes]]
        self.origins.append((node, place))
        after = used[node, place]
        after[nodes[:, 0], :, nodes[:, 0]] = True
        return value + chain.seconds, after

    def _back(self, node: int, stage: int) -> list[int]:
        place, order = self.chain.blocks, [node]
        for nodes, places in reversed(self.origins[:stage]):
            node, place = int(nodes[node, place]), int(places[node, place])
            order.append(node)
        return order[::-1]
