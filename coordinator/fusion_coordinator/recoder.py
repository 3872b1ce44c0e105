"""Changes the codecs of running jobs' links: asks the planner, tells stage 0, records from which step it was done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion.base.errors import FusionError
from fusion.base.ids import JobId, NodeId, StageIndex
from fusion.observe.logs import fields
from fusion.plan.codecs import plan_with_change, plan_with_codecs_of
from fusion.plan.types import Cluster, Plan
from fusion.protocol.job import JobSpec
from fusion.protocol.plan import link_codecs_to_proto, plan_from_proto, plan_to_proto
from fusion.wire.v1 import node_pb2, plan_pb2
from fusion_coordinator.decide import recoding
from fusion_coordinator.decide.recoding import Limits, Memory
from fusion_coordinator.planning import Planner
from fusion_coordinator.state import State
from fusion_coordinator.state.events import JobRecoded
from fusion_coordinator.state.records import JobRecord, JobState

if TYPE_CHECKING:
    from fusion_coordinator.controller import Controller

log = logging.getLogger("fusion.coordinator.recoder")

Links = tuple[tuple[StageIndex, StageIndex, str], ...]


@dataclass(slots=True)
class _Change:
    """What stage 0 was asked for and has not done yet."""

    revision: int
    links: Links
    reason: str


@dataclass(slots=True)
class _Watched:
    """A job under one plan."""

    epoch: int
    memory: Memory
    revision: int = 0  #: the newest that was in force
    pending: _Change | None = None


@dataclass(slots=True)
class Recoder:
    """One for all jobs."""

    controller: Controller
    planner: Planner
    _jobs: dict[JobId, _Watched] = field(default_factory=dict)

    async def steps(self, job: JobRecord, parts: Sequence[node_pb2.StageStep]) -> None:
        """Take stage 0's reports: the first step with a change in force is written into the plan."""
        first = [part for part in parts if part.stage == 0]
        watched = self._watched(job)
        for part in sorted(first, key=lambda part: part.step):
            if part.codec_revision <= watched.revision:
                continue
            watched.revision = part.codec_revision
            pending = watched.pending
            if pending is not None and pending.revision == part.codec_revision:
                watched.pending = None
                await self._record(job, part.step, pending)

    def _watched(self, job: JobRecord) -> _Watched:
        watched = self._jobs.get(job.job)
        if watched is None or watched.epoch != job.epoch:
            now_s = self.controller.clock.monotonic_s()
            watched = self._jobs[job.job] = _Watched(job.epoch, Memory(now_s))
        return watched

    def forget(self, job: JobId) -> None:
        """A job is over."""
        self._jobs.pop(job, None)

    async def _record(self, job: JobRecord, step: int, change: _Change) -> None:
        def decide(state: State) -> tuple[list[JobRecoded], None]:
            present = state.jobs[job.job]
            if not present.state.active or present.epoch != job.epoch:
                return [], None
            plan = plan_from_proto(plan_pb2.Plan.FromString(present.plan))
            body = plan_to_proto(plan_with_change(plan, step, change.links)).SerializeToString(deterministic=True)
            reason = f"codecs from step {step} on: {change.reason}"
            return [JobRecoded(self.controller.clock.wall_s(), job.job, job.epoch, body, reason)], None

        await self.controller.change(decide)

    async def look(
        self,
        job: JobRecord,
        spec: JobSpec,
        plan: Plan,
        cluster: Cluster,
        compute_s: Sequence[float],
        slowness: dict[NodeId, float],
    ) -> None:
        """Ask whether other codecs are better under what was measured, and tell stage 0 if they are."""
        watched = self._watched(job)
        if watched.pending is not None:
            self._tell(job, watched.pending)  # it was not heard, or its step is not over
            return
        step = (await self.controller.job_progress(job)).last_step
        try:
            choices = await self.planner.recode(cluster, spec, plan, compute_s, slowness, step)
        except FusionError as error:
            log.debug("no look at codecs", extra=fields(job=job.job, reason=error))
            return
        except Exception:  # a fault in the planner must not end the coordinator
            log.exception("planner failed", extra=fields(job=job.job))
            return
        job = self.controller.state.jobs[job.job]
        if choices is None or job.state is not JobState.RUNNING or job.epoch != watched.epoch or job.next is not None:
            return
        settings, now_s = self.controller.settings, self.controller.clock.monotonic_s()
        limits = Limits(settings.recode_wins, settings.recode_hold_off_s)
        found, watched.memory = recoding.judge(choices, watched.memory, now_s, limits)
        if found:
            links = tuple((StageIndex(a), StageIndex(b), codec.name) for (a, b), codec in sorted(found.items()))
            watched.pending = _Change(watched.revision + 1, links, recoding.reason(choices, found))
            self._tell(job, watched.pending)

    def _tell(self, job: JobRecord, change: _Change) -> None:
        links = link_codecs_to_proto(change.links)
        order = node_pb2.SetCodecs(job_id=job.job, epoch=job.epoch, revision=change.revision, links=links)
        self.controller.tell(job.stages[0], node_pb2.Command(codecs=order))


def as_before(job: JobRecord, plan: Plan, *, strict: bool) -> Plan:
    """Return the plan that a job goes on by: in strict determinism with the codecs that it had, at the same steps.

    So steps that are done again are done alike. Only where the cuts stay the same: else the links are others.
    """
    if not strict or not job.plan:
        return plan
    return plan_with_codecs_of(plan, plan_from_proto(plan_pb2.Plan.FromString(job.plan)))
