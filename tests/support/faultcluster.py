"""A cluster whose processes fail on demand and write histories, and a job whose undisturbed run is known bit by bit."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

import fusion
from fusion.base.ids import random_id
from fusion.cli.democluster import DemoNode
from fusion.cli.helpers import Helper
from fusion.graph.partition import partition
from fusion.job.client import Client
from fusion.observe import failpoints
from fusion.runtime.local import compute_settings, make_runners
from fusion.security.enrolment import enrol, parse_join_string
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from fusion_node.stagestate import tensor_digest
from tests.support import models
from tests.support.chaos import COORDINATOR, Chaos
from tests.support.cluster import Cluster, KeptHelpers, eventually
from tests.support.validators import History, Reference

MICRO_BATCHES = 4
STEPS = 40


def paced(micro_batch_s: float, *points: str) -> str:
    """Return failpoints, and one more that lets the first stage take its time, so that a run can be disturbed."""
    return ";".join([f"stage.forward@stage=0:sleep={micro_batch_s}*all", *points])


class FaultHelpers(KeptHelpers):
    """Helpers with variables of their own on top of the cluster's."""

    def __init__(self, logs: Path, common: Mapping[str, str]) -> None:
        super().__init__(logs)
        self.common = dict(common)
        self.own: dict[str, dict[str, str]] = {}  #: by helper's name; counts from its next start on

    def start(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Helper:
        return super().start(name, module, arguments, {**environment, **self.common, **self.own.get(name, {})})


class FaultCluster(Cluster):
    """As Cluster, with histories, failpoints for its workers, and with `chaos` links that fail on demand.

    settings: of the coordinator, other than the product's. variables: by process name, more of its environment.
    arguments: by node, more of its command line. emulated_flops: the nodes stand for devices of that speed.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 4,
        *,
        chaos: bool = False,
        settings: Mapping[str, Any] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        arguments: Mapping[str, Sequence[str]] | None = None,
        emulated_flops: float = 0.0,
    ) -> None:
        super().__init__(directory, nodes)
        self.history = directory / "history"
        self.points = directory / "failpoints"
        self.set_failpoints("")
        common = {"FUSION_TEST": "1", "FUSION_HISTORY": str(self.history), "FUSION_FAILPOINTS": f"@{self.points}"}
        common["FUSION_STATE_DIR"] = str(directory / "states")
        if settings:
            common["FUSION_SETTINGS"] = json.dumps(dict(settings))
        self.helpers = FaultHelpers(directory / "logs", common)
        self.helpers.own = {name: dict(values) for name, values in (variables or {}).items()}
        self._demo._helpers = self.helpers
        self._arguments = dict(arguments or {})
        self._emulated_flops = emulated_flops
        self.chaos = Chaos({COORDINATOR: self.address, **self.nodes}) if chaos else None
        self._coordinator_fails = False  # it has read failpoints, and would fail again once they are counted anew
        self._descriptors: dict[str, int] = {}  # of idle processes that have done nothing yet
        self._bytes: dict[str, int] = {}  # of such as have done one job: their libraries are loaded by then

    def __enter__(self) -> FaultCluster:
        try:
            self._demo.start_coordinator()
            if self.chaos is not None:
                self.chaos.start()
            for name in self.nodes:
                self.start_node(name)
            self._demo.wait_for_nodes()
        except BaseException:
            self.helpers.stop()
            raise
        return self

    def __exit__(self, *arguments: object) -> None:
        try:
            if self.chaos is not None:
                self.chaos.heal()
            super().__exit__(*arguments)
        finally:
            if self.chaos is not None:
                self.chaos.close()

    def start_node(self, name: str, *more: str) -> None:
        """Join as a node, over the failing links if there are any, and start its daemon."""
        home, address = self.directory / name, self.nodes[name]
        arguments = ["start", "--name", name, "--home", str(home), "--listen", address, "--advertise", address]
        flops = self._emulated_flops
        arguments += (DemoNode(name, flops, emulated=True) if flops else DemoNode(name)).options()
        self._join(name, home)
        if self.chaos is not None:
            routes = self.directory / f"routes-{name}.json"
            routes.write_text(json.dumps(self.chaos.routes[name]))
            arguments += ["--routes", str(routes)]
        arguments += [*self._arguments.get(name, ()), *more]
        self.helpers.start(name, "fusion_node.cli", arguments, self.environment)

    def _join(self, name: str, home: Path) -> None:
        with Client(self.address, self.directory / "coordinator" / "admin") as client:
            stub: Any = coordinator_pb2_grpc.AdminStub(client.channel)  # type: ignore[no-untyped-call]
            request = coordinator_pb2.CreateTokenRequest(request_id=random_id("req-", 20), role="node", valid_s=600.0)
            join_string = stub.CreateToken(request, timeout=10.0, wait_for_ready=True).join_string
        enrol(parse_join_string(join_string), name).save(home)
        if self.chaos is not None:
            path = home / "identity.json"
            identity = json.loads(path.read_text())
            identity["coordinator"] = self.chaos.routes[name][self.address]
            path.write_text(json.dumps(identity))

    # ---- scenarios ----

    def set_failpoints(self, text: str) -> None:
        """What the workers that start from now on fail at; counted anew."""
        self.points.write_text(text)
        if self.history.exists():
            for mark in self.history.glob("fired-*"):
                mark.unlink()

    def restart_coordinator(self, points: str = "") -> None:
        """Start the coordinator anew, which fails at these points, as do the workers of later jobs."""
        self.set_failpoints(points)
        self._coordinator_fails = bool(points)
        self.terminate(COORDINATOR)
        self.helpers.again(COORDINATOR)
        eventually(lambda: set(self.node_states().values()) == {"idle"}, "the nodes are back")

    def heal(self) -> None:
        """As in Cluster, with whole links and nothing to fail at."""
        self.set_failpoints("")
        if self._coordinator_fails:
            self._coordinator_fails = False
            self.kill(COORDINATOR)
        if self.chaos is not None:
            self.chaos.heal()
        for process in self.processes():
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()
        super().heal()
        self._descriptors = self._descriptors or {name: fds for name, (fds, _) in self._measure().items()}

    def events(self, job: str) -> History:
        """Return the histories of all processes up to now."""
        return History.load(self.history, job)

    def validate(
        self, run: fusion.Run, job: fusion.Job, *, last_step: int | None = None, exact: bool = True
    ) -> History:
        """Run the validators V1-V7 over the histories of a job; returns them."""
        history = self.events(run.job_id)
        history.check(reference(job.steps) if exact else None, MICRO_BATCHES, last_step)
        return history

    def finishes(self, run: fusion.Run, job: fusion.Job, within_s: float = 120.0, points: str = "") -> History:
        """Wait for the job's success, and check that it was as if nothing had happened (V1-V7, and what users see)."""
        run.wait(timeout=within_s)
        known = reference(job.steps, points)
        seen = [(step.step, step.loss) for step in run.metrics()]
        right = list(zip(range(1, job.steps + 1), known.losses, strict=True))
        assert seen == right, f"the owner misses {sorted({*right} - {*seen})} and sees {sorted({*seen} - {*right})}"
        history = self.events(run.job_id)
        history.check(known, MICRO_BATCHES, job.steps)
        return history

    def check_failures(self, run: fusion.Run, history: History, *names: str) -> list[str]:
        """V9: the job's log has one line for each failure, with its node and its cause; returns the reasons."""
        reasons = history.v9_failures(*names)
        told = [line for line in run.logs() if line.origin == COORDINATOR and line.text.startswith("recovers: ")]
        assert [line.text for line in told] == [f"recovers: {reason}" for reason in reasons], "V9"
        assert {line.level for line in told} <= {"error"}
        return reasons

    def _measure(self) -> dict[str, tuple[int, int]]:
        return {
            name: (process.num_fds(), process.memory_info().rss)
            for name in self.helpers.named
            if (process := self.process(name)).is_running()
        }

    def check_nothing_is_left(self) -> None:
        """V8: no worker, no half-written file, no state of a job, and daemons and coordinator as large as they were."""
        self.heal()
        eventually(self._idle, "V8 all nodes are idle", 30.0)
        eventually(lambda: not self._files_left(), f"V8 left behind: {self._files_left()}", 20.0)
        sizes = self._measure()
        self._bytes = self._bytes or {name: rss for name, (_, rss) in sizes.items()}
        for name, (fds, rss) in sizes.items():
            had, had_bytes = self._descriptors.get(name, fds), self._bytes.get(name, rss)
            assert fds <= had + 12, f"V8 {name} has {fds} descriptors, had {had}"
            assert rss <= had_bytes * 1.05 + 16 * 2**20, f"V8 {name} has {rss >> 20} MiB, had {had_bytes >> 20}"

    def _files_left(self) -> list[Path]:
        half = [path for path in self.directory.rglob("*") if path.suffix in (".tmp", ".part") or ".tmp-" in path.name]
        return half + list((self.directory / "states").rglob("*.safetensors"))

    @contextmanager
    def reviving(self, name: str, pause_s: float = 0.0) -> Iterator[list[float]]:
        """Start a process again whenever it has ended by itself during the block; yields the times of that."""
        times: list[float] = []
        over = threading.Event()

        def revive() -> None:
            while not over.wait(0.05):
                if self.helpers.named[name].process.poll() is not None:
                    times.append(time.monotonic())
                    time.sleep(pause_s)
                    self.helpers.again(name)

        thread = threading.Thread(target=revive, name="reviving", daemon=True)
        thread.start()
        try:
            yield times
        finally:
            over.set()
            thread.join(20)

    def stop_process(self, name: str, *, worker: bool = False) -> psutil.Process:
        """SIGSTOP a daemon or the coordinator with its worker, or with `worker` the worker alone; returns the first."""
        process = self.workers()[name] if worker else self.process(name)
        for each in [process, *([] if worker else process.children(recursive=True))]:
            each.suspend()
        return process

    def continue_process(self, process: psutil.Process) -> None:
        """SIGCONT to what `stop_process` stopped."""
        for each in [*process.children(recursive=True), process]:
            each.resume()


def make_job(steps: int = STEPS, stages: int = 4, **settings: Any) -> fusion.Job:
    """A transformer of 200,000 parameters with tied embeddings and dropout: strict, four micro-batches."""
    rows = _rows()
    torch.manual_seed(1)
    model = models.LanguageModel(layers=4, width=64, dropout=0.1, length=16)
    values = {"steps": steps, "batch_size": 8, "micro_batches": MICRO_BATCHES, "stages": stages, "threads": 1}
    values |= {"determinism": "strict", "grad_clip": 1.0, "seed": 3, "planner": "equal-compute", "replan": False}
    return fusion.Job(model, rows, fusion.AdamW(3e-3), **(values | settings))


def _rows() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, models.VOCABULARY, (32, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def reference(steps: int = STEPS, points: str = "") -> Reference:
    """Return the undisturbed run of `make_job`, computed here, once; `points`: failpoints of its only stage.

    No step depends on how many there will be.
    """
    known = _reference(max(steps, STEPS), points)
    return Reference(known.losses[:steps], known.digests[:steps])


@cache
def _reference(steps: int, points: str) -> Reference:
    losses: list[float] = []
    digests: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        made = make_job(steps).prepare(Path(directory))
        data = made.data.open("data")
        with compute_settings(made.spec), failpoints.reached(points):
            parts = partition(made.graph, [])

            def done(metrics: Any) -> None:
                losses.append(metrics.loss)
                digests.append({name: tensor_digest(tensor) for name, tensor in runner.state().items()})

            (runner,) = make_runners(made.spec, parts, made.tensors, data, None, done)
            while not runner.finished:
                runner.advance()
    return Reference(losses, digests)


def wait_for_step(run: fusion.Run, step: int, within_s: float = 60.0) -> None:
    """Return once the coordinator knows that `step` is done."""
    eventually(lambda: run.status().step >= step, f"step {step} is done ({run.status()})", within_s)
