"""Whether steps take as long as plans say: emulated clusters, run for real, predicted against measured.

    python -m benchmarks.prediction --json

Every cluster is brought to life as `fusion demo --cluster` does it: daemons that stand for its nodes, each pass
stretched to FLOPs over the node's speed, and links shaped by the relay. The coordinator measures the links and plans as
always. The same job then runs under our plan and under those of the baselines, wherever theirs is slower than ours by
more than 1 % of the predicted time.

`median_error` and `worst_error` are |predicted - measured| / measured of our plans, with the step time that users see
in the plan; `simulated_*` are those of the simulator. `ranking_min` is the least of measured over predicted speed-up,
over all baselines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.prediction_clusters import clusters
from fusion.base.errors import JobError
from fusion.cli.demoprediction import Prediction
from fusion.cli.emulation import Emulation, Load
from fusion.cli.helpers import Helpers
from fusion.cli.models import mini_gpt_job
from fusion.job.job import Job
from fusion.plan.planner import Options, make_plan
from fusion.plan.types import Cluster, Plan

BASELINES = ("equal-number", "op-fence")
STEPS, BASELINE_STEPS = 5, 3  #: of which the first warms up
ALIKE = 1.01


def make_job(planner: str, steps: int) -> Job:
    """Return the job; nothing but its planner and its length differs."""
    return mini_gpt_job(steps, threads=1, planner=planner, replan=False)


def run_job(emulation: Emulation, load: Load, planner: str, steps: int) -> Prediction:
    """Run the job under a planner's plan to its end."""
    cluster = emulation.cluster.seen()
    job = make_job(planner, steps)
    with job.submit(emulation.cluster.address, emulation.cluster.credentials) as run:
        metrics = list(run.metrics())
        status = run.status()
    if len(metrics) < steps:
        raise JobError(f"the job ended after {len(metrics)} of {steps} steps: {status.reason}")
    return load.prediction(status, cluster, metrics)


def measure_cluster(name: str, file: Cluster, load: Load) -> dict[str, Any]:
    """Return what was predicted and measured on one cluster, by planner."""
    begin_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fusion-prediction-") as directory,
        Helpers(Path(directory, "l")) as helpers,
    ):
        emulation = Emulation(helpers, Path(directory), file)
        emulation.start()
        emulation.wait()
        ours = run_job(emulation, load, "fusion", STEPS)
        found: dict[str, Any] = {"fusion": ours.as_json(), "ranking": {}}
        for planner in BASELINES:
            if same(ours.plan, make_plan(ours.cluster, load.graph, load.view, Options(planner)).plan):
                continue
            theirs = run_job(emulation, load, planner, BASELINE_STEPS)
            found[planner] = theirs.as_json()
            predicted = theirs.plan.step_s / ours.plan.step_s
            measured = theirs.measured_s / ours.measured_s
            found["ranking"][planner] = {"predicted": predicted, "measured": measured, "ratio": measured / predicted}
    found["seconds"] = time.monotonic() - begin_s
    say(name, found)
    return found


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans hardly differ in their time: who is faster could not be told from a few steps."""
    return max(one.step_s, other.step_s) <= ALIKE * min(one.step_s, other.step_s)


def say(name: str, found: dict[str, Any]) -> None:
    """Tell on stderr how it goes."""
    print(f"{name} ({found['seconds']:.0f} s)", file=sys.stderr)
    for planner, item in found.items():
        if planner not in ("fusion", *BASELINES):
            continue
        print(
            f"  {planner:14} measured {item['measured_s']:.3f} s, predicted {item['predicted_s']:.3f} "
            f"({item['error']:.1%} off), simulated {item['simulated_s']:.3f} ({item['simulated_error']:.1%} off), "
            f"{len(item['stages'])} stages",
            file=sys.stderr,
        )


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the keys that are promised, and everything else by cluster."""
    errors = [item["fusion"]["error"] for item in found.values()]
    simulated = [item["fusion"]["simulated_error"] for item in found.values()]
    ratios = [rank["ratio"] for item in found.values() for rank in item["ranking"].values()]
    every = [item[name]["error"] for item in found.values() for name in ("fusion", *BASELINES) if name in item]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "simulated_median_error": median(simulated),
        "simulated_worst_error": max(simulated),
        "ranking_min": min(ratios, default=None),
        "all_plans_median_error": median(every),
        "all_plans_worst_error": max(every),
        "clusters": found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=list(clusters()), action="append", help="one cluster; may be repeated")
    options = parser.parse_args(arguments)
    load = Load(make_job("fusion", STEPS))
    files = {name: file for name, file in clusters().items() if not options.only or name in options.only}
    result = summary({name: measure_cluster(name, file, load) for name, file in files.items()})
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            if key != "clusters":
                print(f"{key:24} {value:.3f}")


if __name__ == "__main__":
    main()
