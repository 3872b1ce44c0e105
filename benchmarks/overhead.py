"""What the runtime costs: our step time over eager PyTorch's, in one process, whole and cut into four pieces.

    python -m benchmarks.overhead --json

The same model, the same micro-batches, the same optimizer; the variants take turns within every round, and each figure
is the median over rounds of the ratio within a round, so a noisy machine moves all of them together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fusion.base.errors import StateError
from fusion.capture import capture
from fusion.cli.models import GPT, ResNet
from fusion.graph.dag import Graph, TensorSpec
from fusion.graph.partition import legal_cuts, partition
from fusion.protocol.job import BlobRef, DataField, DataFile, DataSpec, JobSpec, OptimizerSpec, RowSource
from fusion.protocol.metrics import StepMetrics
from fusion.runtime.local import compute_settings, make_runners

Batch = dict[str, torch.Tensor]
STEPS = 10_000  # more than any measurement runs


@dataclass(frozen=True)
class Case:
    """One model with its data, and how a user would train it without us."""

    model: nn.Module
    batch: Batch  #: one whole batch
    micro_batches: int
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor] | None
    forward: Callable[[nn.Module, Batch], torch.Tensor]


class Held:
    """A data set that gives the same samples again and again."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def batch(self, fields: Collection[str], ids: npt.NDArray[np.int64]) -> Batch:
        rows = torch.from_numpy(ids)
        return {name: self._batch[name][rows] for name in fields}


def gpt_case() -> Case:
    """Return the demo's GPT: about 3 M parameters, tied embeddings, dropout."""
    tokens = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return Case(GPT(), batch, 4, None, lambda model, part: model(**part))


def resnet_case() -> Case:
    """Return the demo's ResNet with batch norm."""
    generator = torch.Generator().manual_seed(2)
    model, shape = ResNet(), (1, 28, 28)
    batch = {
        "image": torch.randn(128, *shape, generator=generator),
        "label": torch.randint(0, 10, (128,), generator=generator),
    }

    def loss(outputs: Any, part: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, part["label"])

    return Case(model, batch, 4, loss, lambda net, part: loss(net(part["image"]), part))


def eager_steps(case: Case) -> Iterator[None]:
    """Train eagerly: gradients of micro-batches add up, one optimizer step; yields after each step."""
    model = case.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = Held(case.batch)
    rows = len(next(iter(case.batch.values()))) // case.micro_batches
    while True:
        for index in range(case.micro_batches):
            ids = np.arange(index * rows, (index + 1) * rows)
            loss = case.forward(model, data.batch(case.batch.keys(), ids))
            torch.autograd.backward(loss / case.micro_batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def our_steps(case: Case, pieces: int) -> Iterator[None]:
    """Train with our runtime, cut into `pieces`; yields after each step."""
    rows = len(next(iter(case.batch.values())))
    example = {name: tensor[: rows // case.micro_batches] for name, tensor in case.batch.items()}
    captured = capture(case.model.train(), example, loss=case.loss, micro_batch=rows // case.micro_batches)
    parts = partition(captured.graph, even_cuts(captured.graph, pieces))
    done: list[StepMetrics] = []
    spec = job_of(case, rows)
    with compute_settings(spec):
        runners = make_runners(spec, parts, captured.tensors, Held(case.batch), None, done.append)
    while True:
        done.clear()
        while not done:
            if not any(runner.advance() for runner in runners):
                raise StateError("the pieces wait for each other")
        yield


def even_cuts(graph: Graph, pieces: int) -> list[int]:
    """Return the legal cuts nearest to an equal number of operators per piece."""
    legal = legal_cuts(graph)

    def nearest(position: float) -> int:
        return min(legal, key=lambda cut: abs(cut - position))

    return sorted({nearest(len(graph.operators) * index / pieces) for index in range(1, pieces)})


def job_of(case: Case, rows: int) -> JobSpec:
    """Return a case as a job of many steps."""
    blob = BlobRef("0" * 64, 0)
    fields = tuple(
        DataField(
            name, TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])), RowSource(0, name)
        )
        for name, tensor in case.batch.items()
    )
    return JobSpec(
        name="overhead",
        graph=blob,
        weights=blob,
        data=DataSpec(fields, (DataFile(blob),), rows),
        optimizer=OptimizerSpec("adamw", 1e-4),
        batch_size=rows,
        micro_batches=case.micro_batches,
        steps=STEPS,
        shuffle=False,
    )


def measure(case: Case, rounds: int, warm_up: int = 2) -> tuple[float, float]:
    """Return the median ratios (whole, four pieces) of our step time over eager's."""
    variants = [eager_steps(case), our_steps(case, 1), our_steps(case, 4)]
    ratios: list[tuple[float, float]] = []
    for number in range(warm_up + rounds):
        seconds = [0.0] * len(variants)
        for turn in range(len(variants)):  # a different one goes first in every round
            index = (turn + number) % len(variants)
            begin = time.perf_counter()
            next(variants[index])
            seconds[index] = time.perf_counter() - begin
        if number >= warm_up:
            ratios.append((seconds[1] / seconds[0], seconds[2] / seconds[0]))
    return statistics.median(whole for whole, _ in ratios), statistics.median(cut for _, cut in ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    for name, case in (("gpt", gpt_case()), ("resnet", resnet_case())):
        result[f"{name}_ratio"], result[f"{name}_rad4_ratio"] = measure(case, options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value:.3f}")


if __name__ == "__main__":
    main()
