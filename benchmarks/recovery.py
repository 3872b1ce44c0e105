"""How long a job takes to go on after something broke, what it loses, and what it costs to be ready for that.

    python -m benchmarks.recovery --json

A coordinator and four nodes run as processes on this machine and train a transformer of 200,000 parameters in three
stages, strictly, so that the curve can be compared bit by bit with a run in one process. In each case something is
killed, frozen or cut off in the middle. Times come from the histories that all processes write:

detect_s   from the fault to the coordinator's commit that the job broke (of the coordinator's own death: none)
recover_s  from the fault to the first step that all stages have finished since (of the coordinator's death: from its
           restart until it answers that the job runs)
lost_steps steps that all stages had finished and that were done again

overhead_ratio is the median step time with a copy of the state kept elsewhere after each step and a checkpoint every
ten steps, over that without both, on four nodes that stand for devices a hundred times slower than this machine
reckons, so that they leave the processor to what runs beside a step. The two take turns, four times each.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fusion
from fusion.cli.models import GPT
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, History, make_job, paced, reference

STEPS, STAGES, AT = 50, 3, 25  #: by then each node has its next worker process ready, as ever while it trains
LIMIT_S = 180.0
EMULATED_FLOPS = 5e9  #: a step takes about a second then
SILENT_S = 45.0  #: so long a frozen node stands still; longer than its lease


@dataclass(frozen=True)
class Case:
    """What one fault did."""

    name: str
    kind: str  #: "crash", "silence" or "coordinator"
    detect_s: float | None
    recover_s: float
    lost_steps: int
    curve_equal: bool
    paused_s: float  #: longest time between two steps, beside the fault itself


def crash(cluster: FaultCluster, name: str, point: str) -> Case:
    """Kill a stage's node where `point` says."""
    cluster.set_failpoints(paced(0.1, f"{point}:kill9-node"))
    job = make_job(STEPS, STAGES)
    with cluster.submit(job) as run:
        equal = _curve_equal(run)
        history = cluster.events(run.job_id)
    return _case(name, "crash", history, history.failpoint_s(), equal)


def silence(cluster: FaultCluster, name: str, begin: Callable[[str], Any], end: Callable[[Any], None]) -> Case:
    """Let the node of the second stage be silent for `SILENT_S`."""
    cluster.set_failpoints(paced(0.05))
    job = make_job(STEPS, STAGES)
    with cluster.running(job, step=AT) as run:
        at_s = time.monotonic()
        token = begin(run.status().stages[1].node_name)
        time.sleep(SILENT_S)
        end(token)
        equal = _curve_equal(run)
        history = cluster.events(run.job_id)
    return _case(name, "silence", history, at_s, equal)


def coordinator_killed(cluster: FaultCluster, name: str) -> Case:
    """Kill the coordinator for ten seconds."""
    cluster.set_failpoints(paced(0.25))
    job = make_job(STEPS, STAGES)
    with cluster.running(job, step=AT) as run:
        at_s = time.monotonic()
        cluster.helpers.named["coordinator"].process.send_signal(signal.SIGKILL)
        cluster.helpers.named["coordinator"].process.wait(10)
        time.sleep(10.0)
        cluster.helpers.again("coordinator")
        again_s = time.monotonic()
        eventually(lambda: run.status().state is fusion.JobState.RUNNING, "the job runs", LIMIT_S)
        back_s = time.monotonic()
        equal = _curve_equal(run)
        history = cluster.events(run.job_id)
    lost = history.lost_steps()
    return Case(name, "coordinator", None, back_s - again_s, lost, equal, _longest_gap_s(history, at_s))


def _curve_equal(run: fusion.Run) -> bool:
    """Wait for a job's end; whether each step's loss is that of the undisturbed run, bit by bit."""
    run.wait(timeout=LIMIT_S)
    return [step.loss for step in run.metrics()] == list(reference(STEPS).losses)


def _case(name: str, kind: str, history: History, at_s: float, equal: bool) -> Case:
    broke = [line["at_s"] for line in history.plans if line["kind"] == "JobBroke"]
    again_s = _recovered_s(history, at_s)
    detect_s = broke[0] - at_s if broke else None
    return Case(name, kind, detect_s, again_s - at_s, history.lost_steps(), equal, _longest_gap_s(history, at_s))


def _recovered_s(history: History, at_s: float) -> float:
    """Return when all stages of a later epoch had first finished a step."""
    first = min(history.epochs())
    step = min(line["step"] for line in history.steps if line["epoch"] > first)
    return max(float(line["at_s"]) for line in history.steps if line["epoch"] > first and line["step"] == step)


def _longest_gap_s(history: History, at_s: float) -> float:
    """Return the longest time between two finished steps of the first stage, from the fault on."""
    times = sorted(line["at_s"] for line in history.steps if line["stage"] == 0 and line["at_s"] > at_s)
    return max((b - a for a, b in pairwise(times)), default=0.0)


def cases(directory: Path, wanted: str) -> list[Case]:
    """Run all cases whose name holds one of the comma-separated parts of `wanted`.

    Only the partition goes through a relay: it answers for a dead node, whose host would refuse the connection.
    """
    chosen = {name for name in (*_direct(), "partition") if any(part in name for part in wanted.split(","))}
    found = []
    for chaos in (False, True):
        todo = {"partition": _partition} if chaos else _direct()
        todo = {name: run for name, run in todo.items() if name in chosen}
        if not todo:
            continue
        names = [f"node-{number}" for number in range(4)]
        spare = {name: ["--spare-worker"] for name in names}  # as the product has it, and the demo has not
        with FaultCluster(directory / f"chaos-{chaos}", nodes=4, chaos=chaos, arguments=spare) as cluster:
            for name, run in todo.items():
                cluster.heal()
                found.append(run(cluster, name))
                print(found[-1], file=sys.stderr, flush=True)
    return found


def _direct() -> dict[str, Callable[[FaultCluster, str], Case]]:
    """Return the cases that need no relay, by name."""
    todo: dict[str, Callable[[FaultCluster, str], Case]] = {}
    for stage in range(STAGES):
        for place, point in (
            ("in forward", f"stage.forward@stage={stage},step={AT},micro_batch=2"),
            ("in backward", f"stage.backward@stage={stage},step={AT},micro_batch=2"),
            ("between two optimizer steps", f"stage.after_update@stage={stage},step={AT}"),
        ):
            todo[f"kill stage {stage} {place}"] = partial(crash, point=point)
    return todo | {"kill coordinator": coordinator_killed, "SIGSTOP": _frozen}


def _frozen(cluster: FaultCluster, name: str) -> Case:
    return silence(cluster, name, cluster.stop_process, cluster.continue_process)


def _partition(cluster: FaultCluster, name: str) -> Case:
    chaos = cluster.chaos
    assert chaos is not None
    return silence(cluster, name, chaos.isolate, lambda _: chaos.heal())


# ---- what it costs ----


def overhead_ratio(directory: Path, rounds: int) -> float:
    """Return the ratio of step times, with over without copies and checkpoints."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with FaultCluster(directory, nodes=4, emulated_flops=EMULATED_FLOPS) as cluster:
        for number in range(rounds):
            for ready in (True, False) if number % 2 else (False, True):
                cluster.heal()
                cluster.set_failpoints("" if ready else "stage.keep:never*all")
                with cluster.submit(_large_job(ready)) as run:
                    run.wait(timeout=LIMIT_S)
                    times[ready] += [step.step_s for step in run.metrics() if step.step > 3]
    return statistics.median(times[True]) / statistics.median(times[False])


def _large_job(ready: bool) -> fusion.Job:
    tokens = torch.randint(0, 256, (64, 65), generator=torch.Generator().manual_seed(1))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    settings: dict[str, Any] = {"checkpoint": 10} if ready else {}
    return fusion.Job(
        GPT(), rows, fusion.AdamW(1e-4), steps=25, batch_size=16, micro_batches=4, stages=4, threads=1,
        planner="equal-compute", replan=False, compression="none", **settings,
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default="", help="only those whose name holds one of these, with commas between")
    parser.add_argument("--rounds", type=int, default=4, help="of the overhead's measurement; 0: leave it out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fusion-recovery-") as directory:
        found = cases(Path(directory), options.cases)
        result["cases"] = [asdict(case) for case in found]
        for kind in ("crash", "silence", "coordinator"):
            result[f"{kind}_recover_s_max"] = max((case.recover_s for case in found if case.kind == kind), default=None)
        result["lost_steps_max"] = max((case.lost_steps for case in found), default=None)
        result["curves_equal"] = all(case.curve_equal for case in found)
        if options.rounds:
            result["overhead_ratio"] = overhead_ratio(Path(directory) / "overhead", options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    for case in found:
        detect = "" if case.detect_s is None else f"detected in {case.detect_s:.1f} s, "
        equal = "same curve" if case.curve_equal else "ANOTHER CURVE"
        print(f"{case.name:45} {detect}recovered in {case.recover_s:.1f} s, {case.lost_steps} steps lost, {equal}")
    for name, value in result.items():
        if name != "cases":
            print(f"{name:26} {value}")


if __name__ == "__main__":
    main()
