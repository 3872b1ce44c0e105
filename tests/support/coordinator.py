"""A real coordinator process, and node daemons played by a script over real RPCs.

Run as a program it is the coordinator: `python tests/support/coordinator.py STATE_DIR LISTEN SETTINGS_JSON`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    "heartbeat_s": 0.2,
    "self_fence_s": 1.5,
    "lease_s": 2.0,
    "blame_wait_s": 0.5,
    "settle_s": 0.3,
    "ping_s": 0.3,
    "sweep_s": 0.05,
    "flush_s": 0.02,
    "recover_wait_s": 3.0,
    "rejoin_wait_s": 0.5,
    "upload_stall_s": 5.0,
    "probes": False,  # the fake nodes measure nothing
}


class CoordinatorProcess:
    """A cluster in `directory` and the process that serves it. Timings are turned down unless `settings` say so."""

    def __init__(self, directory: Path, settings: dict[str, Any] | None = None) -> None:
        from fusion.base.clock import SystemClock
        from fusion_coordinator.statedir import StateDir, initialise

        self.directory = directory
        self.settings = {**QUICK, **(settings or {})}
        self.process: subprocess.Popen[str] | None = None
        self.address = self.enrol_address = ""
        listen = "127.0.0.1:0"
        self.config, _ = initialise(directory, directory / "owner", "test", listen, [], SystemClock())
        self.ca = StateDir(directory).ca(self.config)
        self._log = directory / "log.txt"

    def start(self) -> None:
        """Start the process and return once it listens; after a restart on the ports it had."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "coordinator")])}
        listen = self.address or "127.0.0.1:0"
        command = [sys.executable, __file__, str(self.directory), listen, json.dumps(self.settings)]
        command.append(self.enrol_address)
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("{"), f"the coordinator did not start:\n{self.log()}"
        running = json.loads(line)
        self.address, self.enrol_address = running["address"], running["enrol_address"]

    def log(self) -> str:
        """What it wrote to stderr so far."""
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def __enter__(self) -> CoordinatorProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()

    def credentials(self, role: str, name: str = "somebody") -> Any:
        """Credentials straight from the CA, without enrolment."""
        from fusion.security.credentials import Role

        return self.ca.new_credentials(Role(role), name, self.address, time.time())

    def admin(self) -> Any:
        """The operator's credentials."""
        from fusion.security.credentials import Credentials

        return Credentials.load(self.directory / "admin")

    def channel(self, credentials: Any) -> Any:
        """An open channel; the caller closes it."""
        from fusion.security.tls import coordinator_server_name
        from fusion.transport.channels import open_channel

        return open_channel(self.address, credentials, coordinator_server_name(self.config.cluster))


def stubs(channel: Any) -> Any:
    """All stubs of a channel: `.node`, `.jobs`, `.blobs`, `.admin`."""
    from types import SimpleNamespace

    from fusion.wire.v1 import coordinator_pb2_grpc, node_pb2_grpc

    return SimpleNamespace(
        node=node_pb2_grpc.NodeControlStub(channel),
        jobs=coordinator_pb2_grpc.JobsStub(channel),
        blobs=coordinator_pb2_grpc.BlobsStub(channel),
        admin=coordinator_pb2_grpc.AdminStub(channel),
    )


def request_id() -> str:
    """A fresh one."""
    return str(uuid.uuid4())


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Return the first true value of `condition`; fail with `what` if there is none in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


class FakeNode:
    """Speaks to the coordinator as a daemon does, but does only what it is told."""

    def __init__(
        self,
        coordinator: CoordinatorProcess,
        name: str,
        *,
        credentials: Any = None,
        torch: str = "2.13.0",
        **hardware: Any,
    ) -> None:
        self.coordinator, self.name, self.torch = coordinator, name, torch
        self.hardware = {"memory_bytes": 2**33, "flops": 1e10, "threads": 2, "device": "cpu", **hardware}
        self.credentials = credentials or coordinator.credentials("node", name)
        self.channel = coordinator.channel(self.credentials)
        self.stub = stubs(self.channel).node
        self.commands: queue.Queue[Any] = queue.Queue()
        self.incarnation = 0
        self.job, self.epoch, self.step = "", 0, 0
        self._sequence = 0
        self._watch: Any = None
        self._threads: list[threading.Thread] = []
        self._silent = threading.Event()
        self.watch_error: Any = None
        self.kept: list[Any] = []  #: the states that it says it keeps, when it is asked
        self.answers_for_states = True
        self.contents: dict[str, bytes] = {}

    @property
    def identity(self) -> str:
        """The node id."""
        return self.credentials.identity

    def register(self, address: str = "127.0.0.1:7445", **fields: Any) -> Any:
        """Register and remember the incarnation."""
        from fusion.wire.v1 import node_pb2

        hardware = node_pb2.Hardware(torch_version=self.torch, **self.hardware)
        request = node_pb2.RegisterRequest(
            **{"request_id": request_id(), "name": self.name, "address": address, "hardware": hardware, "protocol": 1}
            | fields
        )
        answer = self.stub.Register(request, timeout=10)
        self.incarnation = answer.incarnation
        return answer

    def beat(self) -> Any:
        """Send one heartbeat."""
        from fusion.wire.v1 import node_pb2

        self._sequence += 1
        return self.stub.Heartbeat(
            node_pb2.HeartbeatRequest(
                incarnation=self.incarnation,
                sequence=self._sequence,
                job_id=self.job,
                epoch=self.epoch,
                step=self.step,
                wall_clock_s=time.time(),
            ),
            timeout=10,
        )

    def watch(self) -> None:
        """Open the Watch stream and return once it stands; commands other than pings arrive in `commands`."""
        from fusion.wire.v1 import node_pb2

        call = self.stub.Watch(node_pb2.WatchRequest(incarnation=self.incarnation))
        self._watch = call
        first = next(call)
        assert first.WhichOneof("body") in ("ping", "assign", "stop", "report_states")
        self._take(first)
        self._start(lambda: self._listen(call))

    def _listen(self, call: Any) -> None:
        import grpc

        try:
            for command in call:
                self._take(command)
        except grpc.RpcError as error:
            self.watch_error = error

    def _take(self, command: Any) -> None:
        """Keep a command for the test; being asked for states is answered at once."""
        if command.WhichOneof("body") == "report_states":
            if self.answers_for_states:
                self._start(lambda: self._answer_for_states())
        elif command.WhichOneof("body") != "ping":
            self.commands.put(command)

    def _answer_for_states(self) -> None:
        import grpc

        with contextlib.suppress(grpc.RpcError, ValueError):  # the coordinator died, or this node
            self.report_states()

    def report_states(self) -> None:
        """Say which states it keeps."""
        from fusion.wire.v1 import node_pb2

        report = node_pb2.StatesReport(incarnation=self.incarnation, states=self.kept)
        self.stub.ReportStates(report, timeout=10)

    def keep(self, job: str, epoch: int, stage: int, step: int, content: bytes) -> bytes:
        """Keep the state of a stage, to be named in the next report; returns its content."""
        from fusion.base.digest import BlobHasher
        from fusion.wire.v1 import node_pb2

        hasher = BlobHasher()
        hasher.update(content)
        state = node_pb2.KeptState(job_id=job, epoch=epoch, stage=stage, step=step)
        state.state.digest, state.state.size_bytes = hasher.hexdigest(), len(content)
        self.kept.append(state)
        self.contents[state.state.digest] = content
        return content

    def skip(self, kind: str) -> None:
        """Drop the commands of this kind that have come so far."""
        found = list(self.commands.queue)
        self.commands.queue.clear()
        self.commands.queue.extend(command for command in found if command.WhichOneof("body") != kind)

    def upload_states(self, timeout_s: float = 15.0) -> list[str]:
        """Wait for the order to upload states, and do it; returns their digests."""
        from fusion.transport.blobs import BlobClient

        order = self.next("upload", timeout_s)
        for digest in order.digests:
            BlobClient(self.channel).upload_bytes(self.contents[digest])
        return list(order.digests)

    def keep_beating(self, interval_s: float = 0.2) -> None:
        """Send heartbeats until `die` or `fall_silent`."""
        import grpc

        def beat() -> None:
            while not self._silent.wait(interval_s):
                try:
                    self.beat()
                except (grpc.RpcError, ValueError):
                    continue

        self._silent.clear()
        self._start(beat)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> FakeNode:
        """Register, watch and keep beating."""
        self.register()
        self.watch()
        self.keep_beating()
        return self

    def fall_silent(self) -> None:
        """No more heartbeats; connections stay, as of a machine that hangs."""
        self._silent.set()

    def drop_watch(self) -> None:
        """Cancel the Watch stream."""
        self._watch.cancel()

    def die(self) -> None:
        """Everything ends at once, as of a killed process."""
        self._silent.set()
        self.channel.close()
        for thread in self._threads:
            thread.join(10)

    def next(self, kind: str, timeout_s: float = 15.0) -> Any:
        """Return the next command, which must be of this kind. To stop may be told again, and changes nothing then."""
        command = self.commands.get(timeout=timeout_s)
        while kind != "stop" and command.WhichOneof("body") == "stop":
            command = self.commands.get(timeout=timeout_s)
        assert command.WhichOneof("body") == kind, command
        return getattr(command, kind)

    def assigned(self, timeout_s: float = 15.0) -> Any:
        """Wait for an assignment and take it up."""
        assignment = self.next("assign", timeout_s)
        self.job, self.epoch = assignment.job_id, assignment.plan.epoch
        self.stage = assignment.stage
        return assignment

    def report(self, state: str, detail: str = "", /, **fields: Any) -> None:
        """Report the assigned stage's state."""
        from fusion.wire.v1 import node_pb2

        message = {
            "request_id": request_id(),
            "job_id": self.job,
            "epoch": self.epoch,
            "stage": self.stage,
            "state": node_pb2.StageState.Value(f"STAGE_STATE_{state.upper()}"),
            "detail": detail,
            "incarnation": self.incarnation,
            "peer_stage": -1,
        }
        self.stub.ReportStage(node_pb2.StageReport(**message | fields), timeout=10)

    def fail(self, detail: str, cause: str = "error", peer_stage: int = -1) -> None:
        """Report the failure of the assigned stage."""
        self.report("failed", detail, cause=cause, peer_stage=peer_stage)

    def report_steps(self, first: int, last: int, *, loss: bool, **fields: Any) -> None:
        """Report steps of the assigned stage; `loss`: as the loss stage."""
        from fusion.wire.v1 import node_pb2

        steps = []
        for step in range(first, last + 1):
            part = node_pb2.StageStep(stage=self.stage, step=step, step_s=0.1, learning_rate=0.5, samples=4, **fields)
            part.sent.add(target=abs(1 - self.stage), bytes=100)
            if loss:
                part.loss = 10.0 - step
            if self.stage == 0:
                part.grad_norm = float(step)
            steps.append(part)
        report = node_pb2.MetricsReport(job_id=self.job, epoch=self.epoch, incarnation=self.incarnation, steps=steps)
        self.stub.ReportMetrics(report, timeout=10)

    def finish(self, weights: Any) -> None:
        """Report the assigned stage as finished."""
        self.report("finished", weights=weights)
        self.job = ""


class FakeOwner:
    """Somebody who submits jobs."""

    def __init__(self, coordinator: CoordinatorProcess, name: str = "me", role: str = "owner") -> None:
        from fusion.transport.blobs import BlobClient

        self.credentials = coordinator.credentials(role, name)
        self.channel = coordinator.channel(self.credentials)
        self.stubs = stubs(self.channel)
        self.blobs = BlobClient(self.channel)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def cancel_all(self) -> None:
        """Cancel the jobs that have not ended: they would take the nodes of the next test."""
        from fusion.wire.v1 import coordinator_pb2

        for status in self.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=10).jobs:
            if not status.finished_wall_s:
                self.cancel(status.job_id)

    def upload(self, content: bytes) -> Any:
        """Store bytes; returns the wire's reference."""
        from fusion.protocol.job import blob_to_proto

        return blob_to_proto(self.blobs.upload_bytes(content))

    def job(self, layers: int = 4, **settings: Any) -> Any:
        """A JobSpec message for a chain of `layers` linear layers, with everything that it names uploaded."""
        import numpy
        from safetensors.numpy import save

        from fusion.graph.dag import InputKind
        from fusion.protocol.graph import graph_to_proto
        from fusion.wire.v1 import job_pb2, tensor_pb2
        from tests.support.graphs import chain

        graph = chain(layers)
        weights = {
            item.name: numpy.zeros(graph.values[item.value].spec.shape, dtype=numpy.float32)
            for item in graph.inputs
            if item.kind is InputKind.PARAMETER
        }
        spec = job_pb2.JobSpec(
            name="chain",
            graph=self.upload(graph_to_proto(graph).SerializeToString()),
            weights=self.upload(save(weights)),
            optimizer=job_pb2.Optimizer(kind="adamw", learning_rate=0.1),
            lr_schedule=job_pb2.LrSchedule(kind="constant"),
            batch_size=4,
            micro_batches=2,
            steps=10,
            determinism="fast",
            precision="fp32",
            schedule="1f1b",
            torch_version="2.13.0",
            data=job_pb2.Data(samples=8),
        )
        field = spec.data.fields.add(name="x", sample=tensor_pb2.TensorSpec(dtype="float32", shape=[4]))
        field.rows.CopyFrom(job_pb2.RowSource(file=0, tensor="x"))
        rows = save({"x": numpy.zeros((8, 4), dtype=numpy.float32)})
        spec.data.files.add().blob.CopyFrom(self.upload(rows))
        for name, value in settings.items():
            if isinstance(value, list | tuple):
                del getattr(spec, name)[:]
                getattr(spec, name).extend(value)
            else:
                setattr(spec, name, value)
        return spec

    def submit(self, spec: Any, request: str = "") -> str:
        """Submit; returns the job id."""
        from fusion.wire.v1 import coordinator_pb2

        message = coordinator_pb2.SubmitRequest(request_id=request or request_id(), spec=spec)
        return self.stubs.jobs.Submit(message, timeout=20).job_id

    def status(self, job: str) -> Any:
        """The job's status."""
        from fusion.wire.v1 import coordinator_pb2

        return self.stubs.jobs.Get(coordinator_pb2.GetJobRequest(job_id=job), timeout=10)

    def state(self, job: str) -> str:
        """The job's state as a word."""
        from fusion.wire.v1 import coordinator_pb2

        return coordinator_pb2.JobState.Name(self.status(job).state).removeprefix("JOB_STATE_").lower()

    def wait_for(self, job: str, state: str, timeout_s: float = 20.0) -> Any:
        """Return the status once the job is in this state."""
        wait_until(lambda: self.state(job) == state, f"{job} is {self.status(job)}, wanted {state}", timeout_s)
        return self.status(job)

    def lines(self, job: str, begin: str = "") -> list[str]:
        """The lines of the job's log that begin so, without that."""
        found = [event.log.text for event in self.follow(job) if event.HasField("log")]
        return [line.removeprefix(begin) for line in found if line.startswith(begin)]

    def broke(self, job: str) -> str:
        """Wait until something has broken the job; return what."""
        return wait_until(lambda: self.lines(job, "recovers: "), f"{job} breaks")[0]

    def cancel(self, job: str, reason: str = "", request: str = "") -> Any:
        """Cancel the job; returns its status."""
        from fusion.wire.v1 import coordinator_pb2

        message = coordinator_pb2.CancelRequest(request_id=request or request_id(), job_id=job, reason=reason)
        return self.stubs.jobs.Cancel(message, timeout=10)

    def follow(self, job: str, *, wait: bool = False, after_step: int = 0, after_log: int = 0) -> Any:
        """The stream of the job's events."""
        from fusion.wire.v1 import coordinator_pb2

        request = coordinator_pb2.FollowRequest(job_id=job, after_step=after_step, after_log=after_log, wait=wait)
        return self.stubs.jobs.Follow(request, timeout=60)


def begin(nodes: Sequence[FakeNode]) -> list[Any]:
    """Take the assignments that have come, in any order, up to READY."""
    found = [node.assigned() for node in nodes]
    for node in nodes:
        node.report("starting")
        node.report("ready")
    return found


def hold(owner: FakeOwner, node: FakeNode, step: int) -> Any:
    """Do what a worker does that stops after `step`; return the state's reference."""
    state = owner.upload(f"state of {node.name} in epoch {node.epoch} after {step}".encode())
    node.report("running", "saves its state", step=step)
    node.report("held", step=step, held=state)
    node.job = ""
    return state


def opens(node: FakeNode) -> bool:
    """Whether the node's Watch stream can be opened now, as its daemon tries again and again."""
    import grpc

    try:
        node.watch()
    except grpc.RpcError:
        return False
    return True


def restart(coordinator: CoordinatorProcess, owner: FakeOwner, nodes: Sequence[FakeNode]) -> None:
    """Kill the coordinator and start it; return when the nodes watch again and the owner is answered."""
    import grpc

    from fusion.wire.v1 import coordinator_pb2

    coordinator.kill()
    coordinator.start()
    for node in nodes:
        wait_until(lambda node=node: opens(node), "the Watch stream after the restart")

    def answers() -> Any:
        try:
            return owner.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=5)
        except grpc.RpcError:
            return None

    wait_until(answers, "the coordinator answers its owner")


def _serve(directory: str, listen: str, settings: str, enrol_listen: str) -> None:
    import asyncio

    from fusion.observe.logs import setup_logging
    from fusion_coordinator.server import Listen, serve
    from fusion_coordinator.settings import Settings

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

        def started(running: Any) -> None:
            print(json.dumps({"address": running.address, "enrol_address": running.enrol_address}), flush=True)

        await serve(
            Path(directory),
            Listen(listen, enrol_listen),
            settings=Settings(**json.loads(settings)),
            started=started,
            stop=stop,
        )

    setup_logging("coordinator", "info")
    asyncio.run(run())


if __name__ == "__main__":
    _serve(*sys.argv[1:5])
