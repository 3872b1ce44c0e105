"""Codecs of a plan's links: as few and as mild as the time allows; and the paper's AdaTopK for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np

from fusion.plan.codecs import NONE, Compression, PlanCodec, adatopk_ratio, topk
from fusion.plan.cost import Arrangement, Problem

SLACK = 1.05  #: a milder codec is worth this much time
_FORWARD_WEIGHT = 2.0  #: losing precision forward costs more of the loss than backward


def relax(problem: Problem, arrangement: Arrangement, ladder: Sequence[PlanCodec], limit_s: float) -> Arrangement:
    """Lower each link's codec as far as the step stays within `limit_s`.

    Links that cost least time without a codec come first, forward ones before backward ones.
    """
    stages = len(arrangement.nodes)
    codecs = tuple(ladder)
    choice = np.zeros((stages, stages), dtype=np.int64)
    raw = problem.evaluate(arrangement).raw_bytes
    used = [(int(source), int(target)) for source, target in np.argwhere(raw > 0)]
    for source, target in used:
        choice[source, target] = codecs.index(arrangement.codec(source, target))
    compressed = [pair for pair in used if choice[pair]]
    prices = {pair: _price(problem, arrangement, codecs, choice, pair) for pair in compressed}
    for pair in sorted(compressed, key=lambda pair: (pair[0] > pair[1], prices[pair], pair)):
        for milder in range(int(choice[pair])):
            before = int(choice[pair])
            choice[pair] = milder
            if problem.step_s(_with(arrangement, codecs, choice)) <= limit_s:
                break
            choice[pair] = before
    return _with(arrangement, codecs, choice.copy())


def _price(
    problem: Problem, arrangement: Arrangement, codecs: tuple[PlanCodec, ...], choice: np.ndarray, pair: tuple[int, int]
) -> float:
    changed = choice.copy()
    changed[pair] = 0
    return problem.step_s(_with(arrangement, codecs, changed))


def _with(arrangement: Arrangement, codecs: tuple[PlanCodec, ...], choice: np.ndarray) -> Arrangement:
    return Arrangement(arrangement.nodes, arrangement.places, codecs, choice)


def strength(problem: Problem, arrangement: Arrangement) -> float:
    """Return how much the codecs of a plan take away: bits of the ratio over all links, forward ones counted double."""
    raw = problem.evaluate(arrangement).raw_bytes
    total = 0.0
    for source, target in np.argwhere(raw > 0):
        weight = _FORWARD_WEIGHT if source < target else 1.0
        total += weight * log2(arrangement.codec(int(source), int(target)).ratio)
    return total


def with_topk(problem: Problem, arrangement: Arrangement, wanted: Compression) -> Arrangement:
    """Return the arrangement with uniform top-k or with AdaTopK on its links."""
    if wanted.kind == "topk":
        return Arrangement(arrangement.nodes, arrangement.places, (topk(wanted.ratio),))
    plain = problem.evaluate(Arrangement(arrangement.nodes, arrangement.places))
    link_s = np.where(plain.raw_bytes > 0, plain.transfer_s, 0.0)
    slowest_s = float(link_s.max(initial=0.0))
    ladder, choice = [NONE], np.zeros(link_s.shape, dtype=np.int64)
    for source, target in np.argwhere(link_s > 0):
        codec = topk(adatopk_ratio(wanted.ratio, float(link_s[source, target]), slowest_s))
        if codec is not NONE:
            choice[source, target] = len(ladder)
            ladder.append(codec)
    return Arrangement(arrangement.nodes, arrangement.places, tuple(ladder), choice)
