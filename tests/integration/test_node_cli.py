"""The `fusion-node` command as its users run it: exit codes, one line on stderr, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from click.testing import CliRunner

from fusion.cli.main import run
from fusion_node.cli import cli, host_name, read_routes
from tests.support.node import ScriptedCoordinator, free_port, serve

FAST = ["--device", "cpu", "--speed", "1e9", "--threads", "1"]


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator()


@pytest.fixture
def address(coordinator: ScriptedCoordinator) -> Iterator[str]:
    with serve(coordinator) as at:
        yield at


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "node"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fusion_node.cli", *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "node")]), **changes}


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run in this process; return exit code and stderr, which must be one line."""
    code = run(cli, [str(argument) for argument in arguments], "fusion-node")
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    return code, errors


# ---- doctor ----


def examined(home: Path, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(cli, ["doctor", "--home", str(home), "--json", *FAST, *options])
    data = json.loads(result.stdout)
    assert data["ok"] is (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in data["checks"]}


def test_doctor_finds_a_healthy_node_healthy(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.make_node(home, address)
    code, checks = examined(home, "--listen", "127.0.0.1:0")
    assert code == 0
    for name in ("python", "torch", "grpcio", "protobuf parser", "device", "memory", "private key", "certificate"):
        assert checks[name]["status"] == "ok", checks[name]
    for name in ("clock", "coordinator", "reachability"):
        assert checks[name]["status"] == "ok", checks[name]


def test_doctor_prints_a_line_for_each_check_with_its_remedy(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    coordinator.make_node(home, address)
    (home / "key.pem").chmod(0o644)
    result = CliRunner().invoke(cli, ["doctor", "--home", str(home), *FAST])
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("fail"))
    assert f"chmod 600 {home / 'key.pem'}" in line


def test_doctor_without_credentials_says_to_join(home: Path):
    code, checks = examined(home)
    assert code == 1
    assert checks["credentials"]["remedy"] == "run: fusion-node join JOINSTRING"


@pytest.mark.parametrize(("ahead_s", "status", "code"), [(120.0, "warn", 0), (-400.0, "fail", 1)])
def test_f24_doctor_compares_the_clocks(
    coordinator: ScriptedCoordinator, address: str, home: Path, ahead_s: float, status: str, code: int
):
    coordinator.clock_ahead_s = ahead_s
    coordinator.make_node(home, address)
    exit_code, checks = examined(home, "--listen", "127.0.0.1:0")
    assert (exit_code, checks["clock"]["status"]) == (code, status)


def test_doctor_names_a_coordinator_that_is_away(coordinator: ScriptedCoordinator, home: Path):
    coordinator.make_node(home, f"127.0.0.1:{free_port()}")
    code, checks = examined(home)
    assert code == 1
    assert "nothing listens at" in checks["coordinator"]["detail"]
    assert "reachability" not in checks


def test_b33_doctor_names_a_wrong_ca_on_either_side(coordinator: ScriptedCoordinator, address: str, home: Path):
    ScriptedCoordinator().make_node(home, address)
    code, checks = examined(home)
    assert code == 1
    assert "is not the coordinator of this cluster" in checks["coordinator"]["detail"]
    # now the coordinator's CA, but a certificate that another CA has signed
    (home / "ca.pem").write_bytes(coordinator.ca.pem)
    code, checks = examined(home)
    assert code == 1
    assert "not issued by this cluster's CA" in checks["certificate"]["detail"]


def test_b33_doctor_names_an_expired_certificate(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.make_node(home, address, wall_s=time.time() - 1000, valid_s=500.0)
    code, checks = examined(home)
    assert code == 1
    assert "expired at" in checks["certificate"]["detail"]


def test_p1_doctor_says_what_to_open(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.reachable = False
    coordinator.make_node(home, address)
    code, checks = examined(home, "--listen", "127.0.0.1:0")
    assert code == 1
    assert "let TCP connections to 127.0.0.1 port" in checks["reachability"]["remedy"]


# ---- start ----


def started(home: Path, *options: object, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("start", "--home", home, *FAST, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    for _ in range(1000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("not within 20 s")


@pytest.mark.slow
def test_f31_start_runs_until_sigterm_and_exits_zero_t9_listening_on_its_own_port_alone(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    coordinator.make_node(home, address)
    listen = f"127.0.0.1:{free_port()}"
    with started(home, "--name", "gpu-box", "--listen", listen, LC_ALL="C") as process:
        wait_for(lambda: len(coordinator.heartbeats) >= 2, process)
        connections = psutil.Process(process.pid).net_connections()
        listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
        found = [f"{address.ip.removeprefix('::ffff:')}:{address.port}" for address in listening]
        assert found == [listen]  # of the data plane, for probes
        assert not any("torch" in path.path for path in psutil.Process(process.pid).memory_maps())
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=10)
    assert process.returncode == 0, errors
    assert output == ""
    assert all(" node: " in line for line in errors.splitlines()), errors
    assert coordinator.registered[0].name == "gpu-box"
    assert len(coordinator.left) == 1


@pytest.mark.slow
def test_p1_start_warns_that_it_cannot_be_reached_and_goes_on_unless_that_is_required(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    coordinator.reachable = False
    coordinator.make_node(home, address)
    with started(home) as process:
        wait_for(lambda: coordinator.heartbeats, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "other nodes cannot reach this one at 127.0.0.1:7445" in errors
    with started(home, "--require-reachable", "--listen", "127.0.0.1:0") as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 30
    assert "other nodes cannot reach this one" in errors


@pytest.mark.slow
def test_p1_start_names_a_taken_port(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.make_node(home, address)
    with started(home, "--listen", address) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 10
    assert f"port of {address} is taken" in errors


def test_start_without_credentials_exits_20(home: Path, capsys: pytest.CaptureFixture[str]):
    code, errors = ended(capsys, "start", "--home", home)
    assert code == 20
    assert "join a cluster first" in errors


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--frobnicate"], 2, "No such option"),
        (["--threads", "many"], 2, "--threads"),
        (["--threads", "-1"], 2, "--threads"),
        (["--speed", "-5"], 2, "--speed"),
        (["--listen"], 2, "--listen"),
        (["--listen", "host with spaces:1"], 10, "--listen"),
        (["--listen", "0.0.0.0:70000"], 10, "70000"),
        (["--listen", "::1:7445"], 10, "--listen"),
        (["--advertise", "a:b:c"], 10, "--advertise"),
        (["--device", "tpu"], 10, "--device"),
        (["--max-memory", "lots"], 10, "--max-memory"),
        (["--max-memory", "0"], 10, "--max-memory"),
        (["--allow-data", "/nonexistent"], 10, "--allow-data: /nonexistent"),
        (["--routes", "/nonexistent"], 10, "--routes"),
        (["--name", "../etc"], 10, "--name"),
        (["not-a-join-string"], 10, "join string"),
    ],
)
def test_b9_bad_options_are_named(
    home: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
):
    assert not home.exists()
    found, errors = ended(capsys, "start", "--home", home, *options)
    assert (found, words in errors) == (code, True), errors
    assert not home.exists()


def test_b12_an_empty_fusion_home_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FUSION_HOME", " ")
    code, errors = ended(capsys, "start")
    assert (code, "FUSION_HOME is set but empty" in errors) == (10, True)


def test_b10_a_home_that_cannot_be_written_is_named_before_the_token_is_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, coordinator: ScriptedCoordinator
):
    from fusion.security.credentials import Role
    from fusion.security.enrolment import make_join_string
    from tests.support.node import CLUSTER

    (tmp_path / "file").touch()
    join_string = make_join_string(
        cluster=CLUSTER,
        role=Role.NODE,
        addresses=["127.0.0.1:1"],
        enrol_port=2,
        token_id="token",
        secret=b"x" * 32,
        expires_wall_s=time.time() + 60,
        ca_der=coordinator.ca.der,
    )
    code, errors = ended(capsys, "join", join_string, "--home", tmp_path / "file" / "node")
    assert (code, "cannot write" in errors) == (10, True)


def test_credentials_are_not_replaced_without_force(
    capsys: pytest.CaptureFixture[str], coordinator: ScriptedCoordinator, home: Path
):
    coordinator.make_node(home, "127.0.0.1:1")
    code, errors = ended(capsys, "join", "fusion-join-1.x.y", "--home", home)
    assert (code, "--force" in errors) == (10, True)


def test_b10_a_key_that_others_may_read_is_refused(
    capsys: pytest.CaptureFixture[str], coordinator: ScriptedCoordinator, home: Path
):
    coordinator.make_node(home, "127.0.0.1:1")
    (home / "key.pem").chmod(0o644)
    code, errors = ended(capsys, "start", "--home", home)
    assert (code, "chmod 600" in errors) == (20, True)


def test_b34_a_closed_stdout_is_no_traceback(home: Path):
    with subprocess.Popen(
        command("doctor", "--home", home, *FAST), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait(30)
    assert b"Traceback" not in errors


def test_b34_arguments_that_are_no_utf8_are_no_traceback(tmp_path: Path):
    done = subprocess.run(
        [*command("start", "--home"), os.fsencode(tmp_path) + b"/\xff home"],
        capture_output=True,
        env=environment(LC_ALL="C"),
        timeout=30,
        check=False,
    )
    assert done.returncode == 20
    assert b"Traceback" not in done.stderr


def test_the_daemon_never_imports_torch():
    program = (
        "import sys, fusion_node.cli, fusion_node.daemon, fusion_node.doctor, fusion_node.supervisor\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=30, check=False)
    assert done.returncode == 0


def test_help_imports_neither_torch_nor_grpc():
    program = (
        "import sys\n"
        "from fusion_node.cli import cli\n"
        "cli.main(['start', '--help'], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'grpc')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), timeout=30, check=False, capture_output=True
    )
    assert done.returncode == 0
    assert b"--advertise" in done.stdout


def test_routes_are_read_and_checked(tmp_path: Path):
    path = tmp_path / "routes.json"
    path.write_text('{"10.0.0.1:7445": "127.0.0.1:9001"}')
    assert read_routes(path) == {"10.0.0.1:7445": "127.0.0.1:9001"}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a:1": "no-port:x"}', '{"a:1": ""}'])
def test_routes_that_are_none_are_refused(tmp_path: Path, text: str):
    from fusion.base.errors import ConfigError

    path = tmp_path / "routes.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--routes"):
        read_routes(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("gpu-1.example.org", "gpu-1.example.org"), ("Jörg's PC", "J-rg-s-PC"), ("...", "node"), ("x" * 80, "x" * 63)],
)
def test_any_host_name_becomes_a_usable_name(text: str, expected: str):
    from fusion.base.ids import check_name

    assert check_name("name", host_name(text)) == expected


def test_a_final_refusal_is_the_exit_code(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.refuse_register = (grpc.StatusCode.INVALID_ARGUMENT, "protocol: upgrade the older")
    coordinator.make_node(home, address)
    with started(home, "--listen", "127.0.0.1:0") as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 10
    assert "protocol: upgrade the older" in errors.splitlines()[-1]
