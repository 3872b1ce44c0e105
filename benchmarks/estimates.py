"""How long the planner believes that stages compute, against how long they do, in this process.

    python -m benchmarks.estimates --json

The demo's GPT and ResNet, cut into four stages. In every round this machine is calibrated as a node is at its start,
and the stages run some steps; both are timed by the process's own CPU time, on one thread, so that other work here
disturbs them less. Ratios are predicted over measured seconds of a stage's forward and backward, medians over the
rounds; `nominal` is without a calibration, by the speed of a transformer block alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks.overhead import Case, Held, even_cuts, gpt_case, job_of, resnet_case
from fusion.base.ids import Incarnation, NodeId
from fusion.capture import capture
from fusion.graph.partition import partition
from fusion.plan.profile import Profile, profile_of
from fusion.plan.types import ClusterNode
from fusion.plan.workload import workload_of
from fusion.protocol.metrics import StepMetrics
from fusion.runtime.local import compute_settings, make_runners
from fusion_node.benchmark import measure_flops
from fusion_node.calibration import calibrate

STAGES = 4
CALIBRATION_S, STEPS = (0.8, 1.2), 4
CPU = torch.device("cpu")


@dataclass
class Stopwatch:
    """Sums up the CPU time of one stage's passes."""

    spent_s: float = 0.0
    passes: int = 0  #: backwards

    def around(self, work: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Return `work`, timed; `count` of its calls make up a micro-batch's end."""

        def timed(*arguments: Any, **named: Any) -> Any:
            begin_s = time.process_time()
            result = work(*arguments, **named)
            self.spent_s += time.process_time() - begin_s
            self.passes += count
            return result

        return timed

    def take(self) -> float:
        """Return the seconds of a micro-batch since the last call."""
        found = self.spent_s / self.passes
        self.spent_s, self.passes = 0.0, 0
        return found


@dataclass
class Rounds:
    """By round, what was measured and predicted of every stage."""

    measured: list[list[float]] = field(default_factory=list)
    calibrated: list[list[float]] = field(default_factory=list)
    nominal: list[list[float]] = field(default_factory=list)

    def ratios(self, predicted: list[list[float]]) -> list[float]:
        """Return by stage the median ratio of predicted over measured seconds."""
        rounds = [
            [said / took for said, took in zip(*both, strict=True)]
            for both in zip(predicted, self.measured, strict=True)
        ]
        return [median(stage) for stage in zip(*rounds, strict=True)]


def steps_of(case: Case, watches: list[Stopwatch]) -> tuple[Profile, Iterator[None]]:
    """Return the case's profile between its cuts, and what runs a step each time it is asked."""
    rows = len(next(iter(case.batch.values())))
    size = rows // case.micro_batches
    example = {name: tensor[:size] for name, tensor in case.batch.items()}
    captured = capture(case.model.train(), example, loss=case.loss, micro_batch=size)
    cuts = even_cuts(captured.graph, STAGES)
    spec, done = job_of(case, rows), list[StepMetrics]()
    with compute_settings(spec):
        runners = make_runners(
            spec, partition(captured.graph, cuts), captured.tensors, Held(case.batch), None, done.append
        )
    for runner, watch in zip(runners, watches, strict=True):
        executor = runner.executor
        executor.forward = watch.around(executor.forward, 0)  # type: ignore[method-assign]
        executor.backward = watch.around(executor.backward, 1)  # type: ignore[method-assign]

    def steps() -> Iterator[None]:
        while True:
            done.clear()
            while not done:
                for runner in runners:
                    runner.advance()
            yield

    return profile_of(workload_of(captured.graph), 8, cuts=cuts), steps()


def predicted_s(profile: Profile, node: ClusterNode) -> list[float]:
    """Return by stage the seconds of a micro-batch's forward and backward."""
    forward, backward = profile.work(profile.model.pace_of(node))
    done = (forward + backward) / node.flops
    return [float(after - before) for before, after in pairwise(done)]


def measure(case: Case, rounds: int) -> Rounds:
    """Calibrate and run in turns."""
    watches = [Stopwatch() for _ in range(STAGES)]
    profile, steps = steps_of(case, watches)
    next(steps)  # the first one also loads kernels
    found = Rounds()
    for _ in range(rounds):
        for watch in watches:
            watch.spent_s, watch.passes = 0.0, 0
        flops = measure_flops(CPU, CALIBRATION_S[0], time.process_time)
        kinds = calibrate(CPU, flops, CALIBRATION_S[1], now_s=time.process_time)
        plain = ClusterNode(NodeId("here"), "here", "", Incarnation(1), 2**40, flops)
        known = ClusterNode(
            NodeId("here"), "here", "", Incarnation(1), 2**40, flops, "", kinds.bytes_per_s,
            tuple(kinds.efficiency.items()),
        )  # fmt: skip
        for _ in range(STEPS):
            next(steps)
        found.measured.append([watch.take() for watch in watches])
        found.calibrated.append(predicted_s(profile, known))
        found.nominal.append(predicted_s(profile, plain))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, list[float]] = {}
    for name, case in (("gpt", gpt_case()), ("resnet", resnet_case())):
        found = measure(case, options.rounds)
        result[f"{name}_ratios"] = found.ratios(found.calibrated)
        result[f"{name}_nominal_ratios"] = found.ratios(found.nominal)
    if options.json:
        print(json.dumps(result))
    else:
        for name, ratios in result.items():
            print(f"{name:22} {' '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
