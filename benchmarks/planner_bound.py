"""A lower bound on the step time of any plan, from relaxations that are easy to check."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fusion.plan.cost import Problem

Floats = npt.NDArray[np.float64]
_STEPS = 100


def lower_bound_s(problem: Problem, ratio: float = 1.0) -> float:
    """Return seconds that no plan can beat, if no codec sends less than 1 / `ratio` of the bytes.

    For a bottleneck of at most t seconds: a node takes at most t seconds of the work, so the work is spread over nodes,
    and each node but two (the first and the last stage) has two links, each at least as slow as the least that crosses
    any cut over its two best links. Counting a node's links only in proportion to its share of t makes the least fill a
    fractional knapsack. Memory, skipped stages, codec time and who is whose neighbour are left out: all only add.
    """
    seconds = problem.seconds[:, -1]
    speeds, link_s, second_s = 1.0 / seconds, *_link_charges(problem, ratio)
    low, high = 1.0 / speeds.sum(), seconds.max()
    caps = np.geomspace(low * (1 + 1e-9), high, _STEPS)
    waits = problem.micro_batches - 1
    best = np.inf
    for below, cap in zip([low, *caps[:-1]], caps, strict=True):
        if below * waits < best:
            best = min(best, _least_fill(speeds, link_s, second_s, float(cap)) + waits * float(below))
    return float(min(best, seconds.min() * problem.micro_batches))


def _link_charges(problem: Problem, ratio: float) -> tuple[Floats, Floats]:
    """By node: half the time of its best link both ways plus that of its second best; and the latter alone."""
    profile, network = problem.profile, problem.network
    forward, backward = float(profile.forward_out[1:-1].min()), float(profile.backward_out[1:-1].min())
    there = network.s_per_byte * forward / ratio + network.s_per_byte.T * backward / ratio
    either = np.minimum(there, there.T) + network.delay_s + network.delay_s.T
    two = np.sort(either, axis=1)[:, :2] / 2
    return two.sum(axis=1), two[:, 1]


def _least_fill(speeds: Floats, link_s: Floats, second_s: Floats, cap: float) -> float:
    """The least of sum(t (1 + charge / cap)) with sum(speed t) = 1 and t <= cap, over all choices of the two ends."""
    count = len(speeds)
    first, second = np.triu_indices(count)
    charge = np.broadcast_to(link_s, (len(first), count)).copy()
    rows = np.arange(len(first))
    charge[rows, first] -= second_s[first]
    ends = rows[first != second]
    charge[ends, second[ends]] -= second_s[second[ends]]
    price = (1.0 + charge / cap) / speeds  # per unit of work
    order = np.argsort(price, axis=1)
    work = np.take_along_axis(np.broadcast_to(speeds * cap, price.shape), order, axis=1)
    left = np.clip(
        1.0 - np.concatenate([np.zeros((len(first), 1)), np.cumsum(work, axis=1)[:, :-1]], axis=1), 0.0, None
    )
    taken = np.minimum(work, left)
    return float((taken * np.take_along_axis(price, order, axis=1)).sum(axis=1).min())
