"""The FusionLLM paper's setting in small: unlike nodes at three sites, and its methods beside our default.

    python -m benchmarks.paper_testbed --lab PATH/wanlab.py --json

Six hosts on the lab's paper-testbed.json (8 to 100 Mbit/s between sites) stand for devices of which the fastest compute
ten times as fast as the slowest. A GPT of six blocks trains on them with the same seed and data:

equal_number    as many operators on each node, without codecs
equal_compute   the same time on each node, without codecs
paper           the paper's: OP-Fence, and AdaTopK with ratio 100
ours            our default planner, compression "auto"

The baselines keep the cluster's order of the nodes. Of the 720 orders they train in two: the median one by predicted
step time, which stands for planners that know nothing of the network (`vs_equal_number_dense`,
`vs_equal_compute_dense`), and site by site (`vs_*_dense_by_site`), which few orders better. All `vs_*` are their time
per step over ours. Times are medians, the first steps left out; where codecs change during the run, each part of the
run counts by its share of the steps.

`loss_gap_pct` compares held-out losses of the weights after the same number of steps, without codecs, with those of the
dense run, which is made in one process: where a dense model is cut changes no loss. `--cache FILE` keeps finished runs,
so that they can be made one at a time with --only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lab import Topology, congestion_control, hosts_of, lab_up
from benchmarks.paper_testbed_orders import Ranking, equal_compute_cuts, ranking
from benchmarks.paper_testbed_training import TENSOR_BYTES, Order, Training, make_job, train_dense
from benchmarks.pipeline import TESTBED
from fusion.base.errors import ConfigError
from fusion.job.prepare import captured_graph
from fusion.plan.types import JobView
from fusion.plan.workload import Workload, workload_of
from fusion.protocol.job import job_view

SLOWEST_FLOPS = 1.25e9  #: as fast as leaves the two cores that compute for all nodes 60 % idle in our steps
SPEEDS = {"a0": 10, "a1": 10, "b0": 8, "b1": 8, "c0": 1, "c1": 1}  #: times the slowest: sites of unlike generations
STEPS, SHORT_STEPS = 36, 5
WARM_UP = 2
DENSE = "dense"  #: the run in one process


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to train."""

    planner: str
    compression: str
    by_site: bool  #: whether the nodes are in order site by site, or in the median order
    whole: bool = False  #: whether all steps are trained; else only as many as its time needs


KINDS = {
    "equal_number": Kind("equal-number", "none", by_site=False),
    "equal_compute": Kind("equal-compute", "none", by_site=False),
    "equal_number_by_site": Kind("equal-number", "none", by_site=True),
    "equal_compute_by_site": Kind("equal-compute", "none", by_site=True),
    "paper": Kind("op-fence", "adatopk:100", by_site=True, whole=True),
    "ours": Kind("fusion", "auto", by_site=True, whole=True),
}


def training(name: str, steps: int) -> Training:
    """Return a run; one that is only timed stops early, and learns until then as in a whole one."""
    kind = KINDS[name]
    return Training(name, kind.planner, kind.compression, steps if kind.whole else min(steps, SHORT_STEPS), steps)


def seconds_per_step(step_s: Sequence[float], changes: Sequence[int]) -> float:
    """Return the time of a step over the run: each part's median, by its share of the steps.

    `changes`: the first step of each part but the first. The first WARM_UP steps are left out, and so is the first of
    every later part that has more.
    """
    begins = [1, *sorted(changes), len(step_s) + 1]
    total = 0.0
    for number, (begin, end) in enumerate(pairwise(begins)):
        part = list(step_s[begin - 1 : end - 1])
        skipped = min(WARM_UP if number == 0 else 1, len(part) - 1)
        total += statistics.median(part[skipped:]) * len(part)
    return total / len(step_s)


def gap_pct(loss: float, dense_loss: float) -> float:
    """Return by how many per cent a loss is above the dense run's."""
    return 100 * (loss / dense_loss - 1)


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys that are promised, null where their runs are missing."""
    times = {
        name: seconds_per_step(runs[name]["step_s"], [int(at) for at in runs[name]["changes"]])
        for name in KINDS
        if name in runs
    }
    result: dict[str, Any] = {}
    for name in KINDS:
        if name == "ours":
            continue
        key = {"paper": "vs_paper"}.get(name, f"vs_{name.removesuffix('_by_site')}_dense")
        key += "_by_site" if name.endswith("_by_site") else ""
        result[key] = times[name] / times["ours"] if name in times and "ours" in times else None
    for name, key in (("ours", "loss_gap_pct"), ("paper", "paper_loss_gap_pct")):
        known = name in runs and DENSE in runs
        result[key] = gap_pct(runs[name]["served_loss"], runs[DENSE]["served_loss"]) if known else None
        last = [statistics.fmean(runs[run]["losses"][-3:]) for run in (name, DENSE)] if known else None
        result[f"train_{key}"] = gap_pct(*last) if last else None
    return result | {f"{name}_step_s": seconds for name, seconds in times.items()}


def read_topology(script: Path) -> Topology:
    """Return the testbed of the lab; ConfigError without one."""
    file = script.parent / TESTBED
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


@lru_cache
def _model(steps: int) -> tuple[Workload, JobView]:
    draft, graph = captured_graph(make_job(training("equal_number", steps)))
    return workload_of(graph), job_view(draft)


def rank(topology: Topology, flops: Mapping[str, float], steps: int) -> Ranking:
    """Rank the orders for equal numbers of operators."""
    return ranking(topology, flops, *_model(steps), "equal-number")


def with_cuts(found: Training, base: Order, hosts: Sequence[str]) -> Training:
    """Return a run by equal compute with its cuts; others as they are."""
    if found.planner != "equal-compute":
        return found
    cuts = equal_compute_cuts(base.topology, hosts, base.speeds, *_model(found.length))
    return msgspec.structs.replace(found, cuts=cuts)


def measure(script: Path, order: Order, hosts: Sequence[str]) -> dict[str, Any]:
    """Run these on one lab and one cluster, whose nodes are in the order of `hosts`."""
    sites = order.topology["hosts"]
    topology = order.topology | {"hosts": {host: sites[host] for host in hosts}}
    with lab_up(script, topology) as lab:
        order = msgspec.structs.replace(order, lab=lab.name, topology=topology)
        command = [sys.executable, "-m", "benchmarks.paper_testbed_training"]
        output = lab.run(lab.hosts[0], command, 1200, msgspec.json.encode(order).decode())
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def runs_of(options: argparse.Namespace, cached: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted runs with those that were there; makes the missing ones."""
    topology = read_topology(options.lab)
    flops = {host: options.slowest * SPEEDS[host] for host in hosts_of(topology)}
    missing = [name for name in options.only or [DENSE, *KINDS] if name not in cached]
    runs = dict(cached)
    if DENSE in missing:
        runs[DENSE] = train_dense(training("ours", options.steps))
    base = Order(str(options.lab.resolve()), "", dict(topology), flops, [])
    for by_site in (False, True):
        names = [name for name in missing if name != DENSE and KINDS[name].by_site == by_site]
        if not names:
            continue
        hosts = hosts_of(topology)
        if not by_site:
            ranked = rank(topology, flops, options.steps)
            hosts = ranked.median
            quantiles = {f"{share:.0%}": ranked.seconds(share) for share in (0, 0.25, 0.5, 0.75, 1)}
            runs["orders"] = {"median": hosts, "predicted_equal_number_s": quantiles}
        trainings = [with_cuts(training(name, options.steps), base, hosts) for name in names]
        runs |= measure(options.lab, msgspec.structs.replace(base, trainings=trainings), hosts)
    return runs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, required=True, metavar="PATH/wanlab.py")
    parser.add_argument("--only", action="append", choices=[DENSE, *KINDS], help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--slowest", type=float, default=SLOWEST_FLOPS, metavar="FLOPS", help="speed of the slowest node (%(default)g)"
    )
    parser.add_argument("--cache", type=Path, help="JSON file of finished runs, which are not made again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cached = json.loads(options.cache.read_text()) if options.cache and options.cache.is_file() else {}
    runs = runs_of(options, cached)
    if options.cache:
        options.cache.write_text(json.dumps(runs))
    result = summary(runs)
    if options.json:
        extra = {"tensor_bytes": TENSOR_BYTES, "slowest_flops": options.slowest, "speeds": SPEEDS, "runs": runs}
        print(json.dumps(result | extra | {"congestion_control": congestion_control()}))
        return
    for key, value in result.items():
        print(f"{key:32} {'-' if value is None else format(value, '.3f')}")


if __name__ == "__main__":
    main()
