"""Watches running jobs: keeps what their steps measure, and asks from time to time whether another plan is better."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from fusion.base.errors import FusionError
from fusion.base.ids import JobId, NodeId
from fusion.observe.logs import fields
from fusion.plan.types import Cluster, LinkTable, Plan
from fusion.protocol.job import JobSpec, job_from_proto
from fusion.protocol.plan import plan_from_proto
from fusion.wire.v1 import job_pb2, node_pb2, plan_pb2
from fusion_coordinator.decide import replanning, scheduling
from fusion_coordinator.decide.replanning import Limits, Memory, Offer
from fusion_coordinator.linkwatch import LinkWatch, in_contact
from fusion_coordinator.planmaking import Alternative
from fusion_coordinator.planning import Planner
from fusion_coordinator.recoder import Recoder
from fusion_coordinator.state.records import JobRecord, JobState

if TYPE_CHECKING:
    from fusion_coordinator.controller import Controller

log = logging.getLogger("fusion.coordinator.replanner")

STEPS_KEPT = 5
STEPS_BETWEEN = 2  #: a look at the same steps again would find the same
RESTART_S = 15.0  #: of a job's workers, until one was seen to start
WEIGHT_BYTES = 4


@dataclass(slots=True)
class _Seen:
    """What is known of a running job. `compute_s` is of the present epoch."""

    epoch: int
    plan: Plan
    spec: JobSpec
    memory: Memory
    restart_s: float
    compute_s: dict[int, deque[float]] = field(default_factory=dict)
    slowness: dict[NodeId, float] = field(default_factory=dict)  #: also of nodes of earlier epochs
    new_steps: int = STEPS_BETWEEN  #: reported by stage 0 since the last look

    def typical_s(self) -> list[float]:
        """Return by stage how long it computes in a step."""
        return [median(self.compute_s[stage]) for stage in range(len(self.plan.stages))]


class Replanner:
    """One for all jobs: there is never more than one move at a time."""

    def __init__(self, controller: Controller, planner: Planner) -> None:
        self._controller, self._planner = controller, planner
        settings = controller.settings
        self._limits = Limits(settings.replan_ratio, settings.replan_wins, settings.replan_hold_off_s)
        self._jobs: dict[JobId, _Seen] = {}
        self.recoder = Recoder(controller, planner)

    # ---- what steps measure ----

    def steps(self, job: JobRecord, parts: Sequence[node_pb2.StageStep], links: LinkWatch) -> None:
        """Take stages' reports of steps under the plan in force."""
        now_s = self._controller.clock.monotonic_s()
        for part in parts:
            for link in part.received:
                if link.busy_s > 0 and max(part.stage, link.source) < len(job.stages):
                    source, target = job.stages[link.source].node, job.stages[part.stage].node
                    links.book.transferred(source, target, now_s, link.bytes, link.busy_s, link.messages)
        if job.state is not JobState.RUNNING:
            return
        seen = self._jobs.get(job.job)
        if seen is None or seen.epoch != job.epoch:
            seen = self._jobs[job.job] = self._begin(job, seen, now_s)
        seen.new_steps += sum(part.stage == 0 for part in parts)
        for part in parts:
            if not _evaluates(seen.spec, part.step) and part.compute_s > 0:
                seen.compute_s.setdefault(part.stage, deque(maxlen=STEPS_KEPT)).append(part.compute_s)

    def _begin(self, job: JobRecord, before: _Seen | None, now_s: float) -> _Seen:
        """A plan's first report: the time since it was given out is what starting takes."""
        planned_s = self._controller.planned_s(job.job)
        restart_s = RESTART_S if planned_s is None else now_s - planned_s
        plan = _plan(job)
        spec = job_from_proto(job_pb2.JobSpec.FromString(job.spec)) if before is None else before.spec
        return _Seen(
            job.epoch, plan, spec, Memory(now_s), restart_s, slowness={} if before is None else before.slowness
        )

    # ---- looking ----

    async def watch(self) -> None:
        """Wait a while, then look at every running job. To be repeated for ever."""
        await asyncio.sleep(self._controller.settings.replan_s)
        for job, seen in list(self._jobs.items()):
            record = self._controller.state.jobs[job]
            if record.state.ended:
                del self._jobs[job]
                self.recoder.forget(job)
                continue
            if seen.new_steps < STEPS_BETWEEN:
                continue
            seen.new_steps = 0
            if self._may_move(record, seen):
                await self._look(record, seen)
            if self._at_rest(record, seen) and "auto" in seen.spec.compression:
                await self.recoder.look(
                    record, seen.spec, _plan(record), self._cluster(record, seen), seen.typical_s(), seen.slowness
                )

    def _may_move(self, job: JobRecord, seen: _Seen) -> bool:
        moving = any(other.next is not None for other in self._controller.state.jobs.values())
        spec = seen.spec
        free = spec.replan and spec.planner == "fusion" and not spec.cuts
        return free and not moving and self._at_rest(job, seen)

    def _at_rest(self, job: JobRecord, seen: _Seen) -> bool:
        """Whether the job runs under a plan of which every stage was measured."""
        job = self._controller.state.jobs[job.job]
        measured = all(replanning.settled(seen.compute_s.get(stage, ())) for stage in range(len(seen.plan.stages)))
        return measured and job.state is JobState.RUNNING and job.epoch == seen.epoch and job.next is None

    async def _look(self, job: JobRecord, seen: _Seen) -> None:
        controller = self._controller
        cluster = self._cluster(job, seen)
        step = (await controller.job_progress(job)).last_step
        try:
            found = await self._planner.compare(cluster, seen.spec, _plan(job), seen.typical_s(), seen.slowness, step)
        except FusionError as error:
            log.debug("no other plan", extra=fields(job=job.job, reason=error))
            return
        except Exception:  # a fault in the planner must not end the coordinator
            log.exception("planner failed", extra=fields(job=job.job))
            return
        job = controller.state.jobs[job.job]
        if not self._may_move(job, seen):
            return
        seen.slowness.update(found.slowness)
        progress = await controller.job_progress(job)
        offer = Offer(
            found.present_s, found.best_s, self._move_s(seen, found, cluster), max(0, job.steps - progress.last_step)
        )
        verdict, seen.memory = replanning.judge(offer, seen.memory, controller.clock.monotonic_s(), self._limits)
        log.debug("looked for a better plan", extra=fields(job=job.job, move=verdict.move, why=verdict.reason))
        if verdict.move:
            await self._move(job, found.plan, verdict.reason)

    async def _move(self, job: JobRecord, plan: Plan, reason: str) -> None:
        try:
            await self._controller.move_job(job.job, plan, reason)
        except FusionError as error:  # it ended, or lost a node, in the meantime
            log.warning("the job does not move", extra=fields(job=job.job, reason=error))

    def _cluster(self, job: JobRecord, seen: _Seen) -> Cluster:
        """The job's own nodes and those that are idle, as far as they can run it."""
        state, presences = self._controller.state, self._controller.presences
        usable, _ = scheduling.split_by_torch(scheduling.usable_by(state, presences, job), seen.spec.torch_version)
        return scheduling.cluster_of(usable, self._controller.links.view_under_load(in_contact(state, presences)))

    def _move_s(self, seen: _Seen, found: Alternative, cluster: Cluster) -> float:
        each = WEIGHT_BYTES + seen.spec.optimizer.state_bytes_per_parameter
        rates = typical_rates(cluster.links)
        return replanning.move_cost_s(_held(seen.plan, each), _held(found.plan, each), rates, seen.restart_s)


def _plan(job: JobRecord) -> Plan:
    return plan_from_proto(plan_pb2.Plan.FromString(job.plan))


def _held(plan: Plan, bytes_each: int) -> dict[NodeId, int]:
    return {stage.node: stage.parameters * bytes_each for stage in plan.stages}


def _evaluates(spec: JobSpec, step: int) -> bool:
    """Whether the stages also evaluate at this step's end, which is no part of a step's own work."""
    return bool(spec.eval_every_steps) and (step % spec.eval_every_steps == 0 or step == spec.steps)


def typical_rates(links: LinkTable) -> Mapping[NodeId, tuple[float, float]]:
    """Return by node the median goodput of its measured links, out and in."""
    out: dict[NodeId, list[float]] = {}
    into: dict[NodeId, list[float]] = {}
    for (source, target), link in links.pairs.items():
        if link is not None:
            out.setdefault(source, []).append(link.rate_bytes_per_s)
            into.setdefault(target, []).append(link.rate_bytes_per_s)
    return {node: (median(out[node]), median(into[node])) for node in out.keys() & into.keys()}
