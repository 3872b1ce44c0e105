"""The optimum for at most a dozen nodes, as a reference: a dynamic program over sets of nodes.

Its state is (nodes used, first node, depth), from the end of the graph to its front; it finds the least fill below a
bottleneck. The least of fill + (n - 1) x bottleneck is then found by halving intervals of the bottleneck whose lower
bound still beats the best: the result is within `TOLERANCE` of the optimum of the chain model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from fusion.base.errors import PlanError
from fusion.plan.chain import NEVER, Chain, Ints, Singles, extend
from fusion.plan.cost import Arrangement

MAX_NODES = 12
TOLERANCE = 1e-3


def exact_plan(chain: Chain, out_of_time: Callable[[], bool]) -> Arrangement | None:
    """Return the best plan, or None if none is possible; PlanError for more than MAX_NODES nodes."""
    if chain.nodes > MAX_NODES:
        raise PlanError(f"method exact takes at most {MAX_NODES} nodes, the cluster has {chain.nodes}; use fusion")
    return _Exact(chain, out_of_time).run()


class _Exact:
    """The search over bottlenecks."""

    def __init__(self, chain: Chain, out_of_time: Callable[[], bool]) -> None:
        self.chain, self.out_of_time = chain, out_of_time
        self.waits = chain.problem.micro_batches - 1
        self.best: Arrangement | None = None
        self.best_s = float("inf")
        self.model_s = float("inf")  #: the best in the chain model, where memory makes nothing wait

    def run(self) -> Arrangement | None:
        low, high = float(self.chain.caps_s[0]) * (1 - 1e-6), float(self.chain.caps_s[-1])
        pending = [(low, high, self._fill(high))]
        while pending and not self.out_of_time():
            low, high, fill_s = pending.pop()
            # a plan with its bottleneck in (low, high] takes at least this
            if fill_s + self.waits * low >= self.model_s * (1 - TOLERANCE):
                continue
            middle = (low + high) / 2
            if high - low > TOLERANCE / 4 * high:
                pending += [(middle, high, fill_s), (low, middle, self._fill(middle))]
        return self.best

    def _fill(self, cap_s: float) -> float:
        """Return the least fill below a bottleneck, and keep that plan if it is the best."""
        found = _Sets(self.chain, cap_s).best()
        if found is None:
            return float("inf")
        fill_s, order, places = found
        arrangement = self.chain.arrange(order, places)
        evaluation = self.chain.problem.evaluate(arrangement)
        self.model_s = min(self.model_s, fill_s + self.waits * evaluation.busiest_s)
        if evaluation.step_s < self.best_s:
            self.best_s, self.best = evaluation.step_s, arrangement
        return fill_s


class _Sets:
    """The dynamic program below one bottleneck. Sets of nodes are bit masks; layers are sets of one size."""

    def __init__(self, chain: Chain, cap_s: float) -> None:
        self.chain, self.window = chain, chain.window_at(cap_s)
        pair = np.ix_(np.arange(chain.nodes), np.arange(chain.nodes))
        limit = np.float32(cap_s * (1 + 1e-6))
        self.link = np.where(chain.link_busy(*pair) <= limit, chain.link_fill(*pair), NEVER)  # [p, q, d]
        shape = (1 << chain.nodes, chain.nodes, chain.blocks + 1)
        self.fill = np.full(shape, NEVER, dtype=np.float32)  # [set, q, d]
        self.behind = np.zeros(shape, dtype=np.int8)  # the node of the stage behind
        self.depth = np.zeros(shape, dtype=np.int16)  # its depth

    def best(self) -> tuple[float, tuple[int, ...], tuple[int, ...]] | None:
        """Return fill, nodes and places of the best plan."""
        chain = self.chain
        last = chain.last_stage(chain.seconds, np.maximum(self.window, chain.room(0)))
        for node in range(chain.nodes):
            self.fill[1 << node, node] = last[node]
        for size in range(2, min(chain.nodes, chain.problem.max_stages) + 1):
            sets = np.array([sum(1 << node for node in chosen) for chosen in combinations(range(chain.nodes), size)])
            window = np.maximum(self.window, chain.room(size - 1))
            for node in range(chain.nodes):
                self._enter(sets[(sets >> node) & 1 == 1], node, window[node])
        ends = self.fill[:, :, -1]
        at = int(ends.argmin())
        if ends.flat[at] >= NEVER / 2:
            return None
        return float(ends.flat[at]), *self._follow(at // chain.nodes, at % chain.nodes)

    def _enter(self, sets: Ints, node: int, window: Ints) -> None:
        """Let `node` be the first of each of these sets, all of which hold it."""
        without = sets ^ (1 << node)
        reach: Singles = self.fill[without] + self.link[:, node]  # [set, p, d]
        behind = reach.argmin(axis=1)
        start = np.take_along_axis(reach, behind[:, None], axis=1)[:, 0]
        seconds = self.chain.seconds[node]
        value, origin = extend(start - seconds, np.broadcast_to(window, start.shape))
        self.fill[sets, node] = np.minimum(value + seconds, NEVER)
        self.depth[sets, node] = origin
        self.behind[sets, node] = np.take_along_axis(behind, origin, axis=1)

    def _follow(self, nodes: int, first: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        depth, order, places = self.chain.blocks, [first], [0]
        while nodes != 1 << first:
            behind, before = int(self.behind[nodes, first, depth]), int(self.depth[nodes, first, depth])
            nodes, first, depth = nodes ^ (1 << first), behind, before
            order.append(first)
            places.append(self.chain.blocks - depth)
        return tuple(order), (*places, self.chain.blocks)
