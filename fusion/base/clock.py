"""Time as an argument: whoever decides by time is given a clock, so that tests can turn it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from fusion.base.fortests import setting_for_tests


class Clock(Protocol):
    """Two clocks: one that never jumps, for decisions; one that people read, for records."""

    def monotonic_s(self) -> float:
        """Return seconds from an arbitrary start; never goes back and counts while the machine sleeps."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970-01-01 UTC; may jump."""
        ...


class SystemClock:
    """The machine's clocks. CLOCK_BOOTTIME where it exists, so that a suspended machine knows it slept."""

    def __init__(self) -> None:
        self._source = getattr(time, "CLOCK_BOOTTIME", None)

    def monotonic_s(self) -> float:
        return time.monotonic() if self._source is None else time.clock_gettime(self._source)

    def wall_s(self) -> float:
        return time.time()


class JumpingClock(SystemClock):
    """For tests: the machine's clocks, the wall clock off by the seconds that a file holds, which may change."""

    def __init__(self, offset: Path) -> None:
        super().__init__()
        self._offset = offset

    def wall_s(self) -> float:
        try:
            return time.time() + float(self._offset.read_text())
        except (OSError, ValueError):
            return time.time()


def process_clock() -> Clock:
    """Return the clock of this process: the machine's, but with FUSION_TEST=1 and FUSION_CLOCK=FILE one that jumps."""
    offset = setting_for_tests("FUSION_CLOCK")
    return JumpingClock(Path(offset)) if offset else SystemClock()


class ManualClock:
    """A clock for tests: it stands still until `advance` is called."""

    def __init__(self, monotonic_s: float = 1000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._monotonic_s, self._wall_s = monotonic_s, wall_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let both clocks go forward by `seconds`."""
        self._monotonic_s += seconds
        self._wall_s += seconds

    def jump_wall(self, seconds: float) -> None:
        """Let only the wall clock jump, as a clock correction does."""
        self._wall_s += seconds
