"""Step times of `benchmarks.time_to_loss` as measured: real nodes of a stated speed behind a relay with its links."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion.base.errors import JobError
from fusion.cli.emulation import Emulation
from fusion.cli.helpers import Helpers
from fusion.job.job import Job
from fusion.plan.codecs import compression_text
from fusion.plan.types import Cluster

WARM_UP = 2  #: steps that do not count: connections and their estimates come up to speed
COUNTED = 7
PATIENCE_S = 900.0


@dataclass(frozen=True)
class StepTime:
    """What one kind of compression came to."""

    step_s: float  #: median
    planned_s: float  #: by the coordinator's planner, on the links as it measured them
    compression: str  #: with the codec of every link


def at_speed(cluster: Cluster, flops: float) -> Cluster:
    """Return the cluster with nodes of this speed."""
    return replace(cluster, nodes=tuple(replace(node, flops=flops) for node in cluster.nodes))


def slowed(cluster: Cluster, times: float) -> Cluster:
    """Return the cluster with everything that takes time taking so many times longer."""
    nodes = tuple(replace(node, flops=node.flops / times) for node in cluster.nodes)
    return Cluster(nodes, cluster.links.scaled(1 / times, times))


def step_times(cluster: Cluster, jobs: Mapping[str, Job], slower: float) -> dict[str, StepTime]:
    """Run the jobs one after the other on one emulated cluster, a few steps each.

    The coordinator plans them by what it measured of the links; it is as users start it. Emulated is a cluster in
    which everything takes `slower` times longer, and times are divided by that.
    """
    with tempfile.TemporaryDirectory(prefix="fusion-steps-") as path, Helpers(Path(path, "l")) as helpers:
        emulation = Emulation(helpers, Path(path), slowed(cluster, slower))
        emulation.start()
        emulation.wait()
        found = {name: _step_time(emulation, helpers, job) for name, job in jobs.items()}
    return {
        name: replace(one, step_s=one.step_s / slower, planned_s=one.planned_s / slower) for name, one in found.items()
    }


def _step_time(emulation: Emulation, helpers: Helpers, job: Job) -> StepTime:
    with job.submit(emulation.cluster.address, emulation.cluster.credentials) as run:
        end_s = time.monotonic() + PATIENCE_S
        while (status := run.status()).step < WARM_UP + COUNTED:
            helpers.check()
            if status.state.ended or time.monotonic() > end_s:
                raise JobError(f"the job is {status.state} after step {status.step}: {status.reason}")
            time.sleep(0.2)
        steps = list(run.metrics(follow=False))
        run.cancel()
    if status.plan is None:
        raise JobError("the job has no plan")
    measured = _median([step.step_s for step in steps])
    return StepTime(measured, status.plan.step_s, compression_text(status.plan))


def _median(step_s: Sequence[float]) -> float:
    return statistics.median(step_s[WARM_UP : WARM_UP + COUNTED])
