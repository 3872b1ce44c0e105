"""Helper processes of the demo: each in a group of its own, with a log, and none outlives us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion.base.errors import JobError

_TERM_S, _KILL_S = 10.0, 5.0
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Helper:
    """One running helper."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Helpers:
    """Starts helpers, and ends them all when the block is left; should we be killed, they notice (see child.py)."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Helper] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        prefix: Sequence[str] = (),
    ) -> Helper:
        """Start `python -m module`; stdout and stderr go to the log. `prefix`: a command that becomes the one given."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "fusion.cli.child", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        helper = Helper(name, process, log)
        self._running.append(helper)
        return helper

    def check(self) -> None:
        """Raise JobError, with the end of its log, if a helper has ended by itself."""
        for helper in self._running:
            code = helper.process.poll()
            if code is not None:
                raise JobError(
                    f"{helper.name} ended with exit code {code}: {last_line(helper.log)} (log: {helper.log})"
                )

    def stop(self) -> None:
        """End every helper: SIGTERM, and after a while SIGKILL for its group. Ctrl-C meanwhile goes on to SIGKILL.

        The first one that was started ends last, because the others take their leave of it.
        """
        try:
            _terminate(self._running[1:])
            _terminate(self._running[:1])
        finally:
            for helper in self._running:
                _signal(helper, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    helper.process.wait(_KILL_S)
                if helper.process.stdin is not None:
                    helper.process.stdin.close()
            self._running.clear()


def _terminate(helpers: Sequence[Helper]) -> None:
    for helper in helpers:
        _signal(helper, signal.SIGTERM)
    deadline_s = time.monotonic() + _TERM_S
    for helper in helpers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.process.wait(max(0.0, deadline_s - time.monotonic()))


def _signal(helper: Helper, number: signal.Signals) -> None:
    """Signal a helper (SIGKILL: its group, which may outlive it)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number is signal.SIGKILL:
            os.killpg(helper.process.pid, number)
        elif helper.process.poll() is None:
            helper.process.send_signal(number)


def run_once(name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run `python -m module` to its end and return its stdout; JobError with the last line of stderr if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=dict(environment),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise JobError(f"{name} ended with exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return "it wrote nothing"
