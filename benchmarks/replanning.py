"""How well a running job gets over a link that falls to a tenth and a node that slows to a third at the same time.

    python -m benchmarks.replanning --json

An emulated cluster as that of `fusion demo --cluster`, with a coordinator as users start it. Once the job runs under
its first plan, the link between its first two stages and the node of the first one are slowed down. `recovered_share`
is the step time that the planner predicts for the best plan on the cluster as it then is, over the step time that is
measured after the job has moved. It takes about three minutes: a job stays under its plan for a minute at least.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fusion.base.errors import JobError, UnreachableError
from fusion.base.ids import NodeId
from fusion.cli.emulation import Emulation
from fusion.cli.helpers import Helpers, run_once
from fusion.cli.models import mini_gpt_job
from fusion.job.prepare import captured_graph
from fusion.job.run import Run
from fusion.plan.cluster_file import parse_cluster
from fusion.plan.planner import make_plan
from fusion.plan.types import Cluster, Link, Plan
from fusion.protocol.job import job_view
from fusion.protocol.metrics import StepMetrics

CLUSTER = """
[[nodes]]
name = "n"
speed = "0.8G"
memory = "1GiB"
count = 4
[default]
rate = "100 Mbit/s"
delay = "5 ms"
"""
LINK_SHARE, NODE_SHARE = 1 / 10, 1 / 3
STEPS = 100_000  #: the benchmark ends the run
STEPS_BEFORE, STEPS_AFTER = 6, 10
WARM_UP = 2  #: steps after a start that do not count
PATIENCE_S = 300.0


def measure(cluster: Cluster) -> dict[str, Any]:
    """Run the job through the change and return what was measured."""
    job = mini_gpt_job(STEPS, threads=1)
    spec, graph = captured_graph(job)
    with tempfile.TemporaryDirectory(prefix="fusion-replanning-") as path, Helpers(Path(path, "l")) as helpers:
        emulation = Emulation(helpers, Path(path), cluster)
        emulation.start()
        known = emulation.wait()
        with job.submit(emulation.cluster.address, emulation.cluster.credentials) as run:
            _wait(helpers, run, lambda: run.status().step >= STEPS_BEFORE)
            first = _plan(run)
            one, other = (stage.node_name for stage in first.stages[:2])
            emulation.wan.shape(one, other, _slower(known, first))
            node = next(item for item in cluster.nodes if item.name == one)
            speed = [f"{node.flops * NODE_SHARE:.0f}", "--home", str(Path(path, one))]
            run_once("fusion-node", "fusion_node.cli", ["emulate-speed", *speed], emulation.cluster.environment)
            changed_after = run.status().step
            _wait(helpers, run, lambda: _plan(run).epoch > first.epoch)
            moved_after = run.status().step
            _wait(helpers, run, lambda: run.status().step >= moved_after + WARM_UP + STEPS_AFTER)
            steps, last = list(run.metrics(follow=False)), _plan(run)
            run.cancel()
    best = make_plan(_changed(known, first), graph, job_view(spec)).plan
    return _figures(steps, (changed_after, moved_after), first, last, best)


def _plan(run: Run) -> Plan:
    plan = run.status().plan
    if plan is None:
        raise JobError("the job has no plan")
    return plan


def _wait(helpers: Helpers, run: Run, condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        helpers.check()
        if run.status().state.ended or time.monotonic() > end_s:
            raise UnreachableError(f"the job is {run.status().state} after step {run.status().step}")
        time.sleep(0.2)


def _pair(plan: Plan) -> tuple[NodeId, NodeId]:
    return plan.stages[0].node, plan.stages[1].node


def _slower(known: Cluster, plan: Plan) -> Link:
    nodes = {node.node: node for node in known.nodes}
    found = known.links.between(*(nodes[node] for node in _pair(plan)))
    if found is None:
        raise JobError("the first two stages have no link")
    return Link(found.rate_bytes_per_s * LINK_SHARE, found.delay_s)


def _changed(known: Cluster, plan: Plan) -> Cluster:
    """Return the cluster as it is after the change."""
    one, other = _pair(plan)
    link = _slower(known, plan)
    nodes = tuple(replace(node, flops=node.flops * NODE_SHARE) if node.node == one else node for node in known.nodes)
    pairs = {**known.links.pairs, (one, other): link, (other, one): link}
    return Cluster(nodes, replace(known.links, pairs=pairs))


def _figures(steps: Sequence[StepMetrics], at: tuple[int, int], first: Plan, last: Plan, best: Plan) -> dict[str, Any]:
    changed_after, moved_after = at
    before = [step.step_s for step in steps if WARM_UP < step.step <= changed_after]
    between = [step.step_s for step in steps if changed_after + 1 < step.step < moved_after]
    after = [step.step_s for step in steps if step.step > moved_after + WARM_UP]
    return {
        "recovered_share": best.step_s / median(after),
        "moves": last.epoch - first.epoch,
        "before_s": median(before),
        "changed_s": median(between),
        "after_s": median(after),
        "best_s": best.step_s,
        "planned_s": last.step_s,
        "steps_until_moved": moved_after - changed_after,
        "before": [(stage.node_name, stage.end_operator) for stage in first.stages],
        "after": [(stage.node_name, stage.end_operator) for stage in last.stages],
        "best": [(stage.node_name, stage.end_operator) for stage in best.stages],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    result = measure(parse_cluster(CLUSTER, "replanning"))
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:18} {value:.3f}" if isinstance(value, float) else f"{key:18} {value}")


if __name__ == "__main__":
    main(sys.argv[1:])
