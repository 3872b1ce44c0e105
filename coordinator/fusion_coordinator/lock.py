"""One coordinator per state directory: a lock that the system releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from fusion.base.errors import StateError

WAIT_S = 5.0


class StateLock:
    """Holds `directory`/LOCK until `release` or the end of the process."""

    def __init__(self, directory: Path, wait_s: float = WAIT_S) -> None:
        """Wait for up to `wait_s` for another coordinator to end; StateError names it if it does not."""
        self._descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._acquire(directory, wait_s)
        except BaseException:
            os.close(self._descriptor)
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _acquire(self, directory: Path, wait_s: float) -> None:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                    raise StateError(
                        f"another coordinator (pid {holder}) holds {directory}; stop it, or use another --state-dir"
                    ) from None
            time.sleep(0.1)

    def release(self) -> None:
        """Let the next one have it."""
        os.close(self._descriptor)
