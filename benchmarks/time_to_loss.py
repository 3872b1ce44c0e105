"""How much sooner a loss is reached on slow links: with "auto", without codecs, and with the paper's AdaTopK.

    python -m benchmarks.time_to_loss --json --cache runs.jsonl

Four nodes with links of 100, 20 and 8 Mbit/s between them train the GPT of `benchmarks.convergence`, cut into the same
four stages each time. The planner chooses who takes which stage and the codec of every link, for each kind of
compression. A step takes what the simulator says, with measured speeds of codecs (`benchmarks.prediction` compares it
with real runs). With --emulate it takes what it takes: daemons with real workers stand for the nodes, behind a relay
with these links, under a coordinator that plans by what it measures. Everything then takes five times longer, as two
cores cannot stand for four such nodes (--slower), and times are divided by that; --speed 20G --slower 1 has nodes that
they can stand for. Losses are of real trainings: AdaTopK's with the ratios that its plan gives to the links, and that
of "auto" with its strongest codecs on all links, although its plan has milder ones on the faster links.

`auto_vs_none` is the time that the uncompressed run takes to a held-out loss over the time that "auto" takes; the loss
is the last one of whichever of both ends higher, so that both reach it. `auto_vs_adatopk` likewise. Losses are those of
the weights as they are served, without codec, on a part of the held-out text, linear between two measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import Runs
from benchmarks.convergence_tasks import Task, even_cuts, tasks
from benchmarks.time_to_loss_emulation import at_speed, step_times
from fusion.base.units import parse_flops
from fusion.graph.dag import Graph
from fusion.job.job import Job
from fusion.job.prepare import captured_graph
from fusion.plan.cluster_file import parse_cluster
from fusion.plan.codecs import AUTO_MILD_CEILING, compression_text, parse_compression, plan_at
from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.planner import make_plan
from fusion.plan.types import Cluster, Plan
from fusion.plan.workload import Workload, workload_of
from fusion.protocol.job import JobSpec, job_view

KINDS = ("none", "auto", "adatopk:100")
SLOWER = 5.0
_SIMULATED_STEPS = 3
CLUSTER = """
[[nodes]]
name = "node"
speed = "100G"
memory = "4GiB"
count = 4
[[links]]
between = ["node-1", "node-2"]
rate = "100 Mbit/s"
delay = "5 ms"
[[links]]
between = ["node-2", "node-3"]
rate = "20 Mbit/s"
delay = "10 ms"
[default]
rate = "8 Mbit/s"
delay = "15 ms"
"""


@dataclass(frozen=True)
class Pace:
    """What a plan comes to: how long steps take, and which codecs the links have."""

    step_s: tuple[tuple[int, float], ...]  #: (from step, seconds of each)
    compression: str  #: with the codec of every link

    def seconds(self, steps: float) -> float:
        """Return the time that so many steps from the first take; a fraction of a step takes that part of it."""
        ends = [*(first - 1 for first, _ in self.step_s[1:]), float("inf")]
        spans = zip(self.step_s, ends, strict=True)
        return sum(each * max(0.0, min(steps, end) - (first - 1)) for (first, each), end in spans)


def pace_of(cluster: Cluster, spec: JobSpec, graph: Graph, compression: str) -> Pace:
    """Plan the job with this compression and simulate a step of each of its phases."""
    job = replace(job_view(spec), cuts=tuple(even_cuts(graph)), compression=compression)
    plan, workload = make_plan(cluster, graph, job).plan, workload_of(graph)
    begins = [1, *(change.from_step for change in plan.codec_changes)]
    found = tuple((first, _simulated_s(plan_at(plan, first), workload, cluster)) for first in begins)
    return Pace(found, compression_text(plan))


def _simulated_s(plan: Plan, workload: Workload, cluster: Cluster) -> float:
    return simulate_plan(plan, workload, cluster, steps=_SIMULATED_STEPS).step_s


def measured_paces(cluster: Cluster, task: Task, steps: int, cuts: Sequence[int], slower: float) -> dict[str, Pace]:
    """Run some steps of each phase of each kind of compression on an emulated cluster."""
    later = f"auto:{AUTO_MILD_CEILING}"  # what "auto" is from some step on
    kinds = (*KINDS, later)
    found = step_times(cluster, {kind: _short_job(task, steps, kind, cuts) for kind in kinds}, slower)
    begin = parse_compression("auto")[1].begins(steps)
    paces = {kind: Pace(((1, found[kind].step_s),), found[kind].compression) for kind in KINDS}
    phases = ((1, found["auto"].step_s), (begin, found[later].step_s))
    return paces | {"auto": Pace(phases, found["auto"].compression)}


def _short_job(task: Task, steps: int, compression: str, cuts: Sequence[int]) -> Job:
    job = task.job(1, steps)
    job.compression, job.cuts, job.replan = compression, tuple(cuts), False
    return job


def steps_to(loss: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return after how many steps a curve of (step, loss) is at `loss`, which it reaches."""
    before = curve[0]
    for point in curve:
        if point[1] <= loss:
            share = (before[1] - loss) / (before[1] - point[1]) if before[1] > point[1] else 0.0
            return before[0] + share * (point[0] - before[0])
        before = point
    return curve[-1][0]


def measure(
    runs: Runs, seeds: int, steps: int, cluster: Cluster, *, quick: bool = False, slower: float = 0.0
) -> dict[str, Any]:
    """Return the ratios of times, and what they come from; step times are simulated unless `slower` is given."""
    task = tasks(quick=quick)["gpt"]
    steps = steps or task.settings.steps
    spec, graph = captured_graph(task.job(1, steps))
    paces = {kind: pace_of(cluster, spec, graph, kind) for kind in KINDS}
    simulated = {kind: pace.step_s for kind, pace in paces.items()}
    trained = {kind: pace.compression if kind.startswith("adatopk") else kind for kind, pace in paces.items()}
    curves = {
        kind: _mean_curve([runs.outcome("gpt", seed, steps, codec).curve for seed in range(1, seeds + 1)])
        for kind, codec in trained.items()
    }
    if slower:
        paces = measured_paces(cluster, task, steps, even_cuts(graph), slower)
    auto, budget_s = "auto", paces["auto"].seconds(steps)
    result: dict[str, Any] = {"seeds": seeds, "step_times": "measured" if slower else "simulated"}
    for name, other in (("auto_vs_none", "none"), ("auto_vs_adatopk", "adatopk:100")):
        loss = max(curves[auto][-1][1], curves[other][-1][1])
        times = {kind: paces[kind].seconds(steps_to(loss, curves[kind])) for kind in (auto, other)}
        result[name] = times[other] / times[auto]
        result[f"{name}_loss"] = loss
    result["kinds"] = {
        kind: {
            "step_s": [list(item) for item in pace.step_s],
            "simulated_step_s": [list(item) for item in simulated[kind]],
            "seconds": pace.seconds(steps),
            "last_loss": curves[kind][-1][1],
            "loss_when_auto_ends": loss_at(budget_s, pace, curves[kind]),
            "compression": pace.compression,
            "curve": curves[kind],
        }
        for kind, pace in paces.items()
    }
    return result


def loss_at(seconds: float, pace: Pace, curve: Sequence[tuple[float, float]]) -> float:
    """Return the loss after so much time; before the first measurement that one, after the last one the last."""
    before = curve[0]
    for point in curve:
        if pace.seconds(point[0]) >= seconds:
            here, there = pace.seconds(before[0]), pace.seconds(point[0])
            share = min(1.0, max(0.0, (seconds - here) / (there - here))) if there > here else 0.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return curve[-1][1]


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, float]]:
    return [(float(points[0][0]), statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="of every run; default: the model's own")
    parser.add_argument("--cache", type=Path, help="file of finished runs, as of benchmarks.convergence")
    parser.add_argument("--cluster", type=Path, help="a cluster file instead of the built-in one")
    parser.add_argument("--emulate", action="store_true", help="measure step times: takes 3 minutes")
    parser.add_argument("--slower", type=float, default=SLOWER, help="how many times slower --emulate lets things go")
    parser.add_argument("--speed", help="of every node, such as 20G; default: as the cluster file says")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: shows only that it works")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = CLUSTER if options.cluster is None else options.cluster.read_text()
    runs = Runs(options.cache, quick=options.quick)
    cluster = parse_cluster(text, "cluster")
    if options.speed:
        cluster = at_speed(cluster, parse_flops("--speed", options.speed))
    slower = options.slower if options.emulate else 0.0
    result = measure(runs, options.seeds, options.steps, cluster, quick=options.quick, slower=slower)
    if options.json:
        print(json.dumps(result))
        return
    for kind, found in result["kinds"].items():
        steps = ", ".join(f"{each:.3f} s from step {first}" for first, each in found["step_s"])
        print(f"{kind:12} {steps}; {found['seconds']:.0f} s in all, held-out loss {found['last_loss']:.4f}")
    print(f"to the same loss: {result['auto_vs_none']:.2f} x none, {result['auto_vs_adatopk']:.2f} x adatopk:100")


if __name__ == "__main__":
    main()
