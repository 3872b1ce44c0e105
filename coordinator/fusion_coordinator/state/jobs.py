"""How jobs change by events. A transition that cannot be is a bug, and tells the job's story."""

from __future__ import annotations

from msgspec.structs import replace

from fusion_coordinator.state.events import (
    AnyEvent,
    JobEnded,
    JobMoves,
    JobPlanned,
    JobRecoded,
    JobStays,
    JobSubmitted,
    JobWaits,
    StageMoved,
)
from fusion_coordinator.state.records import (
    JobRecord,
    JobState,
    MoveRecord,
    PastRecord,
    Pause,
    RecoveryRecord,
    ResumeRecord,
    StageState,
    State,
)


class TransitionError(AssertionError):
    """An event that the present state does not allow."""


def job_submitted(event: JobSubmitted, state: State) -> State:
    """Queue the job."""
    if event.job in state.jobs:
        raise impossible(event, state.jobs[event.job])
    job = JobRecord(event.job, event.owner, event.name, event.spec, event.steps, event.wall_s)
    return replace(state, jobs={**state.jobs, event.job: job})


def job_waits(event: JobWaits, state: State) -> State:
    """Note why a queued job does not start."""
    job = state.jobs[event.job]
    if job.state is not JobState.QUEUED:
        raise impossible(event, job)
    return with_job(state, replace(job, reason=event.reason))


def job_planned(event: JobPlanned, state: State) -> State:
    """Put the plan in force. Epochs only grow."""
    job = state.jobs[event.job]
    if not job.wants_plan or event.epoch <= job.epoch or not event.stages:
        raise impossible(event, job)
    planned = replace(job, state=JobState.STARTING, reason="", epoch=event.epoch, plan=event.plan, stages=event.stages)
    return with_job(state, planned)


def stage_moved(event: StageMoved, state: State) -> State:
    """Move one stage on; the job runs once all stages are ready, and succeeds once all have finished.

    Once all hold, the job takes the plan that it moves to.
    """
    job = state.jobs[event.job]
    may = job.state.active or (job.collects and event.state.ended)
    if not may or event.epoch != job.epoch or not 0 <= event.stage < len(job.stages):
        raise impossible(event, job)
    old = job.stages[event.stage]
    unasked = event.state is StageState.HELD and (not event.step or (job.next is None and not job.collects))
    if not event.state.follows(old.state) or unasked:
        raise impossible(event, job)
    moved = replace(
        old,
        state=event.state,
        detail=event.detail,
        cause=event.cause,
        peer_stage=event.peer_stage,
        weights=event.weights,
        step=event.step or old.step,
        held=event.held,
    )
    stages = (*job.stages[: event.stage], moved, *job.stages[event.stage + 1 :])
    job = replace(job, stages=stages)
    if all(stage.state is StageState.FINISHED for stage in stages):
        finished = replace(job, state=JobState.SUCCEEDED, reason="", finished_wall_s=event.wall_s, next=None)
        job = replace(finished, recovery=None)
    elif job.collects:
        pass  # it goes on under another plan, whatever this one's stages still do
    elif all(stage.state is StageState.HELD for stage in stages):
        job = _moved(job, event)
    elif all(stage.state.ready for stage in stages):
        job = replace(job, state=JobState.RUNNING, recovery=None)
    return with_job(state, job)


def job_moves(event: JobMoves, state: State) -> State:
    """Keep the plan that the job goes on by. Only a running job moves, and one move at a time."""
    job = state.jobs[event.job]
    if job.state is not JobState.RUNNING or job.next is not None or event.epoch <= job.epoch or not event.stages:
        raise impossible(event, job)
    return with_job(state, replace(job, reason=event.reason, next=MoveRecord(event.epoch, event.plan, event.stages)))


def job_stays(event: JobStays, state: State) -> State:
    """Forget the plan that the job was to go on by."""
    job = state.jobs[event.job]
    if job.next is None or job.holds:
        raise impossible(event, job)
    return with_job(state, replace(job, reason="", next=None))


def job_recoded(event: JobRecoded, state: State) -> State:
    """Write a change of codecs into the plan in force; cuts and nodes stay."""
    job = state.jobs[event.job]
    if not job.state.active or event.epoch != job.epoch:
        raise impossible(event, job)
    return with_job(state, replace(job, plan=event.plan))


def _moved(job: JobRecord, event: StageMoved) -> JobRecord:
    """Put the next plan in force, or pause: all stages hold, and their states are the start of what comes."""
    if job.next is None or {stage.step for stage in job.stages} != {event.step}:
        raise impossible(event, job)
    held = replace(
        job,
        next=None,
        resume=ResumeRecord(event.step, tuple(stage.held for stage in job.stages if stage.held is not None)),
        past=(*job.past, PastRecord(event.step, len(job.stages))),
    )
    if job.next.pause is Pause.OWNER:
        return replace(held, state=JobState.PAUSED, owner_paused=True, stages=())
    if job.next.pause is Pause.REPLAN:
        recovery = RecoveryRecord(job.reason, event.wall_s, event.step)
        return replace(held, state=JobState.RECOVERING, stages=(), recovery=recovery)
    return replace(
        held, state=JobState.STARTING, reason="", epoch=job.next.epoch, plan=job.next.plan, stages=job.next.stages
    )


def job_ended(event: JobEnded, state: State) -> State:
    """End the job by failure or cancellation."""
    job = state.jobs[event.job]
    if job.state.ended or event.state not in (JobState.FAILED, JobState.CANCELLED):
        raise impossible(event, job)
    ended = replace(job, state=event.state, reason=event.reason, finished_wall_s=event.wall_s, next=None)
    return with_job(state, replace(ended, owner_paused=False, recovery=None))


def with_job(state: State, job: JobRecord) -> State:
    """Return the state with `job` in place of what it was."""
    return replace(state, jobs={**state.jobs, job.job: job})


def impossible(event: AnyEvent, job: JobRecord) -> TransitionError:
    """Return the error that tells the job's story."""
    stages = ", ".join(f"{stage.node_name} {stage.state.name}" for stage in job.stages)
    return TransitionError(
        f"{event} cannot happen to {job.job}: {job.state.name}, epoch {job.epoch}, stages [{stages}]"
    )
