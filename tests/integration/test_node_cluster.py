"""Node daemons against the real coordinator, all as processes or with real sockets; workers without torch."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusion.cli.main import run as run_command
from fusion.security.credentials import Credentials
from fusion_coordinator.cli import cli as coordinator_cli
from fusion_node import daemon
from fusion_node.cli import cli as node_cli
from tests.support.node import FAST, free_port, running, until

OPTIONS = ["--device", "cpu", "--speed", "1e9", "--threads", "1", "--max-memory", "1GiB"]


class Cluster:
    """A coordinator process, and commands run against it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.environment = {**os.environ, "FUSION_HOME": str(directory), "PYTHONUNBUFFERED": "1"}
        self.run("fusion_coordinator.cli", "init", "--listen", self.address)

    def run(self, module: str, *arguments: object, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    @contextmanager
    def serving(self, end: signal.Signals = signal.SIGTERM) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "fusion_coordinator.cli", "serve", "--listen", self.address]
        command += ["--enrol-listen", f"127.0.0.1:{free_port()}"]
        log = (self.directory / "serve.log").open("ab")
        with log, subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=log) as process:
            assert process.stdout is not None
            assert b"listening on" in process.stdout.readline()
            try:
                yield process
            finally:
                process.send_signal(end)
                process.wait(20)

    def token(self) -> str:
        return self.run("fusion_coordinator.cli", "token", "create").strip()

    def nodes(self) -> dict[str, Any]:
        found = json.loads(self.run("fusion_coordinator.cli", "nodes", "--json"))
        return {node["name"]: node for node in found}

    def join(self, home: Path, name: str) -> Credentials:
        assert run_command(node_cli, ["join", self.token(), "--home", str(home), "--name", name], "fusion-node") == 0
        return Credentials.load(home)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("FUSION_HOME", str(made.directory))
    return made


def test_the_commands_of_both_sides_belong_to_one_package():
    assert set(node_cli.commands) == {"join", "start", "doctor", "stop", "emulate-speed"}
    assert {"init", "serve", "token", "nodes"} <= set(coordinator_cli.commands)


@pytest.mark.slow
def test_join_start_doctor_and_leave(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "node one"
    with cluster.serving():
        token = cluster.token()
        assert run_command(node_cli, ["join", token, "--home", str(home), "--name", "one"], "fusion-node") == 0
        assert "as one (" in capsys.readouterr().out
        assert [path.stat().st_mode & 0o777 for path in (home / "key.pem", home)] == [0o600, 0o700]

        used = ["join", token, "--home", str(tmp_path / "other")]
        assert run_command(node_cli, used, "fusion-node") == 20  # a token lets one machine in
        assert "used" in capsys.readouterr().err
        assert not (tmp_path / "other" / "key.pem").exists()

        listen = ["--listen", "127.0.0.1:0"]
        assert run_command(node_cli, ["doctor", "--home", str(home), *OPTIONS, *listen], "fusion-node") == 0
        assert "ok   reachability: the coordinator reaches this node at 127.0.0.1:" in capsys.readouterr().out

        # the join string may stay on the command line of a service that is started again and again
        command = [sys.executable, "-m", "fusion_node.cli", "start", token, "--home", str(home), *OPTIONS, *listen]
        with subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: cluster.nodes().get("one", {}).get("state") == "idle", process)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=15)
        assert process.returncode == 0, errors
        assert cluster.nodes()["one"]["state"] == "left"


def wait_for(condition: Any, process: subprocess.Popen[str], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.mark.slow
def test_p4_f7_node_and_coordinator_find_each_other_again_after_either_was_killed(cluster: Cluster, tmp_path: Path):
    home = tmp_path / "one"

    async def scenario() -> None:
        with cluster.serving(end=signal.SIGKILL):
            credentials = cluster.join(home, "one")
            async with running(home, credentials) as task:
                await until(lambda: cluster.nodes().get("one", {}).get("state") == "idle", task)
            # that daemon went without taking leave, as if killed: the next one is let in at once
            context = running(home, credentials)
            task = await context.__aenter__()
            await until(lambda: cluster.nodes()["one"]["incarnation"] == 2, task)
        with cluster.serving():
            seen = (await asyncio.to_thread(cluster.nodes))["one"]["last_heartbeat_s"]
            await until(lambda: cluster.nodes()["one"]["last_heartbeat_s"] != seen, task, limit_s=30.0)
            assert (await asyncio.to_thread(cluster.nodes))["one"]["incarnation"] == 2
            await context.__aexit__(None, None, None)

    asyncio.run(scenario())


@pytest.mark.slow
def test_f21_a_second_machine_with_copied_credentials_is_refused_and_the_first_undisturbed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(daemon, "REGISTER_AGAIN_S", 0.0)

    async def scenario() -> None:
        credentials = cluster.join(tmp_path / "one", "one")
        shutil.copytree(tmp_path / "one", tmp_path / "copy")
        async with running(tmp_path / "one", credentials) as first:
            await until(lambda: cluster.nodes().get("one", {}).get("state") == "idle", first)
            async with running(tmp_path / "copy", credentials) as second:
                assert await asyncio.wait_for(second, 20) == 40
            assert (await asyncio.to_thread(cluster.nodes))["one"]["incarnation"] == 1
            assert not first.done()

    with cluster.serving():
        asyncio.run(scenario())
    assert "if this is another machine with copied credentials" in caplog.text


@pytest.mark.slow
def test_a_revoked_node_ends_with_20(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> int:
        credentials = cluster.join(tmp_path / "one", "one")
        async with running(tmp_path / "one", credentials) as task:
            await until(lambda: cluster.nodes().get("one", {}).get("state") == "idle", task)
            await asyncio.to_thread(cluster.run, "fusion_coordinator.cli", "revoke", credentials.identity)
            return await asyncio.wait_for(task, 20)

    with cluster.serving():
        assert asyncio.run(scenario()) == 20


@pytest.mark.slow
def test_p1_b29_addresses_that_are_no_use_are_refused_by_the_coordinator_too(cluster: Cluster, tmp_path: Path):
    with cluster.serving():
        cluster.join(tmp_path / "one", "one")
        settings = ["start", "--home", tmp_path / "one", *OPTIONS, "--advertise", "169.254.169.254:80"]
        assert "--advertise" in cluster.run("fusion_node.cli", *settings, code=10)


def tiny_job() -> Any:
    import torch
    from torch import nn

    import fusion

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    data = {"input": torch.zeros(8, 4), "target": torch.zeros(8, 1)}
    return fusion.Job(
        model=model,
        data=data,
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch["target"]),
        optimizer=fusion.SGD(0.1),
        batch_size=4,
        micro_batches=2,
        steps=10_000,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "state", "reason"),
    [("run", "cancelled", "enough"), ("crash", "paused", "node one is avoided (crash 3 times in a row)")],
)
def test_a_job_reaches_the_worker_and_its_end_reaches_the_owner(
    cluster: Cluster, tmp_path: Path, behaviour: str, state: str, reason: str
):
    async def scenario() -> Any:
        credentials = cluster.join(tmp_path / "one", "one")
        async with running(tmp_path / "one", credentials, behaviour, limits=FAST) as task:
            await until(lambda: cluster.nodes().get("one", {}).get("state") == "idle", task)
            handle = await asyncio.to_thread(lambda: tiny_job().submit(cluster.address))
            if behaviour == "run":
                await until(lambda: handle.status().state in ("running", "failed"), task)
                await asyncio.to_thread(handle.cancel, "enough")
            await until(lambda: handle.status().state == state, task)
            await until(lambda: cluster.nodes()["one"]["state"] == "idle", task)
            return await asyncio.to_thread(handle.status)

    with cluster.serving():
        status = asyncio.run(scenario())
    assert status.state == state
    assert reason in status.reason
