"""Clocks of several machines on one line, from pairs of messages; none of them is trusted, nor set.

A message that leaves A at a (A's clock), is answered at b (B's clock), and whose answer is back at a' says that B's
clock is ahead of A's by between b - a' and b - a. Many such pairs narrow it down (Cristian 1989, Marzullo 1984).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

__all__ = ["ClockBook", "Offset", "offsets_to"]

_KEPT = 64  #: pairs; clocks drift by some milliseconds in the time of many


@dataclass(frozen=True, slots=True)
class Offset:
    """How far another clock is ahead."""

    offset_s: float
    error_s: float  #: at most


class ClockBook:
    """What the last pairs of messages say of one other clock."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_KEPT)  #: least and most that it is ahead

    def pair(self, left_s: float, answered_s: float, back_s: float) -> None:
        """Note a message that left and whose answer came back by our clock, and was answered by the other one."""
        self._pairs.append((answered_s - back_s, answered_s - left_s))

    def offset(self) -> Offset | None:
        """Return the other clock's offset; None before the first pair."""
        if not self._pairs:
            return None
        pairs = list(self._pairs)  # in one go: another thread may add to them meanwhile
        least, most = max(low for low, _ in pairs), min(high for _, high in pairs)
        if least > most:  # a clock has drifted: the closest pair counts alone
            least, most = min(pairs, key=lambda pair: pair[1] - pair[0])
        return Offset((least + most) / 2, (most - least) / 2)


def offsets_to(root: int, found: Mapping[tuple[int, int], Offset]) -> dict[int, Offset]:
    """Return by clock how far it is ahead of `root`'s, along the pairs with the least error.

    found: by (a, b), how far b's clock is ahead of a's as a found it. Clocks without a way to the root are left out.
    """
    edges: dict[int, dict[int, Offset]] = {}
    for (a, b), offset in found.items():
        back = found.get((b, a))
        both = _both(offset, None if back is None else Offset(-back.offset_s, back.error_s))
        edges.setdefault(a, {})[b] = both
        edges.setdefault(b, {})[a] = Offset(-both.offset_s, both.error_s)
    known: dict[int, Offset] = {}
    waiting: list[tuple[float, int, float]] = [(0.0, root, 0.0)]
    while waiting:
        error_s, clock, offset_s = heappop(waiting)
        if clock in known:
            continue
        known[clock] = Offset(offset_s, error_s)
        for other, step in edges.get(clock, {}).items():
            if other not in known:
                heappush(waiting, (error_s + step.error_s, other, offset_s + step.offset_s))
    return known


def _both(one: Offset, other: Offset | None) -> Offset:
    """Return what two findings of the same offset say together; where they contradict each other, the closer one."""
    if other is None:
        return one
    low = max(one.offset_s - one.error_s, other.offset_s - other.error_s)
    high = min(one.offset_s + one.error_s, other.offset_s + other.error_s)
    if low > high:
        return min(one, other, key=lambda item: item.error_s)
    return Offset((low + high) / 2, (high - low) / 2)
