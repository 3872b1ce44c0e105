"""What tests of the node need: credentials, a coordinator that does what a test says, and a daemon in this process."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc

from fusion.base.ids import ClusterId
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import caller, server_credentials
from fusion.transport.channels import SERVER_OPTIONS
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, job_pb2, node_pb2, node_pb2_grpc, plan_pb2
from fusion_node import daemon
from fusion_node.hardware import Limits

CLUSTER = ClusterId("clustertst")
JOB = "job-aaaaaaaaaa"
FAST = Limits(device="cpu", max_memory_bytes=2**30, threads=1, flops=1e9)
WORKER_SCRIPT = Path(__file__).with_name("node_worker.py")


def worker_command(behaviour: str) -> list[str]:
    """Return the command of a worker without torch."""
    return [sys.executable, "-P", str(WORKER_SCRIPT), behaviour]


def free_port() -> int:
    """Return a port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ScriptedCoordinator(node_pb2_grpc.NodeControlServicer, coordinator_pb2_grpc.AdminServicer):
    """Answers every call of a node as its fields say, and keeps what it was told."""

    def __init__(self) -> None:
        self.ca = CertificateAuthority.create(CLUSTER, time.time())
        self.heartbeat_s, self.self_fence_s = 0.2, 25.0
        self.refuse_register: tuple[grpc.StatusCode, str] | None = None
        self.refuse_heartbeat: tuple[grpc.StatusCode, str] | None = None
        self.silent = threading.Event()  #: heartbeats and registrations are not answered
        self.fail_reports = 0  #: so many reports of stages fail before one is taken
        self.clock_ahead_s = 0.0
        self.reachable: bool | None = None  #: None: really try
        self.incarnation = 0
        self.registered: list[node_pb2.RegisterRequest] = []
        self.heartbeats: list[node_pb2.HeartbeatRequest] = []
        self.stages: list[node_pb2.StageReport] = []
        self.metrics: list[node_pb2.MetricsReport] = []
        self.probes: list[str] = []
        self.left: list[str] = []
        self.drains = 0
        self.drains_needed = 1  #: so many times a node has to ask before it may leave
        self.kept: list[node_pb2.StatesReport] = []
        self.ended_jobs: list[str] = []
        self.renewed = 0
        self.commands: queue.Queue[node_pb2.Command] = queue.Queue()
        self.closing = threading.Event()

    # ---- the service ----

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._maybe_silent(context)
        if self.refuse_register:
            context.abort(*self.refuse_register)
        self.registered.append(request)
        self.incarnation += 1
        return node_pb2.RegisterResponse(
            incarnation=self.incarnation, lease_s=30, heartbeat_s=self.heartbeat_s, self_fence_s=self.self_fence_s
        )

    def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._maybe_silent(context)
        if self.refuse_heartbeat:
            context.abort(*self.refuse_heartbeat)
        self.heartbeats.append(request)
        return node_pb2.HeartbeatResponse(wall_clock_s=time.time() + self.clock_ahead_s)

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield node_pb2.Command(ping=node_pb2.Ping())
        while context.is_active() and not self.closing.is_set():
            try:
                yield self.commands.get(timeout=0.05)
            except queue.Empty:
                continue

    def ReportStage(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.fail_reports > 0:
            self.fail_reports -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "for the test")
        self.stages.append(request)
        return node_pb2.StageReportResponse()

    def ReportMetrics(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.metrics.append(request)
        return node_pb2.MetricsReportResponse()

    def ProbeReachability(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.probes.append(request.address)
        seen = "127.0.0.1"
        if not request.address:
            return node_pb2.ProbeResponse(seen_host=seen)
        if self.reachable is not None:
            return node_pb2.ProbeResponse(reachable=self.reachable, detail="connection refused", seen_host=seen)
        host, _, port = request.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.settimeout(5)
            nonce = connection.makefile("rb").read(len(request.nonce))
        return node_pb2.ProbeResponse(reachable=nonce == request.nonce, seen_host=seen)

    def Renew(self, request: Any, context: Any) -> Any:  # noqa: N802
        from cryptography import x509

        self.renewed += 1
        key: Any = x509.load_der_x509_csr(request.csr_der).public_key()
        return node_pb2.RenewResponse(certificate_pem=self.ca.issue(key, Role.NODE, time.time()))

    def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.drains += 1
        return node_pb2.DrainResponse(done=self.drains >= self.drains_needed, waits_for="stage 0 of a job")

    def ReportStates(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.kept.append(request)
        return node_pb2.StatesReportResponse(ended_jobs=self.ended_jobs)

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.left.append(request.reason)
        return node_pb2.LeaveResponse()

    def Info(self, request: Any, context: Any) -> Any:  # noqa: N802
        who = caller(context)
        return coordinator_pb2.InfoResponse(
            cluster_id=who.cluster,
            package_version="0.1.0",
            protocol=1,
            wall_clock_s=time.time() + self.clock_ahead_s,
            caller_identity=who.identity,
            caller_role=who.role,
        )

    def _maybe_silent(self, context: Any) -> None:
        if self.silent.is_set():
            while context.is_active() and self.silent.is_set() and not self.closing.is_set():
                time.sleep(0.02)
            context.abort(grpc.StatusCode.UNAVAILABLE, "silent for the test")

    # ---- what a test asks of it ----

    def assign(self, epoch: int = 1, job: str = JOB, threads: int = 0) -> None:
        """Send the node stage 0 of a plan with one stage."""
        node = self.node
        stage = plan_pb2.Stage(node_id=node.identity, node_name=node.name, incarnation=self.incarnation)
        self.commands.put(
            node_pb2.Command(
                assign=plan_pb2.Assignment(
                    job_id=job,
                    cluster_id=CLUSTER,
                    stage=0,
                    job_spec=job_pb2.JobSpec(threads=threads).SerializeToString(),
                    plan=plan_pb2.Plan(epoch=epoch, stages=[stage]),
                )
            )
        )

    def stop(self, epoch: int = 1, job: str = JOB, reason: str = "cancelled") -> None:
        """Order the worker's end."""
        self.commands.put(node_pb2.Command(stop=node_pb2.StopWorker(job_id=job, epoch=epoch, reason=reason)))

    def states(self) -> list[str]:
        """Return the stage states told so far, in short."""
        return [node_pb2.StageState.Name(item.state).removeprefix("STAGE_STATE_").lower() for item in self.stages]

    def make_node(self, home: Path, address: str, **issue: Any) -> Credentials:
        """Make credentials for a node in `home`."""
        self.node = self.ca.new_credentials(Role.NODE, "tester", address, time.time())
        if issue:
            from dataclasses import replace

            from fusion.security.credentials import load_key

            key = load_key(self.node.key_pem).public_key()
            self.node = replace(self.node, certificate_pem=self.ca.issue(key, Role.NODE, **issue))
        self.node.save(home)
        return self.node


@contextmanager
def serve(coordinator: ScriptedCoordinator, port: int = 0) -> Iterator[str]:
    """Serve `coordinator` with mutual TLS; yields its address."""
    identity = coordinator.ca.new_credentials(Role.COORDINATOR, "coordinator", "", time.time())
    server = grpc.server(futures.ThreadPoolExecutor(16), options=SERVER_OPTIONS)
    node_pb2_grpc.add_NodeControlServicer_to_server(coordinator, server)  # type: ignore[no-untyped-call]
    coordinator_pb2_grpc.add_AdminServicer_to_server(coordinator, server)  # type: ignore[no-untyped-call]
    bound = server.add_secure_port(f"127.0.0.1:{port}", server_credentials(identity))
    coordinator.closing.clear()
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        coordinator.closing.set()
        server.stop(0).wait(5)


@asynccontextmanager
async def running(
    home: Path, credentials: Credentials, behaviour: str = "finish", **settings: Any
) -> AsyncIterator[asyncio.Task[int]]:
    """Run the daemon in this loop; it is cancelled at the end."""
    given = {"home": home, "listen": "127.0.0.1:0", "limits": FAST, **settings}
    task = asyncio.create_task(
        daemon.run(daemon.Settings(**given), credentials, worker_command=worker_command(behaviour))
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(
    condition: Callable[[], bool], task: asyncio.Task[Any] | None = None, limit_s: float = 20.0, pause_s: float = 0.02
) -> None:
    """Wait for `condition`, asked on another thread; fails when `task` ends before, or when it takes too long."""
    end_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        if task is not None and task.done():
            raise AssertionError(f"the daemon has ended: {task.exception() or task.result()}")
        assert time.monotonic() < end_s, f"not within {limit_s} s"
        await asyncio.sleep(pause_s)
