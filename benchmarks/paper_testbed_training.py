"""Trains the jobs of `benchmarks.paper_testbed` inside a lab, from its first host, one after the other.

    python -m benchmarks.paper_testbed_training < order.json

All run on one cluster: a coordinator here, and a node daemon of an emulated speed on every host. Planners see
the nodes in the order of the topology's hosts, which the baselines keep.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

import fusion
from benchmarks.convergence_tasks import CodeGPT, GptSettings, library_text, text_loss, windows
from benchmarks.lab import Lab
from benchmarks.lab_training import LabCluster
from fusion.base.errors import JobError
from fusion.cli.helpers import Helpers
from fusion.job.client import Client
from fusion.job.job import Job

GPT = GptSettings(layers=6, channels=64, heads=2, time=32, learning_rate=8e-3)
SAMPLES, MICRO_BATCHES = 128, 12  #: windows in a micro-batch, micro-batches in a step
TENSOR_BYTES = SAMPLES * GPT.time * GPT.channels * 4
WARM_UP_STEPS = 4  #: of the learning rate
HELD_OUT_WINDOWS = 512


class Training(msgspec.Struct, frozen=True):
    """One job: who plans it, and how its values travel."""

    name: str
    planner: str
    compression: str
    steps: int  #: that are run; the learning rate is that of `length`
    length: int
    cuts: list[int] = []  #: for the nodes in their order, instead of the planner's own


class Order(msgspec.Struct, frozen=True):
    """What to train, and on which lab."""

    script: str
    lab: str
    topology: dict[str, Any]
    speeds: dict[str, float]  #: FLOPS by host
    trainings: list[Training]


def make_job(training: Training) -> Job:
    """Return the job; the first steps of a shorter one are those of a longer one."""
    torch.manual_seed(1)
    return Job(
        CodeGPT(GPT),
        fusion.TokenData(library_text(GPT.text_bytes)[0], GPT.time),
        fusion.AdamW(GPT.learning_rate, betas=(0.9, 0.99), weight_decay=0.1, no_decay=("*norm*",)),
        loss=text_loss,
        lr_schedule=rate_factors(training.steps, training.length),
        steps=training.steps,
        batch_size=SAMPLES * MICRO_BATCHES,
        micro_batches=MICRO_BATCHES,
        grad_clip=1.0,
        seed=1,
        threads=1,
        planner="equal-number" if training.cuts else training.planner,
        cuts=training.cuts,
        compression=training.compression,
        replan=False,
        name="paper-testbed",
    )


def rate_factors(steps: int, length: int) -> list[float]:
    """Return factors on the learning rate for the first `steps` of a run of `length`: up in a line, then down."""
    warm_up = WARM_UP_STEPS
    falling = [1 - 0.95 * (step - warm_up) / (length - warm_up) for step in range(warm_up + 1, length + 1)]
    return [*(step / warm_up for step in range(1, warm_up + 1)), *falling][:steps]


def train_dense(training: Training) -> dict[str, Any]:
    """Train the whole of a run in this process, without a cut and so without codecs."""
    result = make_job(training).run_local()
    return {"losses": result.losses, "served_loss": served_loss(result.state_dict())}


def served_loss(weights: dict[str, torch.Tensor]) -> float:
    """Return the held-out loss of trained weights, in one process and without any codec."""
    model = CodeGPT(GPT)
    model.load_state_dict(weights)
    held_out = windows(library_text(GPT.text_bytes)[1], HELD_OUT_WINDOWS, GPT.time)
    with torch.no_grad():
        return float(text_loss(model(held_out["input_ids"]), held_out))


def cpu_s() -> float:
    """Return the processor seconds that all processes of the cluster have taken: coordinator, daemons, workers."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def run(training: Training, cluster: LabCluster) -> dict[str, Any]:
    """Run one job to its end; return its times, its losses and its plan."""
    begin_s = time.monotonic()
    with make_job(training).submit(cluster.address, cluster.credentials) as submitted:
        metrics, clocks = [], []
        for step in submitted.metrics():
            metrics.append(step)
            clocks.append((time.monotonic(), cpu_s()))
        plan = submitted.status().plan
        weights = submitted.state_dict()
    if plan is None or len(metrics) < training.steps:
        raise JobError(f"{training.name}: the job ended after {len(metrics)} of {training.steps} steps")
    return {
        "step_s": [step.step_s for step in metrics],
        "losses": [step.loss for step in metrics],
        "bytes": [step.bytes for step in metrics],
        "compute_s": [[stage.compute_s for stage in step.stages] for step in metrics],
        "served_loss": served_loss(weights) if training.steps == training.length else None,
        "busy_cores": (clocks[-1][1] - clocks[0][1]) / (clocks[-1][0] - clocks[0][0]),
        "planned_s": plan.step_s,
        "order": [stage.node_name for stage in plan.stages],
        "stage_s": [stage.forward_s + stage.backward_s for stage in plan.stages],
        "in_flight": [stage.in_flight for stage in plan.stages],
        "links": [asdict(link) for link in plan.links],
        "changes": {change.from_step: list(change.links) for change in plan.codec_changes},
        "seconds": time.monotonic() - begin_s,
    }


def train(order: Order) -> dict[str, Any]:
    """Run all jobs on one cluster."""
    lab = Lab(Path(order.script), order.lab, order.topology)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as text, Helpers(Path(text) / "logs") as helpers:
        cluster = LabCluster(lab, Path(text), helpers, order.speeds, in_order=True)
        cluster.start()
        with Client(cluster.address, cluster.credentials) as client:
            names = [node.name.partition("-")[2] for node in client.cluster().nodes]
        if names != lab.hosts:
            raise JobError(f"planners see the nodes as {names}, not in the order {lab.hosts}")
        print(f"cluster up after {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
        return {training.name: run(training, cluster) for training in order.trainings}


def main() -> None:
    """Read the order from stdin, train, and print one JSON object."""
    torch.set_num_threads(1)
    print(json.dumps(train(msgspec.json.decode(sys.stdin.buffer.read(), type=Order))))


if __name__ == "__main__":
    main()
