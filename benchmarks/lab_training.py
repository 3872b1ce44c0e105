"""Trains inside a lab, from its first host: a coordinator and one node daemon a host, as real processes.

    python -m benchmarks.lab_training < settings.json

Run by `benchmarks.pipeline` through `wanlab.py exec`. Every stage computes a small real matrix product, and then waits
until as much time has passed as the device it stands for would take (`fusion-node start --emulate-speed`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import fusion
from benchmarks.lab import Lab
from benchmarks.seams import median_seam
from fusion.base.errors import JobError
from fusion.base.ids import random_id
from fusion.capture import capture
from fusion.cli.helpers import Helpers, run_once
from fusion.graph.partition import legal_cuts, partition, stage_cost
from fusion.job.client import Client
from fusion.plan.plan_simulation import schedules_of
from fusion.plan.schedule import format_schedule
from fusion.protocol.timeline import align, whole_steps
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

VOCABULARY = 256
PORT, ENROL_PORT, NODE_PORT = 7443, 7444, 7445
START_S, LINKS_S = 60.0, 90.0


class Settings(msgspec.Struct, frozen=True):
    """What to train, and on which lab."""

    script: str
    lab: str
    topology: dict[str, Any]
    steps: int
    micro_batches: int
    samples: int  #: in a micro-batch
    length: int
    width: int
    forward_s: float
    compression: str = "none"


class Chain(nn.Module):
    """One matrix product a stage, all alike; an embedding before the first."""

    def __init__(self, stages: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, T) to features (B, T, C)."""
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(outputs: Any, _batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss that costs next to nothing."""
    return torch.as_tensor(outputs.square().mean())


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the chain is cut, and what a stage's forward costs."""

    cuts: tuple[int, ...]
    forward_flops: float


def cut_evenly(settings: Settings, stages: int) -> Cut:
    """Return the cuts behind every matrix product; JobError unless all stages then cost the same."""
    example = {"x": torch.zeros(settings.samples, settings.length, dtype=torch.int64)}
    captured = capture(Chain(stages, settings.width), example, loss=mean_square, micro_batch=settings.samples)
    graph = captured.graph
    heavy = [index for index, operator in enumerate(graph.operators) if operator.cost.forward_flops > 0]
    legal = set(legal_cuts(graph))
    cuts = tuple(index + 1 for index in heavy[: stages - 1] if index + 1 in legal)
    parts = partition(graph, cuts)
    costs = [stage_cost(graph, shard) for shard in parts.shards]
    forward = costs[0].forward_flops
    if len(costs) != stages or any(
        cost.forward_flops != forward or cost.backward_flops != 2 * forward for cost in costs
    ):
        raise JobError(f"the stages are not alike: {costs}")
    return Cut(cuts, forward)


class LabCluster:
    """A coordinator on this host and a node on every host of the lab."""

    def __init__(
        self, lab: Lab, directory: Path, helpers: Helpers, speeds: Mapping[str, float], *, in_order: bool = False
    ) -> None:
        """`speeds`: FLOPS that each host's node emulates. `in_order`: planners see the nodes in the hosts' order.

        They see them by name; so the names then begin with the hosts' numbers.
        """
        self._lab, self._directory, self._helpers = lab, directory, helpers
        self._speeds, self._in_order = speeds, in_order
        addresses = dict(item.split("=") for item in os.environ["WANLAB_HOSTS"].split(","))
        self._addresses = addresses
        self.address = f"{addresses[lab.hosts[0]]}:{PORT}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_")}
        self._environment = kept | {"FUSION_HOME": str(directory), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    @property
    def credentials(self) -> Path:
        """The owner's."""
        return self._directory / "owner"

    def start(self) -> None:
        """Start everything; returns when every node is there and knows its links."""
        listen = ["--listen", self.address]
        run_once("fusion-coordinator init", "fusion_coordinator.cli", ["init", *listen], self._environment)
        enrol = f"{self.address.rpartition(':')[0]}:{ENROL_PORT}"
        serve = ["serve", *listen, "--enrol-listen", enrol]
        self._helpers.start("coordinator", "fusion_coordinator.cli", serve, self._environment)
        with self._client() as client:
            client.info()
            stub = coordinator_pb2_grpc.AdminStub(client.channel)  # type: ignore[no-untyped-call]
            for number, host in enumerate(self._lab.hosts):
                self._start_node(stub, host, f"{number}-{host}" if self._in_order else host)
            self._wait(stub)

    def _client(self) -> Client:
        end_s = time.monotonic() + START_S
        while not (self._directory / "coordinator" / "admin").is_dir() and time.monotonic() < end_s:
            time.sleep(0.05)
        return Client(self.address, self._directory / "coordinator" / "admin")

    def _start_node(self, stub: Any, host: str, name: str) -> None:
        request = coordinator_pb2.CreateTokenRequest(request_id=random_id("req-", 20), role="node", valid_s=600.0)
        join = str(stub.CreateToken(request, timeout=10.0).join_string)
        address = f"{self._addresses[host]}:{NODE_PORT}"
        arguments = ["start", join, "--name", name, "--home", str(self._directory / host), "--listen", address]
        arguments += ["--advertise", address, "--device", "cpu", "--threads", "1", "--max-memory", "2GiB"]
        arguments += ["--emulate-speed", f"{self._speeds[host]:.0f}"]
        prefix = self._lab.command(host, [])
        self._helpers.start(host, "fusion_node.cli", arguments, self._environment, prefix=prefix)

    def _wait(self, stub: Any) -> None:
        count = len(self._lab.hosts)
        end_s = time.monotonic() + START_S + LINKS_S
        while time.monotonic() < end_s:
            self._helpers.check()
            cluster = stub.Cluster(coordinator_pb2.ClusterRequest(), timeout=10.0)
            if len(cluster.nodes) == count and _links_known(cluster):
                return
            time.sleep(0.25)
        raise JobError(f"{count} nodes and their links were not there in {START_S + LINKS_S:.0f} s")


def _links_known(cluster: Any) -> bool:
    """Whether the link between every two nodes has been measured, by itself or by their sites."""
    sites = {node.node_id: node.site or node.name for node in cluster.nodes}
    pairs = {(link.source, link.target) for link in cluster.links}
    between = {(link.source, link.target) for link in cluster.site_links}
    return all((a, b) in pairs or (sites[a], sites[b]) in between for a in sites for b in sites if a != b)


def train(settings: Settings) -> dict[str, Any]:
    """Train, and return each step's time, the wall time per step, and the plan."""
    lab = Lab(Path(settings.script), settings.lab, settings.topology)
    stages = len(lab.hosts)
    cut = cut_evenly(settings, stages)
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as text, Helpers(Path(text) / "logs") as helpers:
        speeds = dict.fromkeys(lab.hosts, cut.forward_flops / settings.forward_s)
        cluster = LabCluster(lab, Path(text), helpers, speeds)
        cluster.start()
        samples = settings.samples * settings.micro_batches
        data = {"x": torch.randint(0, VOCABULARY, (samples * 2, settings.length))}
        job = fusion.Job(
            Chain(stages, settings.width),
            data,
            fusion.AdamW(3e-4),
            loss=mean_square,
            steps=settings.steps,
            batch_size=samples,
            micro_batches=settings.micro_batches,
            cuts=cut.cuts,
            replan=False,
            compression=settings.compression,
            name="pipeline",
        )
        with job.submit(cluster.address, cluster.credentials) as run:
            metrics, seen_s = [], []
            for step in run.metrics():
                metrics.append(step)
                seen_s.append(time.monotonic())
            plan = run.status().plan
            with Client(cluster.address, cluster.credentials) as client:
                spans = align(whole_steps(client.timeline(run.job_id))).spans
    assert plan is not None
    return {
        "step_s": [step.step_s for step in metrics],
        "seen_s": [at_s - seen_s[0] for at_s in seen_s],
        "order": [stage.node_name for stage in plan.stages],
        "in_flight": [stage.in_flight for stage in plan.stages],
        "schedules": [format_schedule(schedule) for schedule in schedules_of(plan)],
        "planned_s": plan.step_s,
        "links": [asdict(link) for link in plan.links],
        "codecs": [(link.source, link.target, link.codec) for link in plan.links],
        "sent_bytes": metrics[-1].bytes,
        "between_steps_s": median_seam(spans),
    }


def main(arguments: Sequence[str] = ()) -> None:
    """Read the settings from stdin, train, and print one JSON object."""
    del arguments
    torch.set_num_threads(1)
    print(json.dumps(train(msgspec.json.decode(sys.stdin.buffer.read(), type=Settings))))


if __name__ == "__main__":
    main()
