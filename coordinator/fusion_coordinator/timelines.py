"""Measured spans of the last few steps of each job, in memory only."""

from __future__ import annotations

from collections import OrderedDict

from fusion.base.ids import JobId
from fusion.wire.v1 import node_pb2

STEPS, JOBS = 8, 16


class Timelines:
    """Takes what stages report; a new epoch of a job begins anew."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[JobId, tuple[int, dict[int, dict[int, node_pb2.StageSpans]]]] = OrderedDict()

    def add(self, job: JobId, epoch: int, spans: node_pb2.StageSpans) -> None:
        """Keep a stage's spans of a step; the oldest steps and jobs make room."""
        known, steps = self._jobs.get(job, (epoch, {}))
        if known != epoch:
            steps = {}
        steps.setdefault(spans.step, {})[spans.stage] = spans
        for step in sorted(steps)[:-STEPS]:
            del steps[step]
        self._jobs[job] = (epoch, steps)
        self._jobs.move_to_end(job)
        while len(self._jobs) > JOBS:
            self._jobs.popitem(last=False)

    def of(self, job: JobId) -> list[node_pb2.StageSpans]:
        """Return what is kept of a job, by step and stage."""
        steps = self._jobs.get(job, (0, {}))[1]
        return [steps[step][stage] for step in sorted(steps) for stage in sorted(steps[step])]
