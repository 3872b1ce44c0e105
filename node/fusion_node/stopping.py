"""Ends the daemon of this machine from another process: as its owner would with a signal."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

from fusion.base.errors import StateError

_LOOK_S = 0.1


def stop(home: Path, *, now: bool, patience_s: float) -> None:
    """Ask the daemon of `home` to end, and return when it has; `now`: without waiting for the jobs that need it.

    StateError if none runs, or if it still runs after `patience_s`.
    """
    try:
        descriptor = os.open(home / "LOCK", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        raise StateError(f"no fusion-node runs with {home}; is --home right?") from None
    try:
        if _ended(descriptor):
            raise StateError(f"no fusion-node runs with {home}; is --home right?")
        pid = int(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or 0)
        if pid <= 0:
            raise StateError(f"fusion-node with {home} is just starting; try again")
        for _ in range(2 if now else 1):
            _signal(pid)
            time.sleep(_LOOK_S)
        end_s = time.monotonic() + patience_s
        while not _ended(descriptor):
            if time.monotonic() > end_s:
                raise StateError(f"fusion-node (pid {pid}) still runs after {patience_s:.0f} s; use --now to end it")
            time.sleep(_LOOK_S)
    finally:
        os.close(descriptor)


def _ended(descriptor: int) -> bool:
    """Whether nobody holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise StateError(f"fusion-node (pid {pid}) belongs to another user; stop it as that user") from None
