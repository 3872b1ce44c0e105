"""Named places at which a test makes a process fail: only with FUSION_TEST=1 and FUSION_FAILPOINTS.

    FUSION_FAILPOINTS="stage.backward@stage=1,step=7,micro_batch=2:kill9;disk.write@what=checkpoint:enospc*3"

A failpoint is NAME[@KEY=VALUE,...]:ACTION[=ARGUMENT][*TIMES]. It fires when the code reaches NAME with all the values
that it states, once unless TIMES says otherwise ("*all": always). With FUSION_HISTORY=DIRECTORY it is counted over all
processes, so that a stage that is done again elsewhere is not killed again. FUSION_FAILPOINTS=@FILE stands for what is
in the file when the process first reaches a failpoint.

Actions: `kill9` and `stop` (SIGKILL and SIGSTOP to this very process), `kill9-node` (SIGKILL to its parent too, which
of a worker is the daemon), `exit` (with code 1), `sleep=SECONDS`, `hang` (for ever), `hold-gil=SECONDS` (no Python
thread runs meanwhile), `enospc` (OSError), `oom` (MemoryError), `device-error` (RuntimeError, in CUDA's words), `error`
(RuntimeError). Any other word is returned to the caller, who does it himself (`nan`, `corrupt`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusion.base.errors import ConfigError
from fusion.base.fortests import setting_for_tests
from fusion.observe import history

__all__ = ["Failpoint", "parse", "reach", "reached"]

_ALWAYS = 2**31


@dataclass(frozen=True, slots=True)
class Failpoint:
    """Where to fail, how, and how often."""

    name: str
    where: tuple[tuple[str, str], ...]
    action: str
    argument: str = ""
    times: int = 1

    def meets(self, name: str, values: dict[str, object]) -> bool:
        """Whether this is the place."""
        return name == self.name and all(str(values.get(key)) == value for key, value in self.where)


def parse(text: str) -> list[Failpoint]:
    """Read failpoints; ConfigError names one that cannot be understood."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        place, colon, what = item.partition(":")
        name, _, conditions = place.partition("@")
        action, _, times = what.partition("*")
        action, _, argument = action.partition("=")
        pairs = [pair.partition("=") for pair in filter(None, conditions.split(","))]
        count = _ALWAYS if times == "all" else int(times) if times.isdecimal() else 0 if times else 1
        if not colon or not name or not action or not count or not all(equals for _, equals, _ in pairs):
            raise ConfigError(f"FUSION_FAILPOINTS: {item!r} is not NAME[@KEY=VALUE,...]:ACTION[=ARGUMENT][*TIMES]")
        found.append(Failpoint(name, tuple((key, value) for key, _, value in pairs), action, argument, count))
    return found


class _Active:
    """The failpoints of this process, and how often each has fired."""

    def __init__(self, text: str) -> None:
        self.points = parse(Path(text[1:]).read_text() if text.startswith("@") else text)
        self.fired = [0] * len(self.points)

    def reach(self, name: str, values: dict[str, object]) -> str:
        word = ""
        for index, point in enumerate(self.points):
            if point.meets(name, values) and self._may_fire(index, point):
                history.note("failpoint", point=name, action=point.action, **values)
                word = _do(point) or word
        return word

    def _may_fire(self, index: int, point: Failpoint) -> bool:
        directory = os.environ.get("FUSION_HISTORY")
        if directory is None:
            self.fired[index] += 1
            return self.fired[index] <= point.times
        if point.times == _ALWAYS:
            return True
        mark = f"fired-{point.name}-" + "".join(c if c.isalnum() else "_" for c in repr((point.where, point.action)))
        for number in range(point.times):
            try:  # whichever process makes the file is the one that fails
                os.close(os.open(Path(directory) / f"{mark}{number}", os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            return True
        return False


def _do(point: Failpoint) -> str:
    act = _ACTIONS.get(point.action)
    if act is None:
        return point.action
    act(point.argument)
    return ""


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_node(_: str) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(_: str) -> None:
    os._exit(1)


def _sleep(seconds: str) -> None:
    time.sleep(float(seconds or 1))


def _hang(_: str) -> None:
    while True:
        time.sleep(3600)


def _hold_gil(seconds: str) -> None:
    ctypes.PyDLL(None).sleep(int(float(seconds or 3600)))  # a PyDLL keeps the lock during the call


def _no_space(_: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_memory(_: str) -> None:
    raise MemoryError("a failpoint")


def _device_error(_: str) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered (a failpoint)")


def _error(_: str) -> None:
    raise RuntimeError("a failpoint")


_ACTIONS: dict[str, Callable[[str], None]] = {
    "kill9": _kill,
    "kill9-node": _kill_node,
    "stop": _stop,
    "exit": _exit,
    "sleep": _sleep,
    "hang": _hang,
    "hold-gil": _hold_gil,
    "enospc": _no_space,
    "oom": _no_memory,
    "device-error": _device_error,
    "error": _error,
}
_active: list[_Active] = []


@contextmanager
def reached(text: str) -> Iterator[None]:
    """Let this process fail at other points during a block; for tests in one process."""
    before = list(_active)
    _active[:] = [_Active(text)]
    try:
        yield
    finally:
        _active[:] = before


def reach(name: str, **values: object) -> str:
    """Tell that the code is at place `name`; returns the word of an action that the caller does himself, or "".

    What the action raises, it raises here.
    """
    if not _active:
        _active.append(_Active(setting_for_tests("FUSION_FAILPOINTS") or ""))
    return _active[0].reach(name, values) if _active[0].points else ""
