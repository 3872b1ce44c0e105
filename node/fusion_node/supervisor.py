"""Starts the worker process, listens to it, ends it, and says how it ended. One worker at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fusion.base.errors import WireError
from fusion.base.units import MIB
from fusion_node.events import WorkerExited, WorkerReported
from fusion_node.ipc import (
    Cause,
    Command,
    Emulate,
    Lease,
    LogEntry,
    Stop,
    WorkerConfig,
    decode_report,
    encode,
    one_line,
)
from fusion_node.spares import Spares
from fusion_node.workerprocess import WORKER_COMMAND, close_pipes, start_process

MAX_LOG_BYTES = 8 * MIB  #: of one file; a worker has at most two, the older ends in ".1"
MAX_LOG_FILES = 20  #: of a node
TAIL_LINES, TAIL_CHARACTERS = 3, 600  #: of the worker's stderr that go into the reason of its failure
PIPE_LINGER_S = 2.0  #: how long to read on after the process has gone
_OUT_OF_MEMORY = re.compile(r"\b(MemoryError|OutOfMemoryError|out of memory|can't allocate memory)\b", re.IGNORECASE)


class BoundedLog:
    """A log file of bounded size which remembers its last lines. A full disk loses lines, and nothing else."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._size_bytes = 0
        self._tail = bytearray()

    def write(self, data: bytes) -> None:
        """Append `data`; beyond the limit the file starts anew and the old one is kept as "<name>.1"."""
        self._tail = (self._tail + data)[-8192:]
        try:
            if self._size_bytes + len(data) > self._max_bytes and self._size_bytes:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._size_bytes = 0
            with self.path.open("ab" if self._size_bytes else "wb") as file:
                file.write(data)
            self._size_bytes += len(data)
        except OSError:
            return

    def tail(self) -> str:
        """Return the last lines as one."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        return " | ".join(deque((line for line in lines if line), TAIL_LINES))[-TAIL_CHARACTERS:]


def _kernel_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; -1 where it does not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return -1
    return int(match[1]) if match else -1


def describe_exit(returncode: int, tail: str, oom_kills: int) -> tuple[Cause, str]:
    """Return cause and detail of a worker that ended unasked; `oom_kills`: by the kernel while it ran."""
    after = f": {tail}" if tail else ""
    if returncode == -signal.SIGKILL:
        if oom_kills > 0:
            return "out-of-memory", f"worker killed by the kernel: out of memory{after}"
        return "crash", f"worker killed by signal 9 (out of memory?){after}"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = "unknown"
        return "crash", f"worker killed by signal {-returncode} ({name}){after}"
    cause: Cause = "out-of-memory" if _OUT_OF_MEMORY.search(tail) else "crash"
    return cause, f"worker ended with exit code {returncode} without having finished{after}"


class Supervisor:
    """Runs one worker process at a time and turns what it does into events for the agent."""

    def __init__(
        self,
        logs: Path,
        on_event: Callable[[WorkerReported | WorkerExited], None],
        command: Sequence[str] = WORKER_COMMAND,
        spares: Spares | None = None,
    ) -> None:
        """`spares`: processes that have everything loaded; without any, a worker loads everything when it starts."""
        self._logs, self._on_event, self._command = logs, on_event, tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._task: asyncio.Task[None] | None = None
        self._lease: Lease | None = None  #: as last stated
        self._early_stops: list[tuple[str, float, bool]] = []  #: asked for while the process was being made
        self._early_emulation: Emulate | None = None  #: likewise
        self._spares = spares

    @property
    def pid(self) -> int | None:
        """The running worker's process id."""
        return self._process.pid if self._process else None

    def start(self, config: WorkerConfig, name: str, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start a worker with `config`, after `prepare`; `name` (a safe file name) is its log's.

        WorkerExited comes in any case.
        """
        if self._task is not None and not self._task.done():
            raise RuntimeError("a worker is still running")
        self._early_stops.clear()
        self._early_emulation = None  # the configuration has the speed of now
        self._task = asyncio.get_running_loop().create_task(self._run(config, name, prepare), name="worker")

    def stop(self, reason: str, grace_s: float, ask: bool = True) -> None:
        """Ask the worker to end, send SIGTERM after half of `grace_s` and SIGKILL after all of it."""
        process = self._process
        if process is None:
            if self._task is not None and not self._task.done():
                self._early_stops.append((reason, grace_s, ask))
            return
        if ask and grace_s > 0:
            self.tell(Stop(reason))
        loop = asyncio.get_running_loop()
        if grace_s > 0:
            self._timers.append(loop.call_later(grace_s / 2, self._signal, process, signal.SIGTERM))
        self._timers.append(loop.call_later(grace_s, self._signal, process, signal.SIGKILL))

    def tell(self, command: Command) -> None:
        """Pass a command on to the worker, if there is one."""
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(encode(command))

    def emulate(self, flops: float) -> None:
        """Tell the worker, if there is one, to stand for a device of this speed."""
        command = Emulate(flops)
        self._early_emulation = command if self._process is None else None
        self.tell(command)

    def lease(self, lease: Lease) -> None:
        """Tell the worker until when this node may speak for its stage."""
        self._lease = lease
        self.tell(lease)

    async def close(self) -> None:
        """Kill the worker, if there is one, and wait until nothing of it is left."""
        self.stop("the daemon ends", 0.0)
        if self._task is not None:
            await self._task
        if self._spares is not None:
            await self._spares.close()

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        if process.returncode is not None:
            return
        try:  # the worker leads a process group of its own
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    async def _run(self, config: WorkerConfig, name: str, prepare: Callable[[], Awaitable[None]] | None) -> None:
        oom_kills = _kernel_oom_kills()
        if prepare is not None:
            await prepare()
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            prune_logs(self._logs)
            process = None if self._spares is None else await self._spares.take(config.threads)
            if process is None:
                process = await start_process(self._command, config.threads)
        except OSError as error:
            self._on_event(WorkerExited("error", f"worker did not start: {error}"))
            return
        self._process = process
        assert process.stdin is not None  # asked for above
        process.stdin.write(encode(config))  # not waited for: if the worker dies of it, its exit says how
        if self._early_emulation is not None:
            process.stdin.write(encode(self._early_emulation))
        if self._lease is not None:
            process.stdin.write(encode(self._lease))
        for early in self._early_stops:
            self.stop(*early)
        self._early_stops.clear()
        if self._spares is not None:
            self._spares.want(config.threads)
        log = BoundedLog(self._logs / f"{name}.log")
        readers = asyncio.gather(self._read_reports(process), _copy_errors(process, log))
        returncode = await process.wait()
        with contextlib.suppress(TimeoutError):  # a child of the worker may hold its pipes open
            await asyncio.wait_for(readers, PIPE_LINGER_S)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._process = None
        close_pipes(process)
        self._on_event(WorkerExited(*describe_exit(returncode, log.tail(), _kernel_oom_kills() - oom_kills)))

    async def _read_reports(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
                if not line:
                    return
                self._on_event(WorkerReported(decode_report(line)))
            except (WireError, ValueError) as error:  # ValueError: a line over the limit
                self._on_event(WorkerReported(LogEntry("warning", one_line(str(error)))))


async def _copy_errors(process: asyncio.subprocess.Process, log: BoundedLog) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(2**16):
        # On a thread: a slow disk must not hold up the heartbeat.
        await asyncio.to_thread(log.write, data)


def prune_logs(directory: Path, keep: int = MAX_LOG_FILES - 2) -> None:
    """Delete all but the `keep` newest log files."""
    files = sorted(directory.glob("worker-*.log*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[keep:]:
        path.unlink(missing_ok=True)
