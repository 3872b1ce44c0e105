"""How a worker's end is described, what its environment is, and how its log stays small."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fusion_node.events import WorkerExited, WorkerReported
from fusion_node.ipc import WorkerConfig
from fusion_node.supervisor import (
    MAX_LOG_FILES,
    BoundedLog,
    Supervisor,
    describe_exit,
    prune_logs,
)
from fusion_node.workerprocess import worker_environment

CONFIG = WorkerConfig(b"", "127.0.0.1:0", "/c", "127.0.0.1:1", "/cache", incarnation=1)


@pytest.mark.parametrize(
    ("returncode", "tail", "oom_kills", "cause", "start"),
    [
        (-9, "", 0, "crash", "worker killed by signal 9 (out of memory?)"),
        (-9, "", 1, "out-of-memory", "worker killed by the kernel: out of memory"),
        (-11, "Fatal Python error", 0, "crash", "worker killed by signal 11 (SIGSEGV): Fatal Python error"),
        (-64, "", 0, "crash", "worker killed by signal 64"),
        (1, "RuntimeError: can't allocate memory", 0, "out-of-memory", "worker ended with exit code 1"),
        (3, "ValueError: x", 0, "crash", "worker ended with exit code 3 without having finished: ValueError: x"),
        (0, "", 0, "crash", "worker ended with exit code 0 without having finished"),
    ],
)
def test_the_end_of_a_worker_is_named(returncode: int, tail: str, oom_kills: int, cause: str, start: str):
    found_cause, detail = describe_exit(returncode, tail, oom_kills)
    assert found_cause == cause
    assert detail.startswith(start)


def test_a_log_never_grows_beyond_its_bound_and_keeps_its_last_lines(tmp_path: Path):
    log = BoundedLog(tmp_path / "worker-x.log", max_bytes=1000)
    for number in range(200):
        log.write(f"line {number}\n".encode())
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-x.log", "worker-x.log.1"]
    assert log.tail() == "line 197 | line 198 | line 199"


def test_a_log_that_cannot_be_written_still_has_its_tail(tmp_path: Path):
    log = BoundedLog(tmp_path / "missing" / "worker-x.log")
    log.write(b"\xff broken \x1b[2J\n\n last words \n")
    assert log.tail().endswith("| last words")


def test_the_tail_is_short_even_if_the_lines_are_not(tmp_path: Path):
    log = BoundedLog(tmp_path / "worker-x.log")
    log.write(b"x" * 50_000)
    assert len(log.tail()) <= 600


def test_old_logs_are_pruned_newest_kept(tmp_path: Path):
    for number in range(30):
        path = tmp_path / f"worker-{number}.log"
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "not-ours.txt").touch()
    prune_logs(tmp_path, keep=MAX_LOG_FILES)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {f"worker-{number}.log" for number in range(10, 30)} | {"not-ours.txt"}


def test_a_worker_finds_this_package_and_has_its_threads():
    environment = worker_environment(3, {"PATH": "/bin", "PYTHONPATH": "/mine"})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[-1] == "/mine"
    assert not any(path.endswith("site-packages") for path in paths)


def run_worker(tmp_path: Path, command: list[str]) -> list[WorkerReported | WorkerExited]:
    events: list[WorkerReported | WorkerExited] = []

    async def scenario() -> None:
        supervisor = Supervisor(tmp_path / "logs", events.append, command)
        supervisor.start(CONFIG, "worker-test")
        supervisor.stop("asked before it had even started", 0.0)
        await supervisor.close()

    asyncio.run(scenario())
    return events


def test_a_worker_that_cannot_be_started_is_reported(tmp_path: Path):
    (event,) = run_worker(tmp_path, ["/nonexistent/python"])
    assert isinstance(event, WorkerExited)
    assert event.cause == "error"
    assert "worker did not start: " in event.detail


def test_a_stop_that_comes_while_the_process_is_being_made_is_not_lost(tmp_path: Path):
    (event,) = run_worker(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"])
    assert isinstance(event, WorkerExited)
    assert "signal 9" in event.detail
