"""Makes checkpoints of what nodes have uploaded, keeps the latest, and vouches for one before a job goes on from it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.base.errors import ConfigError, DataError
from fusion.base.ids import JobId
from fusion.base.units import format_bytes
from fusion.observe.logs import fields
from fusion.wire.v1 import job_pb2
from fusion_coordinator.checkpointfiles import FORMAT, MANIFEST, CheckpointFiles, DiskFullError, Manifest
from fusion_coordinator.decide import pausing
from fusion_coordinator.decide.pausing import Complete
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import CheckpointCommitted, CheckpointDropped
from fusion_coordinator.state.records import CheckpointRecord, JobRecord, JobState

if TYPE_CHECKING:
    from fusion_coordinator.controller import Controller

log = logging.getLogger("fusion.coordinator.checkpoints")


class Checkpoints:
    """One for all jobs."""

    def __init__(self, controller: Controller, directory: Path) -> None:
        self._controller = controller
        self.files = CheckpointFiles(directory, controller.files)
        self._under_way: dict[tuple[JobId, int], asyncio.Task[None]] = {}
        self._failed: set[tuple[JobId, int, int]] = set()  #: (job, epoch, step)
        self._want_figures: set[JobId] = set()

    def tidy(self) -> None:
        """Remove what a crash left."""
        jobs = self._controller.state.jobs.values()
        self.files.tidy({(job.job, checkpoint.step) for job in jobs for checkpoint in job.checkpoints})

    async def close(self) -> None:
        """Give up what is under way: it is no checkpoint yet."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    # ---- making ----

    def look(self) -> None:
        """Begin the checkpoints of which all states are uploaded, by the nodes' word."""
        kept = self._controller.kept
        for job in self._controller.state.jobs.values():
            if not job.stages or job.state in (JobState.FAILED, JobState.CANCELLED):
                continue  # one that has succeeded may still get its last
            complete = pausing.complete_checkpoints(job, kept.of(job.job))
            for found in complete:
                key = (job.job, found.step)
                if key in self._under_way or (job.job, job.epoch, found.step) in self._failed:
                    continue
                task = asyncio.get_running_loop().create_task(self._make(job, found), name=f"checkpoint {key}")
                self._under_way[key] = task
                task.add_done_callback(partial(self._made, key))

    def figures_came(self, job: JobId) -> None:
        """Stages have reported steps: a checkpoint may have waited for that."""
        if job in self._want_figures:
            self._want_figures.discard(job)
            self.look()

    def _made(self, key: tuple[JobId, int], task: asyncio.Task[None]) -> None:
        self._under_way.pop(key, None)
        if not task.cancelled() and task.exception() is not None:  # whatever it is, training goes on
            log.error("checkpoint failed", exc_info=task.exception(), extra=fields(job=key[0], step=key[1]))

    async def _make(self, job: JobRecord, found: Complete) -> None:
        controller = self._controller
        if found.step > (await controller.job_progress(job)).last_step:
            self._want_figures.add(job.job)  # who goes on from here finds all losses up to here
            return
        digests = [state.digest for state in found.states]
        if len(await controller.stored(digests)) < len(set(digests)):
            return  # the word came before the upload's end
        try:
            manifest = await asyncio.to_thread(self.files.write, _about(job, found.step), digests)
        except (DiskFullError, DataError) as error:
            self._failed.add((job.job, job.epoch, found.step))
            line = f"checkpoint of step {found.step} failed: {error}; training goes on"
            await controller.note(job.job, "error", line)
            return
        record = CheckpointRecord(found.step, job.epoch, controller.clock.wall_s(), found.states)
        await controller.change(lambda state: (_committed(state, job.job, record), None))
        size = format_bytes(sum(file.size_bytes for file in manifest.files))
        await controller.note(job.job, "info", f"checkpoint of step {found.step}: {len(digests)} files, {size}")
        await self._prune(job.job)

    async def _prune(self, job_id: JobId) -> None:
        """Drop the oldest ones beyond what the job keeps. The newest was read again and verified when it was made."""
        job = self._controller.state.jobs[job_id]
        keep = job_pb2.JobSpec.FromString(job.spec).checkpoint_keep or 3
        for checkpoint in job.checkpoints[:-keep]:
            await self._drop(job_id, checkpoint.step)

    async def _drop(self, job_id: JobId, step: int) -> None:
        controller = self._controller
        event = CheckpointDropped(controller.clock.wall_s(), job_id, step)
        await controller.change(lambda _: ([event], None))
        await asyncio.to_thread(self.files.remove, job_id, step)

    # ---- using ----

    async def check(self, job_id: JobId, step: int) -> None:
        """Read a checkpoint again; DataError tells what is not as it was."""
        job = self._controller.state.jobs[job_id]
        for checkpoint in job.checkpoints:
            if checkpoint.step == step:
                graph = job_pb2.JobSpec.FromString(job.spec).graph.digest
                digests = [state.digest for state in checkpoint.states]
                await asyncio.to_thread(self.files.check, job_id, step, graph, digests)

    async def usable(self, job_id: JobId, step: int) -> bool:
        """Return whether a checkpoint is as it was; a damaged one is dropped, and the job's log says so."""
        try:
            await self.check(job_id, step)
        except DataError as error:
            line = f"checkpoint of step {step} cannot be used: {error}; an earlier one is taken"
            await self._controller.note(job_id, "error", line)
            await self._drop(job_id, step)
            return False
        return True

    async def newest(self, job_id: JobId) -> None:
        """Drop damaged checkpoints until the newest one is as it was."""
        while checkpoints := self._controller.state.jobs[job_id].checkpoints:
            if await self.usable(job_id, checkpoints[-1].step):
                return

    async def manifest(self, job_id: JobId, step: int) -> str:
        """Return the manifest's text; a line about why it cannot be read, if so."""
        try:
            return await asyncio.to_thread((self.files.path(job_id, step) / MANIFEST).read_text)
        except OSError as error:
            raise ConfigError(f"the manifest of step {step} cannot be read: {error}") from None


def _about(job: JobRecord, step: int) -> Manifest:
    spec = job_pb2.JobSpec.FromString(job.spec)
    return Manifest(
        FORMAT, job.job, job.name, step, job.epoch, spec.graph.digest, spec.weights.digest, spec.torch_version, "", ()
    )


def _committed(state: State, job_id: JobId, record: CheckpointRecord) -> list[AnyEvent]:
    return [CheckpointCommitted(record.committed_wall_s, job_id, record)] if job_id in state.jobs else []
