"""Whatever process of a run is killed: within 40 s the run goes on without it, or everybody knows why it does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fusion
from fusion.base.errors import JobError, StateError, UnreachableError
from tests.support import models
from tests.support.cluster import WITHIN_S, Cluster, eventually, port_of, within

pytestmark = pytest.mark.slow

FOR_EVER = 1_000_000  #: steps


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("failures"), nodes=3) as made:
        yield made


@pytest.fixture
def cluster(three_nodes: Cluster) -> Cluster:
    """A cluster in which everything runs and all nodes are idle, whatever the test before has done to it."""
    three_nodes.heal()
    return three_nodes


def gpt(steps: int = FOR_EVER, stages: int = 3, **settings: Any) -> fusion.Job:
    tokens = torch.randint(0, models.VOCABULARY, (16, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    values = {
        "steps": steps,
        "batch_size": 4,
        "micro_batches": 2,
        "stages": stages,
        "threads": 1,
        "planner": "equal-compute",
    }
    return fusion.Job(models.tiny_gpt(), rows, fusion.SGD(1e-3), **(values | settings))


def fails_everywhere(cluster: Cluster, run: fusion.Run, since_s: float) -> str:
    """Return the reason of the job's failure, which client, coordinator and workers all know within the deadline."""

    def left_s() -> float:
        return since_s + WITHIN_S - time.monotonic()

    try:
        with pytest.raises(JobError) as error:
            run.wait(timeout=left_s())
    except TimeoutError:
        pytest.fail(f"{run} has not failed within {WITHIN_S:.0f} s: {run.status()}")
    eventually(lambda: not cluster.worker_processes(), "every worker has ended", left_s())
    status = run.status()
    assert status.state is fusion.JobState.FAILED
    assert status.reason in str(error.value)
    assert "\n" not in status.reason
    with pytest.raises(JobError):  # whoever asks for metrics, now or later, hears it too
        list(run.metrics())
    return status.reason


def comes_back(run: fusion.Run, since_s: float) -> str:
    """Wait until a job that broke runs again, within the deadline; return the line that told what had broken it."""

    def back() -> bool:
        status = run.status()
        assert not status.state.ended, status
        return status.state is fusion.JobState.RUNNING and status.plan is not None and status.plan.epoch > 1

    eventually(back, f"{run} runs again", since_s + WITHIN_S - time.monotonic())
    return next(line.text for line in run.logs(follow=False) if line.text.startswith(("recovers: ", "recovered ")))


def ends_of_daemons(cluster: Cluster, *but: str) -> dict[str, int | None]:
    """Return the exit codes of all daemons; None for one that lives."""
    return {name: helper.process.poll() for name, helper in cluster.helpers.named.items() if name not in but}


def all_run(cluster: Cluster, *but: str) -> bool:
    return set(ends_of_daemons(cluster, *but).values()) == {None}


@pytest.mark.faults
def test_a_job_whose_worker_is_killed_goes_on_and_the_same_nodes_train_the_next_one(cluster: Cluster) -> None:
    incarnations = cluster.command("fusion_coordinator.cli", "nodes", "--json")
    with cluster.running(gpt()) as run:
        names = [stage.node_name for stage in run.status().stages]
        workers = cluster.workers()
        assert set(workers) == set(names)
        since_s = time.monotonic()
        workers[names[1]].kill()
        reason = comes_back(run, since_s)
        run.cancel("seen enough")
    assert f"node {names[1]} (stage 1)" in reason
    assert "worker killed by" in reason
    assert all_run(cluster)

    eventually(lambda: set(cluster.node_states().values()) == {"idle"}, "all nodes are idle")
    with cluster.submit(gpt(steps=3, determinism="strict")) as run:
        assert len(run.wait(timeout=120.0).stages) == 3
        assert [step.loss for step in run.metrics()] == gpt(steps=3, determinism="strict").run_local().losses
    eventually(lambda: not cluster.worker_processes(), "the workers have ended")
    assert all(cluster.listeners()[name] <= {port_of(at)} for name, at in cluster.nodes.items())
    before, after = (
        {node["name"]: node["incarnation"] for node in json.loads(text)}
        for text in (incarnations, cluster.command("fusion_coordinator.cli", "nodes", "--json"))
    )
    assert after == before  # no daemon had to register anew for it


def test_a_job_whose_worker_is_killed_while_the_stages_connect_starts_again(cluster: Cluster) -> None:
    with cluster.submit(gpt()) as run:
        eventually(lambda: len(cluster.workers()) == 3, "the workers have started")
        names = [stage.node_name for stage in run.status().stages]
        since_s = time.monotonic()
        cluster.workers()[names[2]].kill()
        reason = comes_back(run, since_s)
        run.cancel("seen enough")
    assert f"node {names[2]} (stage 2)" in reason
    assert all_run(cluster)


def test_a_killed_daemon_takes_its_worker_along_and_the_job_goes_on_without_it(cluster: Cluster) -> None:
    with cluster.running(gpt(stages=2)) as run:
        name = run.status().stages[1].node_name
        worker = cluster.workers()[name]
        since_s = time.monotonic()
        cluster.kill(name)
        eventually(lambda: not worker.is_running(), "the worker of the killed daemon has ended")
        reason = comes_back(run, since_s)
        assert name not in {stage.node_name for stage in run.status().stages}
        run.cancel("seen enough")
    assert f"node {name} (stage 1)" in reason
    assert "lost" in reason
    assert all_run(cluster, name)


@contextmanager
def follower(run: fusion.Run) -> Iterator[list[BaseException]]:
    """Wait for a run in a thread; yields the list that takes how the waiting ended."""
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            run.wait()
        except fusion.FusionError as error:
            ends.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield ends
    thread.join(5)
    assert not thread.is_alive(), "run.wait() hangs"


@pytest.mark.faults
def test_without_its_coordinator_the_workers_end_by_themselves_and_the_run_goes_on_with_the_next_one(
    cluster: Cluster,
) -> None:
    with cluster.running(gpt()) as run, follower(run) as ends:
        names = [stage.node_name for stage in run.status().stages]
        since_s = time.monotonic()
        cluster.kill("coordinator")
        with within(WITHIN_S, "run.metrics() without a coordinator"), pytest.raises(UnreachableError) as error:
            list(run.metrics())
        assert cluster.address in str(error.value)
        assert run.job_id in str(error.value)
        eventually(
            lambda: not cluster.worker_processes(),
            "every worker has ended by its node's own clock",
            since_s + WITHIN_S - time.monotonic(),
        )
        eventually(lambda: ends, "run.wait() has ended", since_s + WITHIN_S - time.monotonic())
        assert isinstance(ends[0], UnreachableError)
        assert all_run(cluster, "coordinator")

        cluster.helpers.again("coordinator")
        eventually(lambda: len(cluster.node_states()) == 3, "the nodes are back")
        with cluster.attach(run.job_id) as found:
            assert comes_back(found, time.monotonic()).startswith("recovers: node node-")
            found.cancel("seen enough")
    assert all_run(cluster)
    assert all("registration lost: no answered heartbeat" in cluster.log(name) for name in names)


JOB_FILE = """
import torch
from torch import nn
import fusion

x = torch.randn(64, 8)
job = fusion.Job(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"input": x, "target": x}, fusion.SGD(1e-3),
                 loss=lambda outputs, batch: (outputs - batch["target"]).square().mean(),
                 steps=1_000_000, batch_size=8, micro_batches=2, stages=2, planner="equal-compute",
                 name="outlives-its-client")
"""


def test_a_job_outlives_its_client_until_it_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB_FILE)
    command = [sys.executable, "-m", "fusion.cli.main", "submit", str(tmp_path / "job.py"), "--json"]
    with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        job_id = json.loads(client.stdout.readline())["job"]
        while json.loads(client.stdout.readline())["step"] < 2:
            pass
        client.kill()
    assert client.returncode == -signal.SIGKILL
    with cluster.attach(job_id) as run:
        seen = run.status().step
        steps = run.metrics(after_step=seen)
        assert [next(steps).step for _ in range(20)] == list(range(seen + 1, seen + 21))
        assert run.status().state is fusion.JobState.RUNNING

        since_s = time.monotonic()
        assert run.cancel("seen enough").state is fusion.JobState.CANCELLED
        with pytest.raises(JobError, match="seen enough"):
            run.wait(timeout=WITHIN_S)
        with pytest.raises(JobError, match="seen enough"):
            for _ in steps:
                pass
        eventually(
            lambda: not cluster.worker_processes(), "the workers have ended", since_s + WITHIN_S - time.monotonic()
        )
        with pytest.raises(StateError, match="cancelled"):
            run.cancel()
        with pytest.raises(StateError):
            run.state_dict()
    assert all_run(cluster)


def test_a_node_that_is_told_to_end_leaves_with_0_and_the_job_goes_on_without_it(cluster: Cluster) -> None:
    with cluster.running(gpt(stages=2)) as run:
        name = run.status().stages[0].node_name
        since_s = time.monotonic()
        assert cluster.terminate(name) == 0
        assert f"node {name}" in comes_back(run, since_s)
        assert name not in {stage.node_name for stage in run.status().stages}
        run.cancel("seen enough")
    assert cluster.node_states()[name] == "left"
    assert all_run(cluster, name)


def test_a_stage_that_cannot_be_built_fails_the_job_with_its_one_line(cluster: Cluster, tmp_path: Path) -> None:
    """Here: data at a path that the nodes' owners have not allowed, though it is there."""
    path = tmp_path / "data.safetensors"
    save_file({"input": torch.randn(64, 8), "target": torch.randn(64, 8)}, path)
    rows = fusion.NodePath(
        str(path), fields={name: fusion.Rows("float32", (8,)) for name in ("input", "target")}, samples=64
    )
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    job = fusion.Job(
        model, rows, fusion.SGD(0.1), loss=_square_loss, steps=2, batch_size=8, stages=2, planner="equal-compute"
    )
    with cluster.submit(job) as run:
        since_s = time.monotonic()
        reason = fails_everywhere(cluster, run, since_s)
        names = [stage.node_name for stage in run.status().stages]
    assert any(reason.startswith(f"node {name} (stage {stage}) failed: data path") for stage, name in enumerate(names))
    assert f"data path {str(path)!r} is not allowed on this node; allowed directories (--allow-data): none" in reason
    assert all_run(cluster)


def _square_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch["target"]).square().mean()


def test_a_job_that_no_node_can_hold_waits_and_says_how_much_is_missing(cluster: Cluster) -> None:
    """One hidden value of 2^19 samples is 4 GiB, a node of this cluster offers 2."""
    samples, width = 2**19, 2048
    x = torch.zeros(samples, 1)
    job = fusion.Job(
        nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1)), {"input": x, "target": x},
        fusion.SGD(0.1), loss=_square_loss, steps=1, batch_size=samples,
    )  # fmt: skip
    with cluster.submit(job) as run:
        eventually(lambda: run.status().reason, "the coordinator has tried to plan it")
        status = run.status()
        assert status.state is fusion.JobState.QUEUED
        assert status.reason.startswith("memory: ")
        assert "GiB more are needed" in status.reason
        assert "3 with 6 GiB in all" in status.reason
        assert run.cancel("too large").state is fusion.JobState.CANCELLED
    assert not cluster.worker_processes()
    assert psutil.pid_exists(cluster.process("coordinator").pid)
