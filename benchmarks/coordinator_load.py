"""What a coordinator needs for a thousand nodes: its share of a core, heartbeats' latency, memory, and coming back.

    python -m benchmarks.coordinator_load --json

The coordinator is the real process with its product's settings, mutual TLS and its database on this disk. The nodes are
simulated in this process, each with a certificate and a connection of its own: they register, keep a command stream
open, send a heartbeat each 5 s, and answer orders to measure links with made-up figures of ten sites. Latencies are as
the nodes see them, so this process's own share of the machine is in them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from fusion.base.clock import SystemClock
from fusion.base.ids import ValueId, random_id
from fusion.graph.dag import Cost, Graph, Input, InputKind, Operator, Ref, TensorSpec, Value
from fusion.protocol.graph import graph_to_proto
from fusion.protocol.job import blob_to_proto
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import coordinator_server_name
from fusion.transport.blobs import BlobClient
from fusion.transport.channels import open_aio_channel, open_channel
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, job_pb2, node_pb2, node_pb2_grpc, tensor_pb2
from fusion_coordinator.descriptors import raise_limit
from fusion_coordinator.statedir import StateDir, initialise

SITES = 10
HEARTBEAT_S = 5.0
PLANNED_NODES, PLANNED_OPERATORS = 64, 2000


class Cluster:
    """The coordinator's process and all that its nodes measure."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config, _ = initialise(directory, directory / "owner", "load", "127.0.0.1:0", [], SystemClock())
        self.ca = StateDir(directory).ca(self.config)
        self.name = coordinator_server_name(self.config.cluster)
        self.address = ""
        self.process: subprocess.Popen[str] | None = None
        self.heartbeats: list[tuple[float, float]] = []  #: (when it was sent, seconds until the answer)
        self.last_error = ""  #: of a node's heartbeat

    def start(self) -> None:
        """Start the process; after a kill on the same ports."""
        command = [sys.executable, "-m", "fusion_coordinator.cli", "serve", "--state-dir", str(self.directory)]
        command += ["--listen", self.address or "127.0.0.1:0", "--log-level", "error"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.address = line.split()[2]

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def watched(self) -> psutil.Process:
        """The process, to be asked what it uses."""
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def check(self) -> None:
        """Raise RuntimeError if the process has ended by itself."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the coordinator ended by itself, exit status {self.process.returncode}")

    def latencies(self, begin_s: float, end_s: float) -> list[float]:
        """Return the latencies of the heartbeats that were sent in that time."""
        return [took_s for at_s, took_s in self.heartbeats if begin_s <= at_s < end_s]


class Node:
    """One simulated node daemon."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        credentials = cluster.ca.new_credentials(Role.NODE, f"n{number:04}", cluster.address, time.time())
        self._channel = open_aio_channel(cluster.address, credentials, cluster.name)
        make_stub: Any = node_pb2_grpc.NodeControlStub
        self._stub = make_stub(self._channel)
        self._random = random.Random(number)  # noqa: S311
        self._incarnation = self._sequence = 0
        self.back_s = 0.0  #: when it last had both a command stream and an answered heartbeat after a break
        self._streams = self._answered = False

    async def register(self) -> None:
        """Get an incarnation, however often that has to be tried."""
        hardware = node_pb2.Hardware(
            memory_bytes=2**34,
            flops=1e11 * self._random.uniform(0.5, 2),
            threads=4,
            device="cpu",
            torch_version="2.13.0",
        )
        request = node_pb2.RegisterRequest(
            request_id=random_id("req-", 20),
            name=f"n{self.number:04}",
            address=f"127.0.0.1:{10_000 + self.number}",
            hardware=hardware,
            protocol=1,
        )
        attempt = 0
        while True:
            try:
                answer = await self._stub.Register(request, timeout=10)
            except grpc.RpcError:
                await self._pause(attempt)
                attempt += 1
                continue
            self._incarnation = answer.incarnation
            return

    async def run(self) -> None:
        """Live until cancelled."""
        await self.register()
        await asyncio.gather(self._beat(), self._watch())

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def _pause(self, attempt: int) -> None:
        await asyncio.sleep(self._random.uniform(0, min(15.0, 0.5 * 2**attempt)))

    async def _beat(self) -> None:
        await asyncio.sleep(self._random.uniform(0, HEARTBEAT_S))
        attempt = 0
        while True:
            self._sequence += 1
            request = node_pb2.HeartbeatRequest(
                incarnation=self._incarnation, sequence=self._sequence, wall_clock_s=time.time()
            )
            sent_s = time.monotonic()
            try:
                await self._stub.Heartbeat(request, timeout=4)
            except grpc.RpcError as error:
                self._lost(answered=True)
                self.cluster.last_error = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    await self.register()
                await self._pause(attempt)
                attempt += 1
                continue
            attempt = 0
            took_s = time.monotonic() - sent_s
            self.cluster.heartbeats.append((sent_s, took_s))
            self._answered = True
            self._note_back()
            await asyncio.sleep(max(0.0, HEARTBEAT_S - took_s))

    async def _watch(self) -> None:
        attempt = 0
        while True:
            try:
                async for command in self._stub.Watch(node_pb2.WatchRequest(incarnation=self._incarnation)):
                    attempt = 0
                    if not self._streams:
                        self._streams = True
                        self._note_back()
                    if command.WhichOneof("body") == "probe" and command.probe.targets:
                        await self._measured(command.probe)
            except grpc.RpcError:
                pass
            self._lost(answered=False)
            await self._pause(attempt)
            attempt += 1

    async def _measured(self, order: node_pb2.ProbeOrder) -> None:
        report = node_pb2.LinksReport(incarnation=self._incarnation)
        for target in order.targets:
            near = int(target.address.rpartition(":")[2]) % SITES == self.number % SITES
            rate = (1e9 if near else 2e7) * self._random.uniform(0.8, 1.2)
            report.links.add(
                node_id=target.node_id,
                reachable=True,
                round_trip_s=0.001 if near else 0.04,
                there_bytes_per_s=rate if target.bytes else 0.0,
                back_bytes_per_s=rate if target.bytes else 0.0,
                bytes=target.bytes,
            )
        with contextlib.suppress(grpc.RpcError):
            await self._stub.ReportLinks(report, timeout=10)

    def _lost(self, *, answered: bool) -> None:
        if answered:
            self._answered = False
        else:
            self._streams = False
        self.back_s = 0.0

    def _note_back(self) -> None:
        if self._streams and self._answered and not self.back_s:
            self.back_s = time.monotonic()


# ---- what is measured ----


async def all_back(cluster: Cluster, nodes: Sequence[Node], since_s: float, limit_s: float = 120.0) -> float:
    """Return how long it took from `since_s` until the last node had its stream and an answer; inf if some never."""
    while time.monotonic() < since_s + limit_s:
        cluster.check()
        if all(node.back_s > since_s for node in nodes):
            return max(node.back_s for node in nodes) - since_s
        await asyncio.sleep(0.1)
    return float("inf")


def p99_ms(latencies: Sequence[float]) -> float:
    """Return the 99th percentile in ms."""
    return 1e3 * statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else float("nan")


async def steady(cluster: Cluster, seconds: float) -> dict[str, float]:
    """Measure the coordinator while nothing but heartbeats happens."""
    process = cluster.watched()
    begin_s, before = time.monotonic(), process.cpu_times()
    await asyncio.sleep(seconds)
    end_s, after = time.monotonic(), process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    cluster.check()
    latencies = cluster.latencies(begin_s, end_s - 1)
    if not latencies:
        raise RuntimeError(f"no heartbeat was answered; the last error: {cluster.last_error or 'none'}")
    return {
        "core_share": used_s / (end_s - begin_s),
        "p99_ms": p99_ms(latencies),
        "p50_ms": 1e3 * statistics.median(latencies),
        "heartbeats_per_s": len(latencies) / (end_s - 1 - begin_s),
        "rss_mb": process.memory_info().rss / 1e6,
    }


def chain(operators: int) -> Graph:
    """Return linear layers in a row, each with as much work as makes a pipeline of many nodes worth it."""
    values = [Value(TensorSpec("float32", (2, 4)))]
    inputs, calls = [Input("x", InputKind.BATCH, ValueId(0))], []
    x = ValueId(0)
    for layer in range(operators):
        weight, out = ValueId(len(values)), ValueId(len(values) + 1)
        values += [Value(TensorSpec("float32", (4, 4)), requires_grad=True)]
        values += [Value(TensorSpec("float32", (2, 4)), requires_grad=True)]
        inputs.append(Input(f"layers.{layer}.weight", InputKind.PARAMETER, weight))
        cost = Cost(1e9, 2e9, moved_bytes=32)
        calls.append(Operator("aten.linear.default", (Ref(x), Ref(weight)), (), (out,), cost=cost))
        x = out
    loss = ValueId(len(values))
    values.append(Value(TensorSpec("float32", ()), requires_grad=True))
    calls.append(Operator("aten.mean.default", (Ref(x),), (), (loss,), cost=Cost(moved_bytes=4)))
    return Graph(tuple(values), tuple(inputs), tuple(calls), loss, 2)


def large_job(cluster: Cluster, owner: Credentials) -> tuple[Any, Any, job_pb2.JobSpec]:
    """Return a channel, a stub, and a job of many operators with its blobs uploaded."""
    import numpy
    from safetensors.numpy import save

    graph = chain(PLANNED_OPERATORS)
    channel = open_channel(cluster.address, owner, cluster.name)
    blobs = BlobClient(channel)
    make_stub: Any = coordinator_pb2_grpc.JobsStub
    weights = {
        item.name: numpy.zeros((4, 4), dtype=numpy.float32) for item in graph.inputs if item.kind is InputKind.PARAMETER
    }
    spec = job_pb2.JobSpec(
        name="large",
        graph=blob_to_proto(blobs.upload_bytes(graph_to_proto(graph).SerializeToString())),
        weights=blob_to_proto(blobs.upload_bytes(save(weights))),
        optimizer=job_pb2.Optimizer(kind="adamw", learning_rate=0.1),
        lr_schedule=job_pb2.LrSchedule(kind="constant"),
        batch_size=128,
        micro_batches=64,
        steps=10,
        determinism="fast",
        precision="fp32",
        schedule="1f1b",
        max_stages=PLANNED_NODES,
        torch_version="2.13.0",
        data=job_pb2.Data(samples=128),
    )
    field = spec.data.fields.add(name="x", sample=tensor_pb2.TensorSpec(dtype="float32", shape=[4]))
    field.rows.CopyFrom(job_pb2.RowSource(file=0, tensor="x"))
    rows = save({"x": numpy.zeros((128, 4), dtype=numpy.float32)})
    spec.data.files.add().blob.CopyFrom(blob_to_proto(blobs.upload_bytes(rows)))
    return channel, make_stub(channel), spec


def plan_once(stub: Any, spec: job_pb2.JobSpec) -> tuple[float, float]:
    """Submit the job, wait until it has a plan, cancel it; return when planning began and ended."""
    request = coordinator_pb2.SubmitRequest(request_id=random_id("req-", 20), spec=spec)
    begin_s = time.monotonic()
    job = stub.Submit(request, timeout=60).job_id
    while stub.Get(coordinator_pb2.GetJobRequest(job_id=job), timeout=10).state == coordinator_pb2.JOB_STATE_QUEUED:
        if time.monotonic() - begin_s > 120:
            raise TimeoutError("no plan within 120 s")
        time.sleep(0.2)
    end_s = time.monotonic()
    stub.Cancel(coordinator_pb2.CancelRequest(request_id=random_id("req-", 20), job_id=job), timeout=10)
    return begin_s, end_s


async def planning(cluster: Cluster, repeats: int) -> dict[str, float]:
    """Measure heartbeats while a job is planned over all nodes, several times."""
    owner = cluster.ca.new_credentials(Role.OWNER, "me", cluster.address, time.time())
    channel, stub, spec = await asyncio.to_thread(large_job, cluster, owner)
    latencies: list[float] = []
    took_s: list[float] = []
    for _ in range(repeats):
        begin_s, end_s = await asyncio.to_thread(plan_once, stub, spec)
        await asyncio.sleep(2)
        latencies += cluster.latencies(begin_s, end_s)
        took_s.append(end_s - begin_s)
    channel.close()
    return {
        "p99_planning_ms": p99_ms(latencies),
        "p50_planning_ms": 1e3 * statistics.median(latencies),
        "plan_s": statistics.median(took_s),
        "planner_rss_mb": sum(child.memory_info().rss for child in cluster.watched().children()) / 1e6,
    }


async def measure(directory: Path, count: int, seconds: float, repeats: int) -> dict[str, float]:
    """Run everything and return the figures."""
    cluster = Cluster(directory)
    cluster.start()
    nodes = [Node(cluster, number) for number in range(count)]
    tasks = [asyncio.get_running_loop().create_task(node.run()) for node in nodes]
    try:
        join_s = await all_back(cluster, nodes, time.monotonic() - 1e-3)
        await asyncio.sleep(2 * HEARTBEAT_S)
        found = {"nodes": count, "join_s": join_s} | await steady(cluster, seconds)
        found |= await planning(cluster, repeats)
        cluster.kill()
        killed_s = time.monotonic()
        await asyncio.to_thread(cluster.start)
        found["restart_s"] = time.monotonic() - killed_s
        found["reconnect_s"] = await all_back(cluster, nodes, killed_s + found["restart_s"])
        return found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in nodes))
        cluster.kill()


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the one object alone (it is all that is printed)")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of steady heartbeats")
    parser.add_argument("--plans", type=int, default=3, help="how often to plan")
    given = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    raise_limit()
    with tempfile.TemporaryDirectory(prefix="fusion-load-") as directory:
        found = asyncio.run(measure(Path(directory) / "state", given.nodes, given.seconds, given.plans))
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
