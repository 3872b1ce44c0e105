"""The `fusion` command: quick help, one line for every error, exit codes by family, JSON alone on stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from fusion.base import errors
from fusion.cli import main as cli_main
from fusion.cli.main import COMMANDS, cli, guarded, run
from fusion.cli.output import print_json, printable

ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C"}


def _fusion(*arguments: str, home: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = ENVIRONMENT | environment | ({} if home is None else {"FUSION_HOME": str(home)})
    return subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = "import sys\nfrom fusion.cli.main import run, cli\nrun(cli, ['--help'], 'fusion')\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, (_, text) in COMMANDS.items():
        assert f"  {name}" in done.stdout
        assert text in done.stdout
    assert not {"torch", "grpc", "rich", "numpy"} & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, [name, "--help"], "fusion") == 0
    assert "Usage: fusion " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["status", "--nonsense"], ["submit"], ["weights", "job-aaaaaaaaaa"], ["status", "--coordinator"]],
)
def test_b9_usage_errors_are_one_line_and_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, arguments, "fusion") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fusion: ")
    assert said.err.count("\n") == 1


def _families() -> list[type[errors.FusionError]]:
    found, waiting = [], [errors.FusionError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return found


@pytest.mark.parametrize("kind", _families(), ids=lambda kind: kind.__name__)
def test_every_error_is_one_line_and_its_familys_exit_code(
    kind: type[errors.FusionError], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("first\nsecond")

    assert guarded(fail, "fusion") == kind.exit_code
    assert capsys.readouterr().err == "fusion: first second\n"


def test_exit_codes_of_the_families_are_those_documented() -> None:
    codes = {kind.__name__: kind.exit_code for kind in _families() if kind.__base__ is errors.FusionError}
    assert codes == {
        "UsageError": 2,
        "ConfigError": 10,
        "AuthError": 20,
        "UnreachableError": 30,
        "JobError": 40,
        "PlanError": 50,
        "WireError": 60,
    }


@pytest.mark.parametrize("stop", [KeyboardInterrupt, click.Abort])
def test_interruptions_are_one_line(stop: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise stop

    assert guarded(interrupted, "fusion") == 130
    assert capsys.readouterr().err == "fusion: interrupted\n"


def test_b34_a_closed_pipe_is_no_traceback() -> None:
    shell = f"{sys.executable} -m fusion.cli.main --help | true; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert done.returncode in (0, cli_main.BROKEN_PIPE)
        assert done.stderr == ""


def test_b34_without_credentials_the_way_to_get_them_is_told(tmp_path: Path) -> None:
    done = _fusion("status", home=tmp_path / "with space é")
    assert done.returncode == 20
    assert done.stdout == ""
    assert "fusion join JOINSTRING" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["FUSION_HOME", "FUSION_CREDENTIALS"])
def test_b12_empty_environment_variables_are_named(name: str) -> None:
    done = _fusion("status", **{name: ""})
    assert done.returncode == 10
    assert f"environment variable {name} is set but empty" in done.stderr


def test_b11_join_strings_that_are_none(tmp_path: Path) -> None:
    done = _fusion("join", "nonsense", home=tmp_path)
    assert done.returncode == 10
    assert "join string" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_b31_ctrl_c_is_one_line_and_130(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "fusion.cli.main", "submit", str(tmp_path / "job.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said == "fusion: interrupted\n"


def test_json_has_no_numbers_that_json_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    value: dict[str, Any] = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (-float("inf"),)}, "é": None}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": {"d": [None]}, "é": None}
    assert out.isascii()
    assert out.count("\n") == 1


def test_text_from_elsewhere_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[31m\nb\u202ec") == "a?[31m?b?c"
