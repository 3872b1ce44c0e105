"""A first plan: stage by stage from the end of the graph, over all nodes at once.

A dynamic program whose state is (first node, depth) keeps one best way to each state and remembers the nodes on it, so
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


def layered_plans(chain: Chain, out_of_time: Callable[[], bool], below_s: float = np.inf) -> list[Arrangement]:
    """Return the plans found by a search of the bottleneck, the best first; each when found was the best so far.

    Plans that take `below_s` or longer are not looked for.
    """
    found: list[tuple[float, int, Arrangement]] = []  #: the best last
    tried: set[int] = set()
    for step in (_COARSE, _FINE):
        last = len(chain.caps_s) - 1
        centre, reach = (found[-1][1], _COARSE) if found else (last, last)
        for cap in range(max(centre - reach, centre % step), min(last, centre + reach) + 1, step):
            if cap in tried or out_of_time():
                continue
            tried.add(cap)
            best_s = found[-1][0] if found else below_s
            order = _Layers(chain, cap, best_s).order()
            plan = None if order is None else chain.best_cuts(order, chain.caps_near(cap, (-1, 0)))
            if plan is not None and (step_s := chain.problem.step_s(plan)) < best_s:
                found.append((step_s, cap, plan))
    return [plan for _, _, plan in reversed(found)]


class _Layers:
    """The dynamic program below one bottleneck. A stage's node is q, that of the stage behind it p."""

    def __init__(self, chain: Chain, cap: int, best_s: float) -> None:
        self.chain, self.window = chain, chain.windows[cap]
        self.most_s = np.float32(min(best_s - (chain.problem.micro_batches - 1) * chain.caps_s[cap] * 0.9, NEVER / 2))
        fill, busy = chain.all_links
        self.link = np.where(busy <= chain.limits_s[cap], fill, NEVER)
        self.rest: Singles = (chain.seconds[:, -1:] - chain.seconds).min(axis=0)  #: [d]: what is left takes so long
        self.origins: list[tuple[Ints, Ints]] = []  #: by stage from the second: (p, its depth), [q, d]

    def order(self) -> list[int] | None:
        """Return the nodes of the best way from the first stage to the last, if there is one."""
        chain = self.chain
        nodes = np.arange(chain.nodes)
        fill = chain.last_stage(chain.seconds, np.maximum(self.window, chain.room(0)))
        used = np.zeros((chain.nodes, chain.blocks + 1, chain.nodes), dtype=bool)
        used[nodes, :, nodes] = True
        best_s, best_front, best_stage = self.most_s, -1, 0
        for stage in range(chain.problem.max_stages):
            if stage:
                fill, used = self._next(stage, fill, used)
            front = int(fill[:, -1].argmin())
            if fill[front, -1] < best_s:
                best_s, best_front, best_stage = fill[front, -1], front, stage
            fill = np.where(fill + self.rest < best_s, fill, NEVER)
            if (best_front >= 0 and stage > best_stage + _PATIENCE) or fill.min() >= NEVER / 2:
                break
        return None if best_front < 0 else self._follow(best_front, best_stage)

    def _next(self, stage: int, fill: Singles, used: npt.NDArray[np.bool_]) -> tuple[Singles, npt.NDArray[np.bool_]]:
        chain = self.chain
        alive = np.flatnonzero(fill.min(axis=1) < NEVER / 2)
        reach = self.link[alive] + fill[alive][:, :, None]
        reach[used[alive]] = NEVER  # [p, d, q]
        behind = reach.argmin(axis=0)  # [d, q]
        start = np.take_along_axis(reach, behind[None], axis=0)[0].T  # [q, d]
        value, depth = extend(start - chain.seconds, np.maximum(self.window, chain.room(stage)))
        nodes = np.arange(chain.nodes)[:, None]
        node = alive[behind[depth, nodes]]
        self.origins.append((node, depth))
        after = used[node, depth]
        after[nodes[:, 0], :, nodes[:, 0]] = True
        return value + chain.seconds, after

    def _follow(self, node: int, stage: int) -> list[int]:
        depth, order = self.chain.blocks, [node]
        for nodes, depths in reversed(self.origins[:stage]):
            node, depth = int(nodes[node, depth]), int(depths[node, depth])
            order.append(node)
        return order
