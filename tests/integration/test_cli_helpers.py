"""The demo's helper processes end with it: at its end, at Ctrl-C, and even when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from fusion.base.errors import JobError
from fusion.cli.helpers import Helpers, last_line, run_once

#: A helper that says that it is there and sleeps; with "stubborn" it ignores SIGTERM and has a child of its own.
HELPER = """
import signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print("child", child.pid, flush=True)
print("ready", *sys.argv[1:], flush=True)
time.sleep(100)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_helper.py").write_text(HELPER)
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def _wait_for(log: Path, text: str) -> str:
    for _ in range(400):
        if log.exists() and text in log.read_text():
            return log.read_text()
        time.sleep(0.025)
    raise AssertionError(f"{text!r} never came: {log.read_text() if log.exists() else 'no log'}")


def _gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.025)
    return False


def test_helpers_run_as_main_with_their_arguments_and_end_with_the_block(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with Helpers(tmp_path / "logs") as helpers:
        helper = helpers.start("one", "a_helper", ["x", "y"], environment)
        _wait_for(helper.log, "ready x y")
        helpers.check()
        pid = helper.process.pid
    assert helper.process.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_a_helper_that_ignores_sigterm_is_killed_with_its_group(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.cli.helpers._TERM_S", 0.3)
    with Helpers(tmp_path / "logs") as helpers:
        helper = helpers.start("one", "a_helper", ["stubborn"], environment)
        said = _wait_for(helper.log, "ready")
    assert helper.process.returncode == -signal.SIGKILL
    assert _gone(int(said.split()[1]), 5)


def test_a_helper_that_ends_by_itself_is_noticed_with_its_last_line(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with Helpers(tmp_path / "logs") as helpers:
        helper = helpers.start("broken", "does_not_exist_anywhere", [], environment)
        helper.process.wait(20)
        with pytest.raises(JobError, match=r"broken ended with exit code 1: .*No module named does_not_exist_anywhere"):
            helpers.check()


def test_helpers_do_not_outlive_a_killed_parent(tmp_path: Path, environment: dict[str, str]) -> None:
    parent = textwrap.dedent(f"""
        import os, time
        from pathlib import Path
        from fusion.cli.helpers import Helpers
        with Helpers(Path({str(tmp_path / "logs")!r})) as helpers:
            pids = [helpers.start(f"h{{n}}", "a_helper", [], os.environ).process.pid for n in range(2)]
            print(*pids, flush=True)
            time.sleep(100)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        for number in range(2):
            _wait_for(tmp_path / "logs" / f"h{number}.log", "ready")
        process.kill()
        process.wait()
    assert len(pids) == 2
    assert all(_gone(pid, 10) for pid in pids)


def test_commands_that_fail_are_told_by_their_last_line(environment: dict[str, str]) -> None:
    assert run_once("python", "platform", [], environment).strip()
    with pytest.raises(JobError, match=r"it ended with exit code 1: .*No module named nowhere"):
        run_once("it", "nowhere", [], environment)


def test_last_line_of_a_log(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none") == "it wrote nothing"
    (tmp_path / "log").write_text("x\n" * 10_000 + "last one\n\n  \n")
    assert last_line(tmp_path / "log") == "last one"
