"""Submitting, cancelling, and the reports of stages."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from fusion.base.errors import NotFoundError, StateError, WireError
from fusion.base.ids import JobId, NodeId
from fusion.protocol.status import RefusalError
from fusion.security.credentials import Role
from fusion_coordinator.decide import moves
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import JobEnded, JobSubmitted, StageMoved
from fusion_coordinator.state.records import JobRecord, JobState, StageState, WeightsRecord

CAUSES = ("error", "peer-lost", "crash", "out-of-memory", "lease", "stuck", "device")
MAX_DETAIL = 1000


def submit(
    state: State, owner: str, job: JobId, name: str, spec: bytes, steps: int, wall_s: float, settings: Settings
) -> list[AnyEvent]:
    """Queue a job whose content was checked; RefusalError when its owner has too many under way."""
    under_way = sum(item.owner == owner and not item.state.ended for item in state.jobs.values())
    if under_way >= settings.jobs_per_owner:
        error = StateError(
            f"you have {under_way} jobs queued or running, {settings.jobs_per_owner} are allowed at a time"
        )
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, error)
    return [JobSubmitted(wall_s, job, owner, name, spec, steps)]


def visible(state: State, job: str, caller: str, role: Role) -> JobRecord:
    """Return a job that the caller may see. Others' jobs are not there, so that nothing is told about them."""
    record = state.jobs.get(JobId(job))
    if record is None or (role is not Role.ADMIN and record.owner != caller):
        raise NotFoundError(f"there is no job {job[:40]!r}; 'fusion status' lists yours")
    return record


def cancel(job: JobRecord, who: str, reason: str, wall_s: float) -> list[AnyEvent]:
    """Cancel a job; StateError if it has ended."""
    if job.state.ended:
        raise StateError(
            f"{job.job} has ended already: {job.state.name.lower()}{': ' if job.reason else ''}{job.reason}"
        )
    text = " ".join(reason.split())[:MAX_DETAIL]
    return [JobEnded(wall_s, job.job, JobState.CANCELLED, f"cancelled by {who}{': ' if text else ''}{text}")]


@dataclass(frozen=True, slots=True)
class Report:
    """A stage's report, as its node sends it."""

    node: NodeId
    incarnation: int
    job: str
    epoch: int
    stage: int
    state: int
    detail: str = ""
    cause: str = ""
    peer_stage: int = -1
    weights: WeightsRecord | None = None
    step: int = 0
    held: WeightsRecord | None = None


def owned_stage(state: State, node: NodeId, incarnation: int, job_id: str, epoch: int, stage: int) -> JobRecord:
    """Return the job if `stage` of `epoch` is what this incarnation of the node works on, or worked on last."""
    job = state.jobs.get(JobId(job_id))
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:40]!r}")
    if epoch != job.epoch or not job.stages:
        raise StateError(f"stale epoch {epoch}, current {job.epoch}{'' if job.stages else ', which is over'}")
    if not 0 <= stage < len(job.stages):
        raise WireError(f"stage {stage} of a job with {len(job.stages)} stages")
    mine = job.stages[stage]
    if mine.node != node or mine.incarnation != incarnation:
        raise StateError(f"stage {stage} of {job_id} is not this node's in incarnation {incarnation}")
    return job


def stage_report(state: State, report: Report, wall_s: float) -> list[AnyEvent]:
    """Return what a report changes: nothing if it is old, repeated, or of a job that has ended."""
    job = owned_stage(state, report.node, report.incarnation, report.job, report.epoch, report.stage)
    try:
        new = StageState(report.state)
    except ValueError:
        new = StageState.ASSIGNED
    if new is StageState.ASSIGNED:
        raise WireError(f"stage state {report.state} must be 1..7")
    if new is StageState.FAILED and report.cause not in CAUSES:
        raise WireError(f"cause {report.cause[:40]!r} must be one of {', '.join(CAUSES)}")
    if new is StageState.FINISHED and report.weights is None:
        raise WireError(f"stage {report.stage} finished without its weights")
    if new is StageState.HELD and (report.held is None or not report.step):
        raise WireError(f"stage {report.stage} holds without its state or its step")
    old = job.stages[report.stage]
    step = report.step if new in (StageState.RUNNING, StageState.HELD) else 0
    detail = " ".join(report.detail.split())[:MAX_DETAIL]
    news = (new, detail, step or old.step) != (old.state, old.detail, old.step)
    counts = job.state.active or (job.collects and new.ended)
    if not counts or not new.follows(old.state) or not news:
        return []
    if step and not job.collects:
        return _holds(job, report, new, detail, wall_s)
    return [
        StageMoved(
            wall_s,
            job.job,
            job.epoch,
            report.stage,
            new,
            detail,
            report.cause if new is StageState.FAILED else "",
            report.peer_stage if new is StageState.FAILED else -1,
            report.weights if new is StageState.FINISHED else None,
            step,
            report.held if new is StageState.HELD else None,
        )
    ]


def _holds(job: JobRecord, report: Report, new: StageState, detail: str, wall_s: float) -> list[AnyEvent]:
    """A stage has stopped, or its state is here too. All stop after one step, or something is very wrong."""
    if job.state is not JobState.RUNNING:
        raise StateError(f"stage {report.stage} holds, but {job.job} is {job.state.name.lower()}")
    for index, other in enumerate(job.stages):
        if other.holds and other.step != report.step:
            detail = f"it holds after step {report.step}, stage {index} after step {other.step}"
            return [StageMoved(wall_s, job.job, job.epoch, report.stage, StageState.FAILED, detail, "error")]
    moved = StageMoved(wall_s, job.job, job.epoch, report.stage, new, detail, step=report.step, held=report.held)
    # The move may have been given up just as the stages stopped for it.
    return [moved] if job.next is not None else [moves.same_plan(job, wall_s), moved]
