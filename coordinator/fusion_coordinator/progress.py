"""Steps and log lines of jobs: put together, kept in batches, and read by whoever follows.

Readers hold a position and pull; nothing is queued for them, so a slow one costs nothing (F39).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence

from fusion.base.ids import JobId
from fusion.observe.logs import escape_control
from fusion.wire.v1 import coordinator_pb2, node_pb2
from fusion_coordinator.store.base import LogRow, StepRow
from fusion_coordinator.store.thread import StoreThread

Past = tuple[tuple[int, int], ...]  #: (last step, number of stages) of each plan before the present one, in order

RING = 512  #: finished steps in memory; older ones are read from the store
PAGE = 256  #: steps or lines per read of the store
MAX_LINE = 2000
_DROP_EVERY = 1000
_JOBS_IN_MEMORY = 64


def combine(parts: Iterable[node_pb2.StageStep]) -> coordinator_pb2.StepMetrics:
    """Put one step together from what its stages reported.

    Bytes are summed and the longest duration counts; loss, evaluation and norm come from the stage that has them.
    """
    stages = sorted(parts, key=lambda part: part.stage)
    metrics = coordinator_pb2.StepMetrics(
        step=stages[0].step,
        loss=next((part.loss for part in stages if part.HasField("loss")), math.nan),
        grad_norm=next((part.grad_norm for part in stages if part.HasField("grad_norm")), math.nan),
        learning_rate=stages[0].learning_rate,
        skipped=any(part.skipped for part in stages),
        step_s=max(part.step_s for part in stages),
        samples=max(part.samples for part in stages),
        tokens=max(part.tokens for part in stages),
        bytes=sum(link.bytes for part in stages for link in part.sent),
        stages=stages,
    )
    for part in stages:
        if part.HasField("eval_loss"):
            metrics.eval_loss = part.eval_loss
    return metrics


class Signal:
    """Wakes all who wait, as often as it is given."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def give(self) -> None:
        """Wake everybody who took the event before now."""
        self._event.set()
        self._event = asyncio.Event()

    def take(self) -> asyncio.Event:
        """Return an event that the next `give` sets. Take it before looking, wait for it after."""
        return self._event


class JobProgress:
    """One job's steps and lines in memory."""

    def __init__(
        self,
        job: JobId,
        stages: int,
        last: coordinator_pb2.StepMetrics | None,
        last_log: int,
        past: Past = (),
        floor: int = 0,
    ) -> None:
        self.job, self.stages, self.past = job, stages, past
        self._floor = floor  #: steps up to this one are done, whoever reported them
        self.last = last  #: the last finished step
        self.last_log = last_log
        self.changed = Signal()
        self.newest = last.step if last is not None else 0  #: the last step that any stage reported
        self.told = self.last_step  #: the last step of which the loss is known
        self.closed_after: int | None = None  #: later steps do not count: they are about to be done again
        self._parts: dict[int, dict[int, node_pb2.StageStep]] = {}
        self._ring: deque[coordinator_pb2.StepMetrics] = deque(maxlen=RING)
        self._lines: deque[LogRow] = deque(maxlen=RING)

    @property
    def last_step(self) -> int:
        """Number of the last finished step: all stages reported it, or a plan went on from it."""
        return max(self.last.step if self.last is not None else 0, self._floor)

    def stages_of(self, step: int) -> int:
        """Return how many stages report a step."""
        return next((stages for last_step, stages in self.past if step <= last_step), self.stages)

    def add_step(self, part: node_pb2.StageStep) -> None:
        """Take one stage's report. Steps finish in order: when a later one has, an earlier one's report was lost."""
        self.newest = max(self.newest, part.step)
        if part.HasField("loss"):
            self.told = max(self.told, part.step)
        if part.step <= self.last_step:
            return
        parts = self._parts.setdefault(part.step, {})
        parts.setdefault(part.stage, part)
        if len(parts) < self.stages_of(part.step):
            return
        self.last = combine(parts.values())
        self._ring.append(self.last)
        self._parts = {step: waiting for step, waiting in self._parts.items() if step > part.step}

    def add_line(self, line: node_pb2.LogLine) -> LogRow:
        """Number a line, made fit for any terminal."""
        self.last_log += 1
        clean = node_pb2.LogLine(
            wall_s=line.wall_s,
            level=escape_control(line.level[:20]),
            text=escape_control(line.text[:MAX_LINE]),
            origin=escape_control(line.origin[:80]),
        )
        row = LogRow(self.job, self.last_log, clean.SerializeToString())
        self._lines.append(row)
        return row

    def steps_in_memory(self, after: int) -> list[coordinator_pb2.StepMetrics] | None:
        """Return all finished steps later than `after`; None if some of them are only in the store."""
        if after >= self.last_step:
            return []
        if not self._ring or self._ring[0].step > after + 1:
            return None
        return [metrics for metrics in self._ring if metrics.step > after]

    def lines_in_memory(self, after: int) -> list[LogRow] | None:
        """Return all lines numbered above `after`; None if some of them are only in the store."""
        if after >= self.last_log:
            return []
        if not self._lines or self._lines[0].number > after + 1:
            return None
        return [line for line in self._lines if line.number > after]


class ProgressBook:
    """All jobs' progress, written to the store in common batches."""

    def __init__(self, store: StoreThread, flush_s: float, lines_per_job: int) -> None:
        self._store, self._flush_s, self._lines_per_job = store, flush_s, lines_per_job
        self._jobs: dict[JobId, JobProgress] = {}
        self._over: dict[JobId, None] = {}  #: ended jobs, the longest ended first
        self._opening = asyncio.Lock()
        self._steps: list[StepRow] = []
        self._logs: list[LogRow] = []
        self._wanted = asyncio.Event()
        self._flushed: asyncio.Future[None] | None = None

    async def of(self, job: JobId, stages: int, past: Past = ()) -> JobProgress:
        """Return a job's progress, read from the store the first time. `stages`: of its present plan, 0 without one."""
        found = self._jobs.get(job)
        if found is None:
            async with self._opening:
                if job not in self._jobs:
                    self._jobs[job] = await self._open(job, stages, past)
                found = self._jobs[job]
        if stages:  # it may have got a plan since, or another one
            found.stages, found.past = stages, past
        return found

    async def _open(self, job: JobId, stages: int, past: Past) -> JobProgress:
        store = self._store.store
        begun_after = past[-1][0] if past else 0
        found = await self._store.run(store.last_step, job, stages, begun_after) if stages else 0
        step = found or begun_after  # whatever was reported of the step that a plan began after, it was done
        rows = await self._store.run(store.steps, job, step - 1, 1) if step else []
        rows = [row for row in rows if row.step == step]
        last = combine(node_pb2.StageStep.FromString(row.body) for row in rows) if rows else None
        progress = JobProgress(job, stages, last, await self._store.run(store.last_log, job), past, begun_after)
        after = await self._store.run(store.steps, job, step, PAGE) if stages else []
        for row in after:  # steps that some stages had reported before a restart
            progress.add_step(node_pb2.StageStep.FromString(row.body))
        return progress

    def known(self, job: JobId) -> JobProgress | None:
        """Return a job's progress if it is in memory."""
        return self._jobs.get(job)

    async def add(
        self, progress: JobProgress, steps: Sequence[node_pb2.StageStep], lines: Sequence[node_pb2.LogLine]
    ) -> None:
        """Take reports, and return once they are on disk."""
        for part in steps:
            if progress.closed_after is not None and part.step > progress.closed_after:
                continue
            progress.add_step(part)
            self._steps.append(StepRow(progress.job, part.step, part.stage, part.SerializeToString()))
        self._logs.extend(progress.add_line(line) for line in lines)
        progress.changed.give()
        await self.flushed()

    async def flushed(self) -> None:
        """Return once everything that was added before is on disk."""
        if not self._steps and not self._logs and self._flushed is None:
            return
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        self._wanted.set()
        await asyncio.shield(self._flushed)

    def close_after(self, job: JobId, step: int) -> None:
        """Let what was or will be reported of steps after `step` not count: the job is about to do them again."""
        self._steps = [row for row in self._steps if row.job != job or row.step <= step]
        progress = self._jobs.get(job)
        if progress is not None:
            progress.closed_after = step

    async def reopen(self, job: JobId) -> None:
        """Read a job's progress anew the next time, after some steps of it were dropped."""
        while any(row.job == job for row in self._steps) or any(row.job == job for row in self._logs):
            await self.flush()
        progress = self._jobs.pop(job, None)
        if progress is not None:
            progress.changed.give()

    def note(self, progress: JobProgress, wall_s: float, level: str, text: str) -> None:
        """Add a line of the coordinator's own; it is written with the next batch."""
        line = node_pb2.LogLine(wall_s=wall_s, level=level, text=text, origin="coordinator")
        self._logs.append(progress.add_line(line))
        self._wanted.set()
        progress.changed.give()

    async def write(self) -> None:
        """Wait until there is something, gather for `flush_s`, and write it. To be repeated for ever."""
        await self._wanted.wait()
        await asyncio.sleep(self._flush_s)
        await self.flush()
        self._forget()

    def job_over(self, job: JobId) -> None:
        """Let go of a job's steps and lines in memory, sooner or later."""
        self._over[job] = None

    def _forget(self) -> None:
        busy = {row.job for row in self._steps} | {row.job for row in self._logs}
        for job in [job for job in self._over if job not in busy][: max(0, len(self._jobs) - _JOBS_IN_MEMORY)]:
            self._over.pop(job)
            self._jobs.pop(job, None)

    async def flush(self) -> None:
        """Write what waits."""
        self._wanted.clear()
        steps, logs, waiting = self._steps, self._logs, self._flushed
        self._steps, self._logs, self._flushed = [], [], None
        try:
            await self._store.run(self._store.store.add_progress, steps, logs)
            await self._drop_old_lines(logs)
        except BaseException as error:
            if waiting is not None:
                waiting.set_exception(error)
                waiting.exception()  # whoever waited may have gone
            raise
        if waiting is not None:
            waiting.set_result(None)

    async def _drop_old_lines(self, logs: Sequence[LogRow]) -> None:
        for row in logs:
            if row.number > self._lines_per_job and row.number % _DROP_EVERY == 0:
                await self._store.run(self._store.store.drop_logs, row.job, row.number - self._lines_per_job)

    async def steps(self, progress: JobProgress, after: int) -> list[coordinator_pb2.StepMetrics]:
        """Return finished steps later than `after`, the earliest first; empty only if there is none."""
        found = progress.steps_in_memory(after)
        if found is not None:
            return found
        await self.flushed()
        rows = await self._store.run(self._store.store.steps, progress.job, after, PAGE)
        parts: dict[int, list[node_pb2.StageStep]] = {}
        for row in rows:
            if row.step <= progress.last_step:
                parts.setdefault(row.step, []).append(node_pb2.StageStep.FromString(row.body))
        return [combine(parts[step]) for step in sorted(parts)]

    async def lines(self, progress: JobProgress, after: int) -> list[LogRow]:
        """Return log lines numbered above `after`, in order; empty only if there is none."""
        found = progress.lines_in_memory(after)
        if found is not None:
            return found
        await self.flushed()
        return await self._store.run(self._store.store.logs, progress.job, after, PAGE)
