"""F36: hours of random faults. `make soak MINUTES=30`; left out unless FUSION_SOAK_MINUTES says for how long."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.chaos import COORDINATOR
from tests.support.faultcluster import FaultCluster, make_job, paced, reference

pytestmark = pytest.mark.faults

MINUTES = float(os.environ.get("FUSION_SOAK_MINUTES", "0"))
NODES, STAGES, STEPS = 6, 3, 200
MTBF_S = 60.0
NO_PROGRESS_S = 180.0  #: the job has to do a step at least so often


class Storm:
    """One fault after the other, and what repairs each of them after a while."""

    def __init__(self, cluster: FaultCluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self._next_s = time.monotonic() + 10.0
        self.done: Counter[str] = Counter()

    def look(self) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        for item in [item for item in self._repairs if item[0] <= now_s]:
            self._repairs.remove(item)
            item[1]()
        if now_s >= self._next_s:
            self._next_s = now_s + MTBF_S * self._random.uniform(0.5, 2.0)
            self._strike()

    def calm(self) -> None:
        """Repair all that is broken."""
        for _, repair in self._repairs:
            repair()
        self._repairs.clear()

    def _after(self, low_s: float, high_s: float, repair: Callable[[], None]) -> None:
        self._repairs.append((time.monotonic() + self._random.uniform(low_s, high_s), repair))

    def _strike(self) -> None:
        faults = [self._kill_worker, self._kill_node, self._freeze, self._cut_off, self._reset, self._kill_coordinator]
        fault = self._random.choice(faults)
        self.done[fault.__name__.lstrip("_")] += 1
        print(f"soak: {fault.__name__.lstrip('_')}", flush=True)
        fault()

    def _node(self) -> str:
        living = [name for name in self._cluster.nodes if self._cluster.helpers.named[name].process.poll() is None]
        return self._random.choice(living)

    def _kill_worker(self) -> None:
        workers = list(self._cluster.workers().values())
        if workers:
            self._random.choice(workers).kill()

    def _kill_node(self) -> None:
        name = self._node()
        self._cluster.kill(name)
        self._after(2.0, 60.0, lambda: self._again(name))

    def _again(self, name: str) -> None:
        if self._cluster.helpers.named[name].process.poll() is not None:
            self._cluster.helpers.again(name)

    def _freeze(self) -> None:
        stopped = self._cluster.stop_process(self._node())

        def thaw() -> None:
            if psutil.pid_exists(stopped.pid):
                self._cluster.continue_process(stopped)

        self._after(5.0, 50.0, thaw)

    def _cut_off(self) -> None:
        assert self._cluster.chaos is not None
        self._cluster.chaos.isolate(self._node())
        self._after(2.0, 60.0, self._cluster.chaos.heal)

    def _reset(self) -> None:
        assert self._cluster.chaos is not None
        one, other = self._random.sample([*self._cluster.nodes, COORDINATOR], 2)
        self._cluster.chaos.cut(one, other, "reset")

    def _kill_coordinator(self) -> None:
        self._cluster.kill(COORDINATOR)
        self._after(1.0, 12.0, lambda: self._again(COORDINATOR))


@pytest.mark.skipif(not MINUTES, reason="FUSION_SOAK_MINUTES does not ask for it")
@pytest.mark.timeout(0)
def test_f36_jobs_train_exactly_through_random_faults(tmp_path: Path) -> None:
    end_s = time.monotonic() + 60.0 * MINUTES
    job = make_job(STEPS, STAGES)
    reference(STEPS)
    jobs, useful, done_again = 0, 0, 0
    with FaultCluster(tmp_path, nodes=NODES, chaos=True) as cluster:
        storm = Storm(cluster, int(os.environ.get("FUSION_SOAK_SEED", "1")))
        cluster.set_failpoints(paced(0.05))
        while time.monotonic() < end_s:
            run = cluster.submit(job)
            step, moved_s = 0, time.monotonic()
            while time.monotonic() < end_s:
                storm.look()
                time.sleep(0.2)
                newest = _newest_step(cluster, run.job_id)
                if newest != step:
                    step, moved_s = newest, time.monotonic()
                assert time.monotonic() - moved_s < NO_PROGRESS_S, f"no step for {NO_PROGRESS_S:.0f} s"
                if step >= STEPS:
                    break
            storm.calm()
            if cluster.chaos is not None:
                cluster.chaos.heal()
            history = cluster.finishes(run, job, 300.0)
            run.close()
            jobs, useful, done_again = jobs + 1, useful + STEPS, done_again + history.lost_steps()
        print(f"soak: {jobs} jobs, {useful} steps, {done_again} done again, faults {dict(storm.done)}", flush=True)
        cluster.heal()
        cluster.check_nothing_is_left()


def _newest_step(cluster: FaultCluster, job: str) -> int:
    """Return the last step that a stage has finished, from the histories alone: the coordinator may be away."""
    return max((line["step"] for line in cluster.events(job).steps), default=0)
