"""Brings broken jobs back: ends their workers, asks who keeps what, has it uploaded, and says from where they go on.

All of it may be done again at any time: after a restart of the coordinator it begins anew, and finds what was uploaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from fusion.base.errors import UnreachableError
from fusion.base.ids import JobId, NodeId
from fusion.observe.logs import fields
from fusion.protocol.status import RefusalError
from fusion.wire.v1 import node_pb2
from fusion_coordinator.decide import moves, recovery
from fusion_coordinator.decide.recovery import Cut, Part
from fusion_coordinator.keptstates import KeptState
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import JobRestored
from fusion_coordinator.state.records import JobRecord, StageState

if TYPE_CHECKING:
    from fusion_coordinator.controller import Controller

log = logging.getLogger("fusion.coordinator.recoveries")
LOOK_S = 0.05
_RETRY_S = 2.0


class Recoveries:
    """One task for each job that is broken."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._tasks: dict[JobId, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Begin what is to be recovered. To be repeated for ever."""
        changed = self._controller.jobs_changed()
        for job in self._controller.state.jobs.values():
            if job.collects and job.job not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._recover(job.job), name=f"recover {job.job}")
                self._tasks[job.job] = task
        for job_id, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[job_id]
                task.result()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), 0.25)

    async def close(self) -> None:
        """End all of it; the jobs stay broken until the next start."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _recover(self, job_id: JobId) -> None:
        while self._job(job_id) is not None:
            try:
                await _Recovery(self._controller, job_id).run()
            except UnreachableError as error:  # the disk is full, say
                log.error(str(error), extra=fields(job=job_id))
                await asyncio.sleep(_RETRY_S)

    def _job(self, job_id: JobId) -> JobRecord | None:
        job = self._controller.state.jobs[job_id]
        return job if job.collects else None


class _OverError(Exception):
    """The job does not recover any more: somebody cancelled it, or it has succeeded."""


class _Recovery:
    """One job's way from broken to restored."""

    def __init__(self, controller: Controller, job_id: JobId) -> None:
        self._controller, self._job_id = controller, job_id
        self._settings, self._now_s = controller.settings, controller.clock.monotonic_s
        self._begun_s = self._now_s()
        self._asked_s: dict[NodeId, tuple[int, float]] = {}  #: by node: incarnation, and when it was asked
        self._given_up: set[tuple[NodeId, str]] = set()  #: uploads that did not come

    async def run(self) -> None:
        """Restore the job, or return because it needs that no more."""
        try:
            self._stop_workers()
            await self._until(lambda: not self._still_working(), self._settings.recover_wait_s)
            cut = await self._collected()
            await self._restore(cut)
        except _OverError:
            return

    @property
    def _job(self) -> JobRecord:
        job = self._controller.state.jobs[self._job_id]
        if not job.collects:
            raise _OverError
        return job

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for `condition`, for up to `limit_s`; return whether it came."""
        end_s = self._now_s() + limit_s
        while not condition():
            if self._now_s() >= end_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _stop_workers(self) -> None:
        job = self._job
        for stage in job.stages:
            if not stage.state.ended or stage.state is StageState.HELD:  # one that holds has kept its worker
                self._controller.send_stop(stage, job, f"recovery: {job.reason}")

    def _still_working(self) -> list[int]:
        return recovery.still_working(self._controller.state, self._job, self._controller.watching())

    # ---- what there is ----

    async def _collected(self) -> Cut:
        """Return the latest cut of which the store has all."""
        while True:
            await self._ask()
            cut = await self._best()
            if cut.origin != "kept" and await self._worth_waiting(cut):
                await asyncio.sleep(LOOK_S)
                continue
            if not cut.to_upload:
                return cut
            await self._upload(cut)

    async def _worth_waiting(self, cut: Cut) -> bool:
        """Whether nodes may still come back with what they keep, so that fewer steps are lost than by `cut`."""
        progress = await self._controller.job_progress(self._job)
        if progress.newest <= cut.step:
            return False
        absent = recovery.absent(self._controller.state, self._job, self._controller.watching())
        waited_s = self._now_s() - self._begun_s
        return any(leased or waited_s < self._settings.rejoin_wait_s for leased in absent.values())

    async def _ask(self) -> None:
        """Let all nodes of the job that were not asked yet say what they keep, and wait until they have."""
        controller, watching = self._controller, self._controller.watching()
        asked = []
        for node in {stage.node for stage in self._job.stages} & watching:
            incarnation = controller.state.nodes[node].incarnation
            if self._asked_s.get(node, (0, 0.0))[0] != incarnation:
                self._asked_s[node] = (incarnation, self._now_s())
                order = node_pb2.Command(report_states=node_pb2.ReportStatesOrder())
                controller.push(node, order)
                asked.append(node)
        await self._until(lambda: all(self._answered(node) for node in asked), self._settings.recover_wait_s)

    def _answered(self, node: NodeId) -> bool:
        """Whether a node that was asked has answered, or cannot any more."""
        return node not in self._controller.watching() or self._has_told(node)

    async def _best(self) -> Cut:
        controller, job = self._controller, self._job
        watching = controller.watching()
        kept: dict[NodeId, Collection[KeptState]] = {
            node: [state for state in states if (node, state.digest) not in self._given_up]
            for node, states in controller.kept.of(job.job).items()
            if node in watching and self._has_told(node)
        }
        digests = {state.digest for states in kept.values() for state in states}
        told = (await controller.job_progress(job)).told
        cut = recovery.best_cut(job, kept, await controller.stored(digests | moves.kept_for(job)), told)
        if cut.origin == "checkpoint" and not await controller.checkpoints.usable(job.job, cut.step):
            return await self._best()  # without the damaged one, which was dropped
        return cut

    def _has_told(self, node: NodeId) -> bool:
        if node not in self._asked_s:
            return False
        incarnation, asked_s = self._asked_s[node]
        return self._controller.kept.heard_s(node, incarnation) >= asked_s

    # ---- uploads ----

    async def _upload(self, cut: Cut) -> None:
        """Have all missing states uploaded, each by one of its holders; a holder that does not get on is given up."""
        await self._room(sum(part.state.size_bytes for part in cut.to_upload))
        orders: dict[NodeId, list[str]] = {}
        load: dict[NodeId, int] = {}
        for part in sorted(cut.to_upload, key=lambda part: -part.state.size_bytes):
            holder = min(part.holders, key=lambda node: load.get(node, 0))
            load[holder] = load.get(holder, 0) + part.state.size_bytes
            orders.setdefault(holder, []).append(part.state.digest)
        for node, digests in orders.items():
            order = node_pb2.UploadStates(job_id=self._job_id, digests=digests)
            self._controller.push(node, node_pb2.Command(upload=order))
        holder_of = {digest: node for node, digests in orders.items() for digest in digests}
        await asyncio.gather(*(self._uploaded(part, holder_of[part.state.digest]) for part in cut.to_upload))

    async def _room(self, needed_bytes: int) -> None:
        """Wait until the disk has room: nothing is given up for want of it."""
        said = False
        while True:
            try:
                await asyncio.to_thread(self._controller.files.check_space, self._job_id, needed_bytes)
            except RefusalError as error:
                if not said:
                    said = True
                    await self._controller.note(self._job_id, "error", f"cannot recover yet: {error}")
                await asyncio.sleep(_RETRY_S)
                _ = self._job  # still wanted
            else:
                return

    async def _uploaded(self, part: Part, holder: NodeId) -> None:
        """Wait until the store has a state, or until its upload does not grow any more."""
        blob, grew_s, before = part.state, self._now_s(), -1
        while not await self._controller.stored([blob.digest]):
            size = await asyncio.to_thread(self._controller.files.received, blob.digest, holder, blob.size_bytes)
            if size > before:
                grew_s, before = self._now_s(), size
            lost = holder not in self._controller.watching()
            if lost or self._now_s() - grew_s > self._settings.upload_stall_s:
                self._given_up.add((holder, blob.digest))
                return
            _ = self._job  # still wanted
            await asyncio.sleep(LOOK_S)

    # ---- the end ----

    async def _restore(self, cut: Cut) -> None:
        controller = self._controller
        progress = await controller.job_progress(self._job)
        lost = max(0, progress.newest - cut.step)
        states = tuple(part.state for part in cut.parts)

        def decide(state: State) -> tuple[list[AnyEvent], None]:
            if not state.jobs[self._job_id].collects:
                return [], None
            controller.progress.close_after(self._job_id, cut.step)
            return [JobRestored(controller.clock.wall_s(), self._job_id, cut.step, states, lost)], None

        await controller.note(self._job_id, "info", recovery.went_back(cut, lost))
        await controller.change(decide)
