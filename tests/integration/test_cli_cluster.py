"""The owner's commands against a real coordinator and two real nodes: submit, status, logs, weights, cancel, doctor."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fusion
from fusion.base.errors import JobError, UnreachableError
from fusion.cli.democluster import DemoCluster, free_ports
from fusion.cli.helpers import Helpers
from fusion.cli.jobfile import load_job
from fusion.cli.main import cli, run
from fusion.job.client import Client
from fusion.protocol.job import JobSpec
from fusion.transport import channels

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
                      batch_size=16, micro_batches=4, determinism="strict", threads=1,
                      planner="equal-compute", name="cli-test")
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


Fusion = Callable[..., str]


@pytest.fixture
def command(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fusion:
    """Runs `fusion` here and returns its stdout, or with an expected exit `code` other than 0 its line on stderr."""
    monkeypatch.setenv("FUSION_HOME", str(home))

    def fusion_command(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = run(cli, arguments, "fusion")
        said = capsys.readouterr()
        assert ended == code, said.err
        return said.err if code else said.out

    return fusion_command


def test_a_job_from_submission_to_weights(home: Path, tmp_path: Path, command: Fusion) -> None:
    lines = [json.loads(line) for line in command("submit", str(home / "job.py"), "--json").splitlines()]
    job = lines[0]["job"]
    assert lines[0]["steps"] == 4
    assert [line["step"] for line in lines[1:-1]] == [1, 2, 3, 4]
    assert lines[-1] == {"job": job, "state": "succeeded"}

    reference = load_job(home / "job.py").run_local()
    assert [line["loss"] for line in lines[1:-1]] == reference.losses

    status = json.loads(command("status", job, "--json"))
    assert (status["state"], status["step"], status["steps"], status["name"]) == ("succeeded", 4, 4, "cli-test")
    assert len(status["stages"]) == 2
    assert sum(stage["operators"] for stage in status["stages"]) > 0
    assert [item["job"] for item in json.loads(command("status", "--json"))] == [job]
    assert job in command("status")
    assert "stage 1" in command("status", job)
    log = [json.loads(line) for line in command("logs", job, "-f", "--json").splitlines()]
    assert log
    assert set(log[0]) == {"time_s", "level", "origin", "text"}

    output = tmp_path / "out with space.safetensors"
    assert "wrote" in command("weights", job, "-o", str(output))
    expected = reference.state_dict()
    trained = load_file(output)
    assert set(trained) == set(expected)
    for name, value in expected.items():
        assert trained[name].shape == value.shape, name
        assert torch.equal(trained[name], value), name
    assert "exists already" in command("weights", job, "-o", str(output), code=10)
    before = output.stat().st_mtime_ns
    command("weights", job, "-o", str(output), "--force")
    assert output.stat().st_mtime_ns != before
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    assert "is a directory" in command("weights", job, "-o", str(tmp_path), code=10)

    with fusion.attach(job, credentials=home / "owner") as attached:
        model = load_job(home / "job.py").model
        attached.load_into(model)
        assert torch.equal(model.again.weight, expected["last.weight"])
        assert [step.loss for step in attached.metrics(after_step=2)] == reference.losses[2:]
        assert attached.wait().step == 4


def test_a_job_can_be_cancelled_and_its_end_is_told(home: Path, tmp_path: Path, command: Fusion) -> None:
    said = command("submit", str(home / "job.py"), "--set", "steps=100000", "--detach")
    assert said.startswith("a line of the owner's own\nsubmitted job-")
    job = said.splitlines()[-1].split()[-1]
    assert "weights are there once it has succeeded" in command("weights", job, "-o", str(tmp_path / "w"), code=40)
    with fusion.attach(job, credentials=home / "owner") as attached:
        failures: list[BaseException] = []

        def follow() -> None:
            try:
                for _ in attached.metrics():
                    pass
            except JobError as error:
                failures.append(error)

        follower = threading.Thread(target=follow)
        follower.start()
        assert "cancelled" in command("cancel", job, "--reason", "enough of it")
        follower.join(20)
        assert "enough of it" in str(failures[0])
        with pytest.raises(JobError, match="enough of it"):
            attached.wait()
    assert job in command("cancel", job, code=40)
    assert json.loads(command("status", job, "--json"))["state"] == "cancelled"


def test_doctor_and_errors_against_a_running_coordinator(command: Fusion) -> None:
    checks = {check["name"]: check["status"] for check in json.loads(command("doctor", "--json"))["checks"]}
    assert checks["coordinator"] == "ok"
    assert checks["certificate"] == "ok"
    assert "there is no job" in command("status", "job-zzzzzzzzzz", code=40)
    assert "there are credentials" in command("join", "x", code=10)


def test_b31_a_submission_whose_answer_was_lost_does_not_start_a_second_job(
    home: Path, command: Fusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(home / "job.py", {"steps": 1000})
    real_submit = Client.submit

    def lose_the_answer(self: Client, spec: JobSpec, request_id: str) -> str:
        real_submit(self, spec, request_id)
        raise UnreachableError("the answer was lost")

    before = {item["job"] for item in json.loads(command("status", "--json"))}
    with monkeypatch.context() as patch:
        patch.setattr(Client, "submit", lose_the_answer)
        with pytest.raises(UnreachableError):
            job.submit(credentials=home / "owner")
    with job.submit(credentials=home / "owner") as first, job.submit(credentials=home / "owner") as second:
        made = {item["job"] for item in json.loads(command("status", "--json"))} - before
        assert made == {first.job_id, second.job_id}
        assert len(made) == 2  # a submission that succeeded is over: the next one is a job of its own
        second.cancel()
        first.cancel()


def test_a_live_plan_is_the_one_that_the_coordinator_makes_for_the_same_job(home: Path, command: Fusion) -> None:
    file = home / "planned.py"
    file.write_text(JOB_FILE.replace('planner="equal-compute"', 'planner="equal-number"'))
    job = json.loads(command("submit", str(file), "--json").splitlines()[0])["job"]
    real = json.loads(command("status", job, "--plan", "--json"))["plan"]

    live = json.loads(command("plan", "--job", str(file), "--live", "--method", "equal-number", "--json"))
    parts = [(stage["node"], stage["first_operator"], stage["end_operator"]) for stage in live["stages"]]
    assert parts == [(stage["node"], stage["first_operator"], stage["end_operator"]) for stage in real["stages"]]
    assert {stage["memory_limit_bytes"] for stage in live["stages"]} == {2 * 2**30}
    assert live["left_out"] == []
    assert 0 < live["step_s"] < 1.0

    ours = json.loads(command("plan", "--job", str(file), "--live", "--json"))
    assert ours["step_s"] <= live["step_s"]
    used = {stage["node"] for stage in ours["stages"]} | {item["node"] for item in ours["left_out"]}
    assert used == {"node-0", "node-1"}  # so small a model is as well off on one of them
    assert "bottleneck: " in command("plan", "--job", str(file), "--live")


def test_where_nothing_listens_a_command_says_so_at_once(command: Fusion, monkeypatch: pytest.MonkeyPatch):
    def never(_seconds: float) -> None:
        raise AssertionError("it waits to try again")

    monkeypatch.setattr(channels.time, "sleep", never)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for arguments in (("status",), ("status", "job-aaaaaaaaaa"), ("cancel", "job-aaaaaaaaaa")):
        line = command(*arguments, "--coordinator", address, code=UnreachableError.exit_code)
        assert f"(coordinator {address}): nothing listens there" in line
        assert "fusion-coordinator serve" in line
