"""The owner's commands against a real coordinator and two real nodes: submit, status, logs, weights, cancel, doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fusion
from fusion.base.errors import JobError
from fusion.cli.democluster import DemoCluster
from fusion.cli.helpers import Helpers
from fusion.cli.jobfile import load_job

pytestmark = pytest.mark.slow

JOB_FILE = """
import torch
from torch import nn
import fusion

print("a line of the owner's own")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.again, self.unused = self.last, nn.Linear(2, 2)

    def forward(self, x, y):
        return (self.last(torch.relu(self.norm(self.first(x)))) - y).square().mean()

def make_job(steps=4):
    torch.manual_seed(5)
    x = torch.rand(64, 4)
    return fusion.Job(Net(), {"x": x, "y": x.sum(1, keepdim=True)}, fusion.SGD(0.1, momentum=0.9), steps=steps,
                      batch_size=16, micro_batches=4, determinism="strict", threads=1, name="cli-test")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running cluster; the directory is the owner's FUSION_HOME, with a job file in it."""
    directory = tmp_path_factory.mktemp("cluster")
    with Helpers(directory / "logs") as helpers:
        cluster = DemoCluster(helpers, directory, 2)
        cluster.start_coordinator()
        cluster.start_nodes({})
        (directory / "job.py").write_text(JOB_FILE)
        cluster.wait_for_nodes()
        yield directory


def _fusion(home: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", *arguments],
        env=os.environ | {"FUSION_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_job_from_submission_to_weights(home: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in _fusion(home, "submit", str(home / "job.py"), "--json").splitlines()]
    job = lines[0]["job"]
    assert lines[0]["steps"] == 4
    assert [line["step"] for line in lines[1:-1]] == [1, 2, 3, 4]
    assert lines[-1] == {"job": job, "state": "succeeded"}

    reference = load_job(home / "job.py").run_local()
    assert [line["loss"] for line in lines[1:-1]] == reference.losses

    status = json.loads(_fusion(home, "status", job, "--json"))
    assert (status["state"], status["step"], status["steps"], status["name"]) == ("succeeded", 4, 4, "cli-test")
    assert len(status["stages"]) == 2
    assert sum(stage["operators"] for stage in status["stages"]) > 0
    assert [item["job"] for item in json.loads(_fusion(home, "status", "--json"))] == [job]
    assert job in _fusion(home, "status")
    assert "stage 1" in _fusion(home, "status", job)
    log = [json.loads(line) for line in _fusion(home, "logs", job, "-f", "--json").splitlines()]
    assert log
    assert set(log[0]) == {"time_s", "level", "origin", "text"}

    output = tmp_path / "out with space.safetensors"
    assert "wrote" in _fusion(home, "weights", job, "-o", str(output))
    expected = reference.state_dict()
    trained = load_file(output)
    assert set(trained) == set(expected)
    for name, value in expected.items():
        assert trained[name].shape == value.shape, name
        assert torch.equal(trained[name], value), name
    assert "exists already" in _fusion(home, "weights", job, "-o", str(output), code=10)
    before = output.stat().st_mtime_ns
    _fusion(home, "weights", job, "-o", str(output), "--force")
    assert output.stat().st_mtime_ns != before
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert "is a directory" in _fusion(home, "weights", job, "-o", str(tmp_path), code=10)

    with fusion.attach(job, credentials=home / "owner") as run:
        model = load_job(home / "job.py").model
        run.load_into(model)
        assert torch.equal(model.again.weight, expected["last.weight"])
        assert [step.loss for step in run.metrics(after_step=2)] == reference.losses[2:]
        assert run.wait().step == 4


def test_a_job_can_be_cancelled_and_its_end_is_told(home: Path, tmp_path: Path) -> None:
    said = _fusion(home, "submit", str(home / "job.py"), "--set", "steps=100000", "--detach")
    assert said.startswith("a line of the owner's own\nsubmitted job-")
    job = said.splitlines()[-1].split()[-1]
    assert "weights are there once it has succeeded" in _fusion(home, "weights", job, "-o", str(tmp_path / "w"), code=40)
    with fusion.attach(job, credentials=home / "owner") as run:
        failures: list[BaseException] = []

        def follow() -> None:
            try:
                for _ in run.metrics():
                    pass
            except JobError as error:
                failures.append(error)

        follower = threading.Thread(target=follow)
        follower.start()
        assert "cancelled" in _fusion(home, "cancel", job, "--reason", "enough of it")
        follower.join(20)
        assert "enough of it" in str(failures[0])
        with pytest.raises(JobError, match="enough of it"):
            run.wait()
    assert job in _fusion(home, "cancel", job, code=40)
    assert json.loads(_fusion(home, "status", job, "--json"))["state"] == "cancelled"


def test_doctor_and_errors_against_a_running_coordinator(home: Path) -> None:
    checks = {check["name"]: check["status"] for check in json.loads(_fusion(home, "doctor", "--json"))["checks"]}
    assert checks["coordinator"] == "ok"
    assert checks["certificate"] == "ok"
    assert "there is no job" in _fusion(home, "status", "job-zzzzzzzzzz", code=40)
    assert "there are credentials" in _fusion(home, "join", "x", code=10)
