"""The worker process that is kept ready: used where it fits, replaced where it does not, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from fusion_node import spares as module
from fusion_node.events import WorkerExited, WorkerReported
from fusion_node.ipc import LogEntry, WorkerConfig
from fusion_node.spares import Spares
from fusion_node.supervisor import Supervisor
from tests.support.loops import run

CONFIG = WorkerConfig(b"", "127.0.0.1:0", "/c", "127.0.0.1:1", "/cache", incarnation=1)
#: Says who it is and with how many threads, once it has its configuration, and ends.
WORKER = (
    sys.executable,
    "-c",
    "import json, os, sys\n"
    "if sys.stdin.readline():\n"
    "    text = f\"{os.getpid()} {os.environ['OMP_NUM_THREADS']}\"\n"
    "    print(json.dumps({'type': 'log', 'level': 'info', 'text': text}), flush=True)\n",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_AFTER_S", 0.0)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def ready(spares: Spares, threads: int) -> int:
    """Return the process id of a spare process."""
    spares.want(threads)
    await until(lambda: spares.pid)
    assert spares.pid is not None
    return spares.pid


async def work(supervisor: Supervisor, events: list[WorkerReported | WorkerExited], threads: int) -> tuple[int, int]:
    """Run a worker; return the process id and the threads that it names."""
    events.clear()
    supervisor.start(msgspec.structs.replace(CONFIG, threads=threads), "w")
    await until(lambda: any(isinstance(event, WorkerExited) for event in events))
    (said,) = (event.report for event in events if isinstance(event, WorkerReported))
    assert isinstance(said, LogEntry)
    pid, count = said.text.split()
    return int(pid), int(count)


def supervised(
    tmp_path: Path, scenario: Callable[[Supervisor, Spares, list[WorkerReported | WorkerExited]], Awaitable[None]]
) -> None:
    async def all_of_it() -> None:
        before = set(psutil.Process().children(recursive=True))
        events: list[WorkerReported | WorkerExited] = []
        spares = Spares(WORKER)
        supervisor = Supervisor(tmp_path, events.append, WORKER, spares)
        try:
            await scenario(supervisor, spares, events)
        finally:
            await supervisor.close()
        assert spares.pid is None
        assert set(psutil.Process().children(recursive=True)) == before

    run(all_of_it)


def test_a_spare_process_becomes_the_worker_and_the_next_one_is_made_while_that_works(tmp_path):
    async def scenario(supervisor, spares, events):
        spare = await ready(spares, 2)
        assert await work(supervisor, events, 2) == (spare, 2)
        assert spares.pid not in (None, spare)

    supervised(tmp_path, scenario)


def test_a_spare_process_of_another_number_of_threads_is_not_used(tmp_path):
    async def scenario(supervisor, spares, events):
        spare = await ready(spares, 1)
        pid, threads = await work(supervisor, events, 3)
        assert threads == 3
        assert pid != spare
        assert not psutil.pid_exists(spare)

    supervised(tmp_path, scenario)


def test_a_spare_process_that_was_killed_costs_nothing_but_the_time(tmp_path):
    async def scenario(supervisor, spares, events):
        spare = await ready(spares, 2)
        os.kill(spare, signal.SIGKILL)
        await until(lambda: spares.pid is None)
        pid, threads = await work(supervisor, events, 2)
        assert threads == 2
        assert pid != spare

    supervised(tmp_path, scenario)


def test_there_is_no_spare_process_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "available_memory_bytes", lambda: module.SPARE_ROOM_BYTES - 1)

    async def scenario(supervisor, spares, events):
        await spares._make(2)
        assert spares.pid is None

    supervised(tmp_path, scenario)


@pytest.mark.slow
def test_a_real_spare_process_ends_when_its_daemon_is_gone():
    async def scenario() -> None:
        spares = Spares()
        pid = await ready(spares, 1)
        process = psutil.Process(pid)
        found = await spares.take(1)
        assert found is not None
        assert found.stdin is not None
        found.stdin.close()
        await asyncio.wait_for(found.wait(), 25)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        module.close_pipes(found)

    run(scenario)
