"""How many connections a link should use, decided by what was measured with fewer and with more."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_STREAMS", "StreamCount"]

MAX_STREAMS = 8
_BUSY_S = 1.5  #: of a busy link, at least, before a rate is believed
_SETTLE_S = 1.5  #: of a busy link, at least, in which new connections come up to speed
_TRIPS = 15  #: round trips that either of both has to last: losses are felt for some of them, and a start takes ten
_GAIN = 1.1  #: so much faster the link must be to keep twice the connections
_FIRST_REST_S, _MOST_REST_S = 4.0, 300.0  #: after a doubling that did not pay: twice as long each time
_ENOUGH_BYTES_PER_S = 60e6  #: a link that carries this gains nothing that would be worth the processor time


@dataclass(slots=True)
class _Trial:
    streams: int
    before: float  #: bytes per second with fewer


class StreamCount:
    """Doubles the number of streams while each doubling pays; tries again after a while. Times are monotonic.

    The first try often comes to nothing by chance: a connection that begins on a link with losses is fast until its
    first ones, so what it did alone looks like more than it can keep up. So the next try comes soon, later ones not.
    """

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self.streams = 1
        self._most = most
        self._trial: _Trial | None = None
        self._trip_s = 0.0
        self._skip_s = _SETTLE_S
        self._busy_s = self._bytes = 0.0
        self._rest_until_s, self._rest_s = 0.0, _FIRST_REST_S

    def sample(self, count: int, seconds: float, now_s: float, trip_s: float = 0.0) -> int:
        """Take what a busy link has carried in some time; return how many streams it should use from now on.

        trip_s: its round trip, as far as it is known.
        """
        self._trip_s = trip_s
        if self._skip_s > 0:
            self._skip_s -= seconds
            return self.streams
        self._busy_s += seconds
        self._bytes += count
        if self._busy_s >= max(_BUSY_S, _TRIPS * trip_s):
            self._decide(self._bytes / self._busy_s, now_s)
        return self.streams

    def restart(self) -> None:
        """The streams broke and begin anew, with as many as before."""
        self._fresh(self._settle_s)

    @property
    def _settle_s(self) -> float:
        return max(_SETTLE_S, _TRIPS * self._trip_s)

    def _fresh(self, skip_s: float) -> None:
        self._busy_s = self._bytes = 0.0
        self._skip_s = skip_s

    def _decide(self, rate: float, now_s: float) -> None:
        trial, self._trial = self._trial, None
        if trial is not None and rate < _GAIN * trial.before:
            self.streams //= 2
            self._rest_until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        elif now_s >= self._rest_until_s and 2 * self.streams <= self._most and rate < _ENOUGH_BYTES_PER_S:
            self._trial = _Trial(2 * self.streams, rate)
            self.streams *= 2
        self._fresh(self._settle_s if self._trial is not None else 0.0)
