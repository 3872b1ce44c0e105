"""The README's commands, as a user types them: from an empty machine to trained weights, and what goes wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fusion.cli.demo import TERMINATED
from fusion.cli.jobfile import load_job
from fusion.cli.main import INTERRUPTED
from tests.support.cluster import (
    WITHIN_S,
    Machine,
    command_line,
    eventually,
    has_loaded,
    is_worker,
    neighbouring_ports,
    ports_of,
    processes_of,
)

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"
NODE_OPTIONS = ("--device", "cpu", "--threads", "1", "--speed", "2e9", "--max-memory", "1GiB")


class World:
    """A coordinator, two nodes and an owner, each a machine with a FUSION_HOME of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.enrolment_port = neighbouring_ports(2)
        self.node_ports = dict(zip(("one", "two"), neighbouring_ports(2), strict=True))
        self.address = f"127.0.0.1:{self.port}"
        self.coordinator = Machine(directory / "coordinator")
        self.nodes = {name: Machine(directory / f"node {name}") for name in self.node_ports}
        self.owner = Machine(directory / "owner")

    def set_up(self) -> None:
        said = self.coordinator.run("fusion-coordinator", "init", "--listen", self.address)
        assert "fusion-coordinator serve" in said
        key = self.coordinator.home / "coordinator" / "ca-key.pem"
        assert key.stat().st_mode & 0o777 == 0o600
        self.coordinator.start("fusion-coordinator", "serve")
        eventually(lambda: "listening on" in self.coordinator.log(), "the coordinator listens")
        for name, node in self.nodes.items():
            join_string = self.coordinator.run("fusion-coordinator", "token", "create").strip()
            assert f"as {name}" in node.run("fusion-node", "join", join_string, "--name", name)
            node.start(
                "fusion-node",
                "start",
                *NODE_OPTIONS,
                "--no-spare-worker",
                "--listen",
                f"127.0.0.1:{self.node_ports[name]}",
            )
        join_string = self.coordinator.run("fusion-coordinator", "token", "create", "--role", "owner").strip()
        assert "joined cluster" in self.owner.run("fusion", "join", join_string, "--name", "ada")
        eventually(lambda: [node["state"] for node in self.list_nodes()] == ["idle"] * 2, "both nodes are idle")

    def list_nodes(self) -> list[dict[str, object]]:
        return list(json.loads(self.coordinator.run("fusion-coordinator", "nodes", "--json")))

    def tear_down(self) -> None:
        machines = [*self.nodes.values(), self.coordinator]
        codes = [machine.stop() for machine in machines]
        left = [command_line(process) for process in processes_of(self.directory)]
        for process in processes_of(self.directory):
            process.kill()
        assert codes == [0, 0, 0], [machine.log()[-500:] for machine in machines]
        assert left == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()


def test_nodes_are_listed_for_programs_and_for_people(world: World) -> None:
    nodes = {node["name"]: node for node in world.list_nodes()}
    assert set(nodes) == {"one", "two"}
    for name, node in nodes.items():
        assert node["address"] == f"127.0.0.1:{world.node_ports[name]}"
        assert (node["device"], node["threads"], node["flops"]) == ("cpu", 1, 2e9)
        assert node["memory_bytes"] == 2**30
    table = world.coordinator.run("fusion-coordinator", "nodes").splitlines()
    assert table[0].split("\t")[:2] == ["NAME", "STATE"]
    assert [row.split("\t")[:2] for row in table[1:]] == [["one", "idle"], ["two", "idle"]]


def test_from_a_job_file_to_trained_weights(world: World, tmp_path: Path) -> None:
    lines = world.owner.run("fusion", "submit", str(EXAMPLE)).splitlines()
    job = lines[0].split()[1]
    assert lines[0] == f"submitted {job} (sequential, 50 steps)"
    assert lines[1].startswith("step  1/50  loss ")
    assert lines[50].startswith("step 50/50  loss ")
    assert "succeeded" in lines[51]

    status = json.loads(world.owner.run("fusion", "status", job, "--json"))
    assert (status["state"], status["step"]) == ("succeeded", 50)
    (stage,) = status["stages"]  # so small a model is fastest on one node
    assert stage["node"] in ("one", "two")
    assert job in world.owner.run("fusion", "status")
    log = world.owner.run("fusion", "logs", job)
    assert f"1 stages on {stage['node']}" in log
    assert "succeeded" in log
    assert [item["state"] for item in json.loads(world.coordinator.run("fusion-coordinator", "jobs", "--json"))] == [
        "succeeded"
    ]

    output = tmp_path / "trained.safetensors"
    world.owner.run("fusion", "weights", job, "-o", str(output))
    trained, example = load_file(output), load_job(EXAMPLE)
    fresh = example.model
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    fresh.load_state_dict(trained, strict=True)
    assert not any(torch.equal(tensor, trained[name]) for name, tensor in before.items())
    batch = example.data.first(64)
    with torch.no_grad():
        loss = example.loss(fresh(batch["input"]), batch)
        fresh.load_state_dict(before)
        untrained = example.loss(fresh(batch["input"]), batch)
    assert loss < 0.1 * untrained


def _check_timeline(world: World, job: str, directory: Path) -> None:
    """What a job's two stages did lies on one line of time: nothing arrives before it was made."""
    trace, picture = directory / "trace.json", directory / "steps.svg"
    options = ["--timeline", "--trace", str(trace), "--svg", str(picture), "--json"]

    def is_measured() -> bool:
        with world.owner.popen("fusion", "status", job, "--timeline") as process:
            process.communicate(timeout=60)
        return process.returncode == 0

    eventually(is_measured, "all stages have told of a step", 60.0)
    found = json.loads(world.owner.run("fusion", "status", job, *options))["timeline"]
    rows = {(row["stage"], row["target"]): row for row in found["per_step_s"]}
    assert set(rows) == {(0, None), (1, None), (0, 1), (1, 0)}
    assert {"forward", "backward", "update"} <= set(rows[0, None])
    assert {"encode", "activation", "decode", "verdict"} <= set(rows[0, 1])
    assert {"encode", "gradient", "decode", "norm"} <= set(rows[1, 0])
    step = found["steps"][-1]
    times = {
        (span["stage"], span["target"], span["kind"], span["micro_batch"]): (span["start_s"], span["end_s"])
        for span in found["spans"]
        if span["step"] == step
    }
    made_s, used_s = times[0, -1, "forward", 0][1], times[1, -1, "forward", 0][0]
    assert made_s < used_s + found["clock_error_s"]
    assert times[1, -1, "backward", 1][1] < times[0, -1, "backward", 1][0] + found["clock_error_s"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) >= len(times)
    assert picture.read_text().startswith("<svg")


LONG_JOB = """
import torch
from torch import nn
import fusion

def make_job(steps=1_000_000):
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return fusion.Job(model, {"input": x, "target": x}, fusion.SGD(1e-3), steps=steps, batch_size=8, micro_batches=2,
                      planner="equal-compute", loss=lambda outputs, batch: (outputs - batch["target"]).square().mean())
"""


def test_a_running_cluster_listens_only_where_the_documents_say_and_only_workers_load_torch(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(LONG_JOB)
    said = world.owner.run("fusion", "submit", str(tmp_path / "job.py"), "--detach")
    job = said.split()[1]

    def is_running() -> bool:
        return bool(json.loads(world.owner.run("fusion", "status", job, "--json"))["step"] >= 2)

    eventually(is_running, "the job runs")
    try:
        coordinator = world.coordinator.process()
        assert ports_of(coordinator) == {world.port, world.enrolment_port}
        assert not has_loaded(coordinator, "libtorch")
        (planner,) = coordinator.children(recursive=True)
        assert ports_of(planner) == set()
        assert not has_loaded(planner, "libtorch")
        for name, node in world.nodes.items():
            daemon = node.process()
            assert ports_of(daemon) == set()
            assert not has_loaded(daemon, "libtorch")
            (worker,) = daemon.children(recursive=True)
            assert is_worker(worker)
            assert ports_of(worker) == {world.node_ports[name]}
            assert has_loaded(worker, "libtorch")
        assert len(processes_of(world.directory)) == 6
        _check_timeline(world, job, tmp_path)
    finally:
        assert "cancelled" in world.owner.run("fusion", "cancel", job, "--reason", "seen enough")
    status = world.owner.run("fusion", "status", job)
    assert "cancelled" in status
    assert "seen enough" in status
    eventually(lambda: len(processes_of(world.directory)) == 4, "both workers have ended")
    for name, node in world.nodes.items():  # the daemons have taken their ports back, to be measured there
        eventually(lambda node=node, name=name: ports_of(node.process()) == {world.node_ports[name]}, "it listens")


def test_the_doctors_say_a_line_for_each_check_and_end_with_1_only_if_one_fails(world: World) -> None:
    node = world.nodes["one"]
    answers = {
        "fusion": world.owner.run("fusion", "doctor"),
        "fusion-node": node.run("fusion-node", "doctor", *NODE_OPTIONS, "--listen", "127.0.0.1:0"),
    }
    wanted = {"python", "torch", "grpcio", "disk", "private key", "certificate", "clock", "coordinator"}
    for program, text in answers.items():
        checks = {line[5:].partition(":")[0]: line[:5].strip() for line in text.splitlines()}
        assert set(checks.values()) <= {"ok", "warn"}, text
        assert wanted | ({"device", "memory", "reachability"} if program == "fusion-node" else set()) <= set(checks)

    elsewhere = ("--coordinator", f"127.0.0.1:{neighbouring_ports(1)[0]}")
    failed = world.owner.run("fusion", "doctor", *elsewhere, code=1)
    (line,) = [line for line in failed.splitlines() if line.startswith("fail ")]
    assert line.startswith("fail coordinator: nothing listens at")
    assert "  -> " in line
    report = json.loads(world.owner.run("fusion", "doctor", *elsewhere, "--json", code=1))
    assert report["ok"] is False
    nobody = Machine(world.directory / "nobody")
    assert "fusion-node join JOINSTRING" in nobody.run("fusion-node", "doctor", *NODE_OPTIONS, code=1)
    assert "fusion join JOINSTRING" in nobody.run("fusion", "doctor", code=1)


def test_bad_input_ends_with_the_exit_code_of_its_family_and_one_line(world: World, tmp_path: Path) -> None:
    nobody, stranger = Machine(tmp_path / "nobody"), Machine(tmp_path / "stranger")
    stranger.run("fusion-coordinator", "init", "--listen", world.address)  # a cluster of his own makes him its owner
    closed = f"127.0.0.1:{neighbouring_ports(1)[0]}"
    (tmp_path / "bad.py").write_text(LONG_JOB.replace("batch_size=8", "batch_size=-8"))
    used_up = world.coordinator.run("fusion-coordinator", "token", "create").strip()
    nobody.run("fusion-node", "join", used_up)
    # as long as it waits for a coordinator that is not there, the others are tried
    unanswered = world.owner.popen("fusion", "status", "--coordinator", closed)
    for machine, command, code in (
        (world.owner, ("fusion", "status", "job-aaaaaaaaaa"), 40),
        (world.owner, ("fusion", "logs", "no such job"), 40),
        (world.owner, ("fusion", "cancel", "job-aaaaaaaaaa"), 40),
        (world.owner, ("fusion", "weights", "job-aaaaaaaaaa", "-o", str(tmp_path / "w")), 40),
        (world.owner, ("fusion", "status", "--colour"), 2),
        (world.owner, ("fusion", "statsu"), 2),
        (world.owner, ("fusion", "submit", str(tmp_path / "bad.py")), 10),
        (world.owner, ("fusion", "submit", str(tmp_path / "none.py")), 10),
        (world.owner, ("fusion", "status", "--coordinator", "127.0.0.1:port"), 10),
        (nobody, ("fusion", "status"), 20),
        (stranger, ("fusion", "status"), 20),
        (stranger, ("fusion", "submit", str(EXAMPLE)), 20),
        (world.nodes["one"], ("fusion-node", "start", "--max-memory", "lots"), 10),
        (world.nodes["one"], ("fusion-node", "start", "--speed", "-1"), 2),
        (world.nodes["one"], ("fusion-node", "start"), 40),  # it runs already
        (nobody, ("fusion-node", "join", used_up, "--force"), 20),
        (nobody, ("fusion-node", "join", "fusion-join-1.nonsense"), 10),
        (nobody, ("fusion-coordinator", "serve"), 10),
        (world.coordinator, ("fusion-coordinator", "init"), 10),
    ):
        says = machine.fails(*command, code=code)
        assert says.startswith(f"{command[0]}: "), (command, says)
        assert says.count("\n") == 1, (command, says)
    out, err = unanswered.communicate(timeout=WITHIN_S)
    assert (unanswered.returncode, out) == (30, "")
    assert err.startswith("fusion: ")
    assert closed in err
    assert err.count("\n") == 1
    assert [node["state"] for node in world.list_nodes()] == ["idle"] * 2


def test_the_demo_prints_one_json_object_whose_curve_is_the_reference(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home", TMPDIR=str(tmp_path))
    out = machine.run("fusion", "demo", "--nodes", "2", "--steps", "2", "--no-wan", "--json")
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["reference_max_abs_diff"] == 0.0
    assert report["steps"] == 2
    assert report["last_loss"] < report["first_loss"]
    assert report["tokens_per_s"] > 0
    assert report["bytes_per_step"] > 0
    assert [stage["node"] for stage in report["stages"]] == ["node-0", "node-1"]
    assert all(stage["operators"] > 0 and stage["parameters"] > 0 for stage in report["stages"])
    assert list(tmp_path.glob("fusion-*")) == []  # nothing of it is left


CLUSTER_FILE = """
[[nodes]]
name = "home"
speed = "2G"
memory = "1GiB"
count = 2
site = "home"
[[nodes]]
name = "far"
speed = "0.1G"
memory = "1GiB"
[[sites]]
name = "home"
rate = "100 Mbit/s"
delay = "1 ms"
[[links]]
between = ["home", "far"]
connect = false
"""


def test_a_cluster_file_is_emulated_and_its_plan_compared_with_what_steps_take(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER_FILE)
    machine = Machine(tmp_path / "home", TMPDIR=str(tmp_path))
    report = json.loads(machine.run("fusion", "demo", "--cluster", str(file), "--steps", "2", "--json"))
    assert report["reference_max_abs_diff"] == 0.0
    found = report["prediction"]
    assert found["left_out"] == ["far"]  # it cannot connect to anybody
    assert {stage["node"] for stage in found["stages"]} == {"home-1", "home-2"}
    for stage in found["stages"]:
        assert 0 < stage["predicted_s"] <= 1.001 * stage["computed_s"]  # a pass is stretched, never shortened
    # about 12 x (12 x 64^2 + attention) weights, 6 operations each, 1024 tokens, at 2 GFLOPS
    assert sum(stage["predicted_s"] for stage in found["stages"]) == pytest.approx(4.43e9 / 2e9, rel=0.05)
    assert found["measured_s"] >= max(stage["predicted_s"] for stage in found["stages"])
    assert min(link["rate_bytes_per_s"] for link in found["links"]) < 1.3 * 12.5e6  # as shaped, and as probed
    assert {link["shaped"] for link in report["links"]} == {"100 Mbit/s, 2 ms round trip"}
    assert list(tmp_path.glob("fusion-*")) == []


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "training"), (signal.SIGTERM, "starting"), (signal.SIGKILL, "starting")]
)
def test_nothing_of_a_demo_outlives_it(number: signal.Signals, moment: str, tmp_path: Path) -> None:
    """Ctrl-C leaves neither process nor directory; SIGKILL no process."""
    machine = Machine(tmp_path / "home", TMPDIR=str(tmp_path))
    wanted: Callable[[psutil.Process], bool] = is_worker if moment == "training" else _is_daemon
    with machine.popen("fusion", "demo", "--nodes", "2", "--no-wan") as demo:
        eventually(lambda: sum(map(wanted, _demo_processes(tmp_path))) == 2, f"the demo is {moment}")
        demo.send_signal(number)
        out, err = demo.communicate(timeout=WITHIN_S)
    assert "Traceback" not in out + err
    eventually(lambda: not _demo_processes(tmp_path), "all of its processes are gone")
    if number is signal.SIGKILL:
        return
    assert demo.returncode == {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}[number], err
    assert list(tmp_path.glob("fusion-demo-*")) == []


def _demo_processes(directory: Path) -> list[psutil.Process]:
    return [
        process
        for process in processes_of(directory)
        if "fusion.cli.child" in command_line(process) or is_worker(process)
    ]


def _is_daemon(process: psutil.Process) -> bool:
    return "fusion_node.cli" in process.cmdline()
