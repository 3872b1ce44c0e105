"""How fast a link takes what is sent, from the receiver's acknowledgements; and what follows from that."""

from __future__ import annotations

from collections import deque

from fusion.base.units import KIB, MIB

__all__ = ["Goodput"]

_WINDOW_S = 0.1
_LEAST_WINDOW_S = 0.02
_WINDOWS = 10
_TRIPS = 64
_SMALL_BYTES = 16 * KIB  #: payloads that take no time beside a round trip
_CHUNK_S = 0.02  #: an urgent message waits for at most so much of a bulk one that has been handed over
_FIRST_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 128 * KIB, 16 * KIB
_UNSENT_S = 0.05
_LEAST_UNSENT_BYTES, _MOST_UNSENT_BYTES = 64 * KIB, 4 * MIB


class Goodput:
    """The rate of one directed link while it is busy: the best of its last windows. Times are monotonic."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOWS)
        self._began: tuple[float, int] | None = None  # of the window: seconds, bytes acknowledged
        self._trips_s: deque[float] = deque(maxlen=_TRIPS)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; 0 while nothing is known."""
        return max(list(self._rates), default=0.0)  # a copy: another thread may add to them meanwhile

    @property
    def trip_s(self) -> float:
        """The shortest round trip of late; 0 while nothing is known."""
        return min(list(self._trips_s), default=0.0)

    @property
    def path_bytes(self) -> int:
        """Bytes that the path holds, the round trip times the rate; 0 while nothing is known."""
        return int(self.bytes_per_s * self.trip_s)

    def travelled(self, size: int, seconds: float) -> None:
        """Note that a message of `size` bytes was acknowledged so long after it was announced."""
        rate = self.bytes_per_s
        if rate:
            self._trips_s.append(max(0.0, seconds - size / rate))
        elif size <= _SMALL_BYTES:
            self._trips_s.append(seconds)

    def restart(self) -> None:
        """The count of acknowledged bytes begins anew."""
        self._began = None

    def acknowledged(self, total: int, in_flight: int, now_s: float) -> tuple[int, float] | None:
        """Note that `total` bytes have arrived so far, and that `in_flight` more are on their way.

        Returns the bytes and the seconds of a window of a busy link, when one has ended.
        """
        if self._began is None:
            self._began = (now_s, total) if in_flight else None
            return None
        began_s, before = self._began
        window = None
        if now_s - began_s >= (_WINDOW_S if in_flight else _LEAST_WINDOW_S):
            window = total - before, now_s - began_s
            self._rates.append(window[0] / window[1])
            self._began = (now_s, total)
        if not in_flight:
            self._began = None
        return window

    def chunk_bytes(self, most: int) -> int:
        """Return how large a chunk should be: large enough to be cheap, small enough for urgent messages to pass."""
        rate = self.bytes_per_s
        wanted = int(rate * _CHUNK_S) if rate else _FIRST_CHUNK_BYTES
        return min(most, max(_LEAST_CHUNK_BYTES, wanted // _LEAST_CHUNK_BYTES * _LEAST_CHUNK_BYTES))

    def unsent_bytes(self) -> int:
        """Return how many bytes the kernel should hold beyond what the network has room for."""
        rate = self.bytes_per_s
        wanted = int(rate * _UNSENT_S) if rate else _MOST_UNSENT_BYTES
        return min(_MOST_UNSENT_BYTES, max(_LEAST_UNSENT_BYTES, wanted))
