"""What a process did, as JSON lines that tests read afterwards: only with FUSION_TEST=1 and FUSION_HISTORY=DIRECTORY.

Every line is written with one system call, so a process that is killed loses nothing that it had said. Times are of
CLOCK_MONOTONIC, which all processes of a machine share. `tests/support/validators.py` says which events there are.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from fusion.base.fortests import setting_for_tests

__all__ = ["History", "active", "begin", "note"]


class History:
    """One process's file of events below `directory`; `common` goes into every line."""

    def __init__(self, directory: Path, process: str, **common: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{process}-{os.getpid()}.jsonl"
        self._common = {"process": process, "pid": os.getpid()} | common
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, event: str, /, **values: Any) -> None:
        """Add a line. A disk that is full loses it, and nothing else."""
        line = {"event": event, "at_s": round(time.monotonic(), 6)} | self._common | values
        try:
            os.write(self._descriptor, json.dumps(line, default=str).encode() + b"\n")
        except OSError:
            return


class _Own:
    """The history of this process, once it has begun one."""

    def __init__(self) -> None:
        self.history: History | None = None
        self.lock = threading.Lock()


_own = _Own()


def begin(process: str, **common: Any) -> None:
    """Begin this process's history, if the environment asks for one; `common` goes into every line of it."""
    directory = setting_for_tests("FUSION_HISTORY")
    if directory:
        with _own.lock:
            _own.history = History(Path(directory), process, **common)


def active() -> bool:
    """Whether anything that is noted is kept: ask before computing what is only noted."""
    return _own.history is not None


def note(event: str, /, **values: Any) -> None:
    """Add an event to this process's history; without one it costs nothing."""
    if _own.history is not None:
        _own.history.note(event, **values)
