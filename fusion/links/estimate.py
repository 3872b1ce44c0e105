"""Figures of one directed link from noisy samples, each of which may have met a busy moment.

What disturbs a measurement mostly makes it slower; a reader that comes late to its buffer sees it too fast. So goodput
is the upper median of the last samples, and the round trip the shortest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log2

from fusion.base.units import KIB

RATES_KEPT = 5
ROUND_TRIPS_KEPT = 3  #: each is the shortest of several already
LEAST_TRANSFER_BYTES = 48 * KIB  #: less says little of a rate
LEAST_BUSY_S = 0.005  #: a shorter transfer shows only what the link can do at least
_SMALL_BYTES = 48 * KIB  #: timed of one message; with less its delay counts for more than the link's rate
_FIRST_FLIGHT_BYTES = 14 * KIB  #: that a TCP connection sends before it has heard anything
_LEAST_HALF_S = 0.02  #: what comes within less may have waited in a buffer


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """A directed link as far as it is known."""

    rate_bytes_per_s: float  #: goodput
    round_trip_s: float


def goodput(arrivals: Sequence[tuple[float, int]]) -> float:
    """Return bytes per second of a burst as its receiver saw it: (seconds, bytes) of each piece, in order.

    The first piece only starts the clock. The second half counts alone where it was faster, because a connection takes
    a while to come up to speed. 0 where there are not two pieces with time between them.
    """
    if len(arrivals) < 2 or arrivals[-1][0] <= arrivals[0][0]:
        return 0.0
    whole = _rate(arrivals)
    half = arrivals[len(arrivals) // 2 :]
    if len(half) < 2 or half[-1][0] - half[0][0] < _LEAST_HALF_S:
        return whole
    return max(whole, _rate(half))


def _rate(arrivals: Sequence[tuple[float, int]]) -> float:
    return sum(count for _, count in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0])


def most_rate(count: int, elapsed_s: float, round_trip_s: float) -> float:
    """Return the most bytes per second that `count` bytes can have had, which took `elapsed_s` from the request on.

    A receiver that was kept from reading finds all of it in its buffers, and `goodput` is far too high; but the whole
    took as long as it took. Round trips do not count: one for the request, and those in which a connection doubles
    what it dares to send. inf where nothing is left of the time.
    """
    doublings = max(0.0, log2(max(count, 1) / _FIRST_FLIGHT_BYTES))
    left_s = elapsed_s - (1.0 + doublings) * round_trip_s
    return count / left_s if left_s > 0 else inf


def small_messages(count: int, messages: int) -> bool:
    """Whether `count` bytes in so many messages (0: unknown) say little of a link's rate."""
    return messages > 0 and count < messages * _SMALL_BYTES


def robust_rate(samples: Sequence[float]) -> float:
    """Return the upper median: of two samples the higher.

    One slow sample changes nothing; neither does one fast one of three or more; and a link that has become slower, or
    faster, is found out after three samples.
    """
    return sorted(samples, reverse=True)[(len(samples) - 1) // 2]


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """All that is remembered of one directed link, and of dialling along it. Every change makes a new record."""

    rates: tuple[float, ...] = ()  #: the last ones, oldest first
    round_trips_s: tuple[float, ...] = ()
    probe_bytes: int = 0  #: of the last probe of its goodput
    probed_bytes_per_s: float = 0.0  #: what that one found; 0: there was none
    loaded: bool = False  #: whether the last sample came from real transfers
    measured_s: float = 0.0  #: when its goodput was last measured, in whichever way
    dialled_s: float | None = None  #: when the source last dialled the target
    failures: int = 0  #: of dialling, in a row
    reason: str = ""  #: of the last failure
    relayed: bool = False  #: whether the source reaches the target only through the coordinator's relay

    @property
    def rate_bytes_per_s(self) -> float:
        """Goodput; 0 where nothing was measured."""
        return robust_rate(self.rates) if self.rates else 0.0

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of the last round trips."""
        return min(self.round_trips_s, default=None)

    @property
    def estimate(self) -> LinkEstimate | None:
        """Both figures, where both are known."""
        if not self.rates or not self.round_trips_s:
            return None
        return LinkEstimate(self.rate_bytes_per_s, min(self.round_trips_s))

    @property
    def absent(self) -> bool:
        """Whether the source cannot connect to the target: it failed twice in a row, or the only time it tried."""
        return self.failures >= 2 or (self.failures > 0 and not self.round_trips_s)

    @property
    def direct(self) -> bool:
        """Whether the source has dialled the target itself the last time that it tried."""
        return self.dialled_s is not None and not self.failures and not self.relayed

    def with_rate(self, rate_bytes_per_s: float, now_s: float, probe_bytes: int | None = None) -> LinkRecord:
        """Return the record with one more sample of the goodput: from a probe of `probe_bytes`, or from transfers."""
        rates = (*self.rates, rate_bytes_per_s)[-RATES_KEPT:]
        if probe_bytes is None:
            return replace(self, rates=rates, measured_s=now_s, loaded=True)
        return replace(
            self,
            rates=rates,
            measured_s=now_s,
            probe_bytes=probe_bytes,
            probed_bytes_per_s=rate_bytes_per_s,
            loaded=False,
        )

    def with_round_trip(self, round_trip_s: float) -> LinkRecord:
        """Return the record with one more round trip."""
        return replace(self, round_trips_s=(*self.round_trips_s, round_trip_s)[-ROUND_TRIPS_KEPT:])

    def with_transfer(self, count: int, busy_s: float, now_s: float, messages: int = 0) -> LinkRecord:
        """Return the record after a real transfer of `count` bytes during which the receiver was busy for `busy_s`.

        messages: how many it were; 0: large ones. Small ones are under way in the round trips in which a connection
        comes up to speed, so they only say between which bounds the rate is. What is known stays where it is between.
        """
        if count < LEAST_TRANSFER_BYTES or busy_s < 0:
            return self
        rate = count / max(busy_s, LEAST_BUSY_S)
        if small_messages(count, messages):
            return self._within(rate, self._most(count, busy_s, messages), now_s)
        if busy_s < LEAST_BUSY_S and rate <= self.rate_bytes_per_s:
            return self
        return self.with_rate(rate, now_s)

    def _within(self, least: float, most: float, now_s: float) -> LinkRecord:
        if not self.rates or least <= self.rate_bytes_per_s <= most:
            return self
        return self.with_rate(least if self.rate_bytes_per_s < least else most, now_s)

    def _most(self, count: int, busy_s: float, messages: int) -> float:
        """Return the most that a link can carry per second on which small messages took so long."""
        if self.round_trip_s is None:
            return inf
        doublings = log2(1 + count / messages / _FIRST_FLIGHT_BYTES)
        left_s = busy_s - messages * doublings * self.round_trip_s
        return count / left_s if left_s > 0 else inf

    def dialled(self, now_s: float, *, relayed: bool = False) -> LinkRecord:
        """Return the record after the target has answered, itself or through the relay."""
        return replace(self, dialled_s=now_s, failures=0, reason="", relayed=relayed)

    def without_figures(self) -> LinkRecord:
        """Return the record without what was measured: it was along another way."""
        return LinkRecord(dialled_s=self.dialled_s, failures=self.failures, reason=self.reason, relayed=self.relayed)

    def refused(self, reason: str, now_s: float) -> LinkRecord:
        """Return the record after the target could not be reached."""
        return replace(self, dialled_s=now_s, failures=self.failures + 1, reason=reason)
