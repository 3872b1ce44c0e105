"""A search over ordered subsets of the nodes by simulated annealing, several chains side by side.

Moves: reverse a run, move a node, swap two, drop one, insert one, replace one. Nodes that enter are mostly taken from
the neighbours (fast, and well connected) of those beside the place. Deterministic for a seed, unless time runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fusion.plan.batch import Costed, cost_orders
from fusion.plan.chain import NEVER, Chain, Order
from fusion.plan.cost import Arrangement

_NEIGHBOURS = 12
_POLISH_FROM = 12  #: rounds; a shorter search is not polished
_CAP_STEPS = (-2, 0, 2)  #: bottlenecks tried around a chain's own
_DOUBT = 1.15  #: how much less than in the chain model a step may take, where edges skip stages
_HOT, _COLD = 0.04, 0.002  #: relative loss that is accepted with probability 1/e, at the start and at the end


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, in numbers that do not depend on the machine."""

    chains: int = 16
    rounds: int = 120
    random: int = 0  #: chains that start from random orders of all nodes


@dataclass(slots=True)
class _State:
    order: Order
    step_s: float
    cap: int


class Annealing:
    """One search in one chain model."""

    def __init__(self, chain: Chain, seed: int, effort: Effort, out_of_time: Callable[[], bool]) -> None:
        self.chain, self.effort, self.out_of_time = chain, effort, out_of_time
        self.draw = np.random.default_rng(seed)
        self.max_stages = chain.problem.max_stages
        self.exact = not chain.problem.is_chain  #: whether the chain model's time must be checked
        self.best: Arrangement | None = None
        self.best_s = float("inf")
        self._neighbours = self._find_neighbours()

    def run(self, starts: Sequence[Arrangement]) -> Arrangement | None:
        """Return the best arrangement found from `starts`, which are valid arrangements themselves."""
        if not starts:
            return None
        states = [self._start(found) for found in starts[: self.effort.chains]]
        states = [states[index % len(states)] for index in range(self.effort.chains)]
        states = [_State(state.order, state.step_s, state.cap) for state in states]
        for state in states[len(states) - self.effort.random :]:
            order = self.draw.permutation(self.chain.nodes)[: self.max_stages]
            state.order, state.step_s = tuple(order.tolist()), float("inf")
        for number in range(self.effort.rounds):
            if self.out_of_time():
                break
            heat = _HOT * (_COLD / _HOT) ** (number / self.effort.rounds)
            self._round(states, heat)
            if number % 25 == 24:
                self._share(states)
        if self.effort.rounds >= _POLISH_FROM:
            self._polish()
        return self.best

    def _start(self, found: Arrangement) -> _State:
        evaluation = self.chain.problem.evaluate(self.chain.arrange(found.nodes, found.places))
        state = _State(found.nodes, evaluation.step_s, self.chain.cap_of(evaluation.period_s))
        self.exact |= evaluation.waits or any(evaluation.recompute)
        if evaluation.step_s < self.best_s:
            self.best_s, self.best = evaluation.step_s, self.chain.arrange(found.nodes, found.places)
        return state

    def _round(self, states: list[_State], heat: float) -> None:
        orders = [self._move(state.order) for state in states]
        for state, order, found in zip(states, orders, self._cost(orders, [s.cap for s in states]), strict=True):
            allowed = state.step_s * (1.0 + heat * float(self.draw.exponential()))
            if found.step_s > allowed and not self.exact:
                continue
            step_s = self._consider(order, found, allowed)
            if step_s <= allowed:
                state.order, state.step_s, state.cap = order, step_s, self.chain.cap_of(found.period_s)

    def _cost(self, orders: Sequence[Order], caps: Sequence[int]) -> list[Costed]:
        last = len(self.chain.caps_s) - 1
        around = np.clip(np.array(caps)[:, None] + np.array(_CAP_STEPS), 0, last)
        return cost_orders(self.chain, orders, around)

    def _consider(self, order: Order, found: Costed, worth_s: float) -> float:
        """Return the step time of an order, by exact evaluation where the chain model is not exact; keep the best."""
        if found.step_s >= NEVER / 2 or (self.exact and found.step_s > worth_s * _DOUBT):
            return float("inf")
        if not self.exact and found.step_s > self.best_s * (1 + 1e-4):
            return found.step_s
        arrangement = self.chain.arrange(order, found.places)
        step_s = self.chain.problem.step_s(arrangement)
        if step_s < self.best_s:
            self.best_s, self.best = step_s, arrangement
        return step_s

    def _share(self, states: list[_State]) -> None:
        """The worst quarter of the chains goes on from where the best are."""
        states.sort(key=lambda state: state.step_s)
        part = len(states) // 4
        for good, bad in zip(states[:part], states[len(states) - part :], strict=True):
            bad.order, bad.step_s, bad.cap = good.order, good.step_s, good.cap

    # ---- moves ----

    def _find_neighbours(self) -> np.ndarray:
        """[node, k]: the nodes that would serve best beside it, by a share of the work and the link to it."""
        chain = self.chain
        share = chain.seconds[:, -1] / min(12, self.max_stages)
        out = float(np.median(chain.forward_out[1:-1])) if chain.blocks > 1 else 0.0
        back = float(np.median(chain.backward_out[1:-1])) if chain.blocks > 1 else 0.0
        cost = share[None, :] + chain.there * out + chain.back * back + np.minimum(chain.delay, 1e6)
        np.fill_diagonal(cost, np.inf)
        return np.argsort(cost, axis=1, kind="stable")[:, :_NEIGHBOURS]

    def _move(self, order: Order) -> Order:
        """Return a changed order; the same one where the drawn move is not possible."""
        kind = int(self.draw.choice(6, p=(0.1, 0.15, 0.1, 0.15, 0.25, 0.25)))
        length = len(order)
        at, other = (int(index) for index in self.draw.integers(0, length, 2))
        low, high = min(at, other), max(at, other)
        if kind == 0:
            return order[:low] + order[low : high + 1][::-1] + order[high + 1 :]
        if kind == 1:
            rest = order[:at] + order[at + 1 :]
            return rest[:other] + order[at : at + 1] + rest[other:]
        if kind == 2:
            changed = list(order)
            changed[at], changed[other] = changed[other], changed[at]
            return tuple(changed)
        if kind == 3:
            return order[:at] + order[at + 1 :] if length > 1 else order
        node = self._newcomer(order, at)
        if node < 0:
            return order
        if kind == 4 and length < self.max_stages:
            after = int(self.draw.integers(0, 2))
            return (*order[: at + after], node, *order[at + after :])
        return (*order[:at], node, *order[at + 1 :])

    def _newcomer(self, order: Order, at: int) -> int:
        if self.draw.random() < 0.8:
            beside = order[max(0, min(len(order) - 1, at + int(self.draw.integers(-1, 2))))]
            candidates = self._neighbours[beside]
            node = int(candidates[self.draw.integers(0, len(candidates))]) if len(candidates) else -1
        else:
            node = int(self.draw.integers(0, self.chain.nodes))
        return -1 if node in order else node

    # ---- the end ----

    def _polish(self) -> None:
        """Improve the best by its whole neighbourhood, until nothing helps or time is out."""
        improved = True
        while improved and self.best is not None and not self.out_of_time():
            improved = False
            evaluation = self.chain.problem.evaluate(self.best)
            cap, before = self.chain.cap_of(evaluation.period_s), self.best_s
            finer = self.chain.best_cuts(self.best.nodes, self.chain.caps_near(cap, range(-4, 3)))
            if finer is not None and (step_s := self.chain.problem.step_s(finer)) < self.best_s:
                self.best_s, self.best = step_s, finer
            orders = self._neighbourhood(self.best.nodes)
            for start in range(0, len(orders), 64):
                part = orders[start : start + 64]
                for order, found in zip(part, self._cost(part, [cap] * len(part)), strict=True):
                    self._consider(order, found, self.best_s)
                if self.out_of_time():
                    return
            improved = self.best_s < before * (1 - 1e-4)

    def _neighbourhood(self, order: Order) -> list[Order]:
        """All drops, neighbouring swaps and moves, and the entry of each node's neighbours."""
        length, found = len(order), []
        for at in range(length):
            rest = order[:at] + order[at + 1 :]
            if rest:
                found.append(rest)
            found += [rest[:to] + order[at : at + 1] + rest[to:] for to in range(at + 1, min(length, at + 4))]
            entering = [int(node) for node in self._neighbours[order[at]] if node not in order]
            for node in entering:
                found.append((*order[:at], node, *order[at + 1 :]))
                if length < self.max_stages:
                    found += [(*order[:at], node, *order[at:]), (*order[: at + 1], node, *order[at + 1 :])]
        found += [order[:low] + order[low:][::-1] for low in range(length - 1)]
        found += [order[:high][::-1] + order[high:] for high in range(2, length + 1)]
        return list(dict.fromkeys(found))
