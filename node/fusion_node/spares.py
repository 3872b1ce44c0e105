"""A worker process that is kept ready, whether another one works or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from fusion.base.units import MIB
from fusion_node.hardware import available_memory_bytes
from fusion_node.workerprocess import MARK, WORKER_COMMAND, close_pipes, start_process

SPARE_AFTER_S = 5.0  #: after a worker's start: what it loads comes first
SPARE_ROOM_BYTES = 1024 * MIB  #: of free memory that there must be; a spare process takes about 300 MiB


class Spares:
    """At most one process that has loaded torch and waits for a configuration, so that a recovery need not wait for it.

    It is started on an idle node, and again once a worker has run for a while. Whoever finds it dead, or made for
    another number of threads, starts a process afresh.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = (*command, MARK)
        self._process: asyncio.subprocess.Process | None = None
        self._threads = 0
        self._timer: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, while one waits."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def want(self, threads: int, *, now: bool = False) -> None:
        """Have one with so many threads: now, or once the worker that has just begun has loaded all it needs."""
        self._cancel()
        delay_s = 0.0 if now else SPARE_AFTER_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin, threads)

    async def take(self, threads: int) -> asyncio.subprocess.Process | None:
        """Return the spare process, which is the caller's now; None if there is none that is fit."""
        self._cancel()
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or (process.returncode is None and self._threads == threads):
            return process
        await _kill(process)
        return None

    async def close(self) -> None:
        """End the spare process, if there is one, and wait until nothing of it is left."""
        process = await self.take(self._threads)
        if process is not None:
            await _kill(process)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, threads: int) -> None:
        self._timer = None
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._make(threads), name="spare worker")

    async def _make(self, threads: int) -> None:
        if self.pid is not None and self._threads == threads:
            return
        process, self._process = self._process, None
        if process is not None:
            await _kill(process)
        if available_memory_bytes() < SPARE_ROOM_BYTES:
            return
        with contextlib.suppress(OSError):  # a worker will say it, when one is wanted
            self._process, self._threads = await start_process(self._command, threads), threads


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    close_pipes(process)
