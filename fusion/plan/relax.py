"""Codecs of a plan's links: as few and as mild as the time allows; and the paper's AdaTopK for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2

import numpy as np

from fusion.compress.catalog import adatopk_on_link
from fusion.plan.codecs import NONE, Ladder, plan_codec
from fusion.plan.cost import Arrangement, Ints, Problem

SLACK = 1.05  #: a milder codec is worth this much time
_FORWARD_WEIGHT = 2.0  #: losing precision forward costs more of the loss than backward


def relax(problem: Problem, arrangement: Arrangement, ladder: Ladder, limit_s: float) -> Arrangement:
    """Lower each link's codec as far as the step stays within `limit_s`.

    Links that cost least time without a codec come first, forward ones before backward ones.
    """
    raw = problem.evaluate(arrangement).raw_bytes
    levels = np.zeros(raw.shape, dtype=np.int64)
    used = [(int(source), int(target)) for source, target in np.argwhere(raw > 0)]
    for source, target in used:
        codecs = ladder.forward if source < target else ladder.backward
        levels[source, target] = codecs.index(arrangement.codec(source, target))
    compressed = [pair for pair in used if levels[pair]]
    prices = {
        pair: problem.step_s(_with(arrangement, ladder, _lowered(levels, ladder, pair, 0))) for pair in compressed
    }
    for pair in sorted(compressed, key=lambda pair: (pair[0] > pair[1], prices[pair], pair)):
        for milder in range(int(levels[pair])):
            lowered = _lowered(levels, ladder, pair, milder)
            if problem.step_s(_with(arrangement, ladder, lowered)) <= limit_s:
                levels = lowered
                break
    return _with(arrangement, ladder, levels)


def _lowered(levels: Ints, ladder: Ladder, pair: tuple[int, int], level: int) -> Ints:
    """Return the levels with one changed, and the one of the way back with it where the two go together."""
    changed = levels.copy()
    back = pair[::-1]
    if ladder.joined[level] or ladder.joined[int(levels[back])]:
        changed[back] = level
    changed[pair] = level
    return changed


def _with(arrangement: Arrangement, ladder: Ladder, levels: Ints) -> Arrangement:
    choice = np.triu(levels) + np.tril(levels + len(ladder), -1)
    return replace(arrangement, ladder=ladder.both, choice=choice)


def strength(problem: Problem, arrangement: Arrangement) -> float:
    """Return how much the codecs of a plan take away: bits of the ratio over all links, forward ones counted double."""
    raw = problem.evaluate(arrangement).raw_bytes
    total = 0.0
    for source, target in np.argwhere(raw > 0):
        weight = _FORWARD_WEIGHT if source < target else 1.0
        total += weight * log2(arrangement.codec(int(source), int(target)).ratio)
    return total


def mildest(
    problem: Problem, arrangements: Sequence[Arrangement], seconds: Callable[[Arrangement], float]
) -> Arrangement:
    """Return of all that stay within SLACK of the fastest the one whose codecs take away least.

    So the first one, if it has none, is never given up for one that is slower.
    """
    times = {id(one): seconds(one) for one in arrangements}
    limit_s = SLACK * min(times.values())
    within = [one for one in arrangements if times[id(one)] <= limit_s]
    return min(within, key=lambda one: (round(strength(problem, one), 6), times[id(one)]))


def with_adatopk(problem: Problem, arrangement: Arrangement, ratio: float) -> Arrangement:
    """Return the arrangement with AdaTopK on its links."""
    plain = problem.evaluate(Arrangement(arrangement.nodes, arrangement.places))
    link_s = np.where(plain.raw_bytes > 0, plain.transfer_s, 0.0)
    slowest_s = float(link_s.max(initial=0.0))
    ladder, choice = [NONE], np.zeros(link_s.shape, dtype=np.int64)
    for source, target in np.argwhere(link_s > 0):
        codec = plan_codec(adatopk_on_link(ratio, float(link_s[source, target]), slowest_s))
        if codec != NONE:
            choice[source, target] = len(ladder)
            ladder.append(codec)
    return replace(arrangement, ladder=tuple(ladder), choice=choice)
