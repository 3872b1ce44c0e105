"""How jobs change by events when they break, pause, resume, and are checkpointed."""

from __future__ import annotations

from msgspec.structs import replace

from fusion_coordinator.state.events import (
    CheckpointCommitted,
    CheckpointDropped,
    JobBroke,
    JobHolds,
    JobPaused,
    JobRestored,
    JobResumed,
)
from fusion_coordinator.state.jobs import impossible, with_job
from fusion_coordinator.state.records import (
    JobRecord,
    JobState,
    MoveRecord,
    PastRecord,
    Pause,
    RecoveryRecord,
    ResumeRecord,
    State,
)

TROUBLES_KEPT = 20


def job_holds(event: JobHolds, state: State) -> State:
    """Let a running job come to a step's end, to pause there."""
    job = state.jobs[event.job]
    if job.state is not JobState.RUNNING or job.next is not None or event.pause is Pause.NO:
        raise impossible(event, job)
    move = MoveRecord(job.epoch + 1, b"", (), event.pause)
    return with_job(state, replace(job, reason=event.reason, next=move))


def job_broke(event: JobBroke, state: State) -> State:
    """Begin a recovery. One that broke again before it ran counts as one."""
    job = state.jobs[event.job]
    if not job.state.active:
        raise impossible(event, job)
    before = job.recovery
    recovery = RecoveryRecord(
        event.reason, event.wall_s if before is None else before.since_wall_s, lost=0 if before is None else before.lost
    )
    owner_paused = job.next is not None and job.next.pause is Pause.OWNER
    job = replace(
        job, state=JobState.RECOVERING, reason=event.reason, next=None, recovery=recovery, owner_paused=owner_paused
    )
    if event.trouble is not None:
        job = replace(job, troubles=(*job.troubles, event.trouble)[-TROUBLES_KEPT:])
        if event.limit_bytes:
            job = replace(job, limits={**job.limits, event.trouble.node: event.limit_bytes})
    return with_job(state, job)


def job_restored(event: JobRestored, state: State) -> State:
    """Forget the broken plan; the job waits for another, from `event.step` on."""
    job = state.jobs[event.job]
    if not job.collects or bool(event.step) != bool(event.states):
        raise impossible(event, job)
    recovery = job.recovery or RecoveryRecord(job.reason, event.wall_s)
    recovery = replace(recovery, step=event.step, lost=recovery.lost + event.lost)
    job = replace(_back_to(job, event.step, _resume(event)), recovery=recovery)
    if job.owner_paused:
        job = replace(job, state=JobState.PAUSED)
    return with_job(state, job)


def _resume(event: JobRestored) -> ResumeRecord | None:
    return ResumeRecord(event.step, event.states) if event.step else None


def _back_to(job: JobRecord, step: int, resume: ResumeRecord | None) -> JobRecord:
    """Let `step` be the last one that counts."""
    stages = next((plan.stages for plan in job.past if step <= plan.last_step), len(job.stages))
    past = tuple(plan for plan in job.past if plan.last_step < step)
    if step and stages:
        past = (*past, PastRecord(step, stages))
    return replace(job, stages=(), resume=resume, past=past)


def job_paused(event: JobPaused, state: State) -> State:
    """Let the job wait; one that is still collecting what it goes on from does that first."""
    job = state.jobs[event.job]
    if job.state.ended or job.state.active or (job.collects and not event.by_owner):
        raise impossible(event, job)
    waits = job.state if job.collects else JobState.PAUSED
    return with_job(
        state, replace(job, state=waits, reason=event.reason, owner_paused=job.owner_paused or event.by_owner)
    )


def job_resumed(event: JobResumed, state: State) -> State:
    """Queue a job that pauses or has ended."""
    job = state.jobs[event.job]
    if job.state not in (JobState.PAUSED, JobState.FAILED, JobState.CANCELLED):
        raise impossible(event, job)
    job = replace(job, state=JobState.QUEUED, reason="", owner_paused=False, finished_wall_s=0.0, troubles=())
    return with_job(state, replace(_back_to(job, event.step, event.resume), recovery=None))


def checkpoint_committed(event: CheckpointCommitted, state: State) -> State:
    """Add a checkpoint, in place of one of the same step."""
    job = state.jobs[event.job]
    others = [checkpoint for checkpoint in job.checkpoints if checkpoint.step != event.checkpoint.step]
    found = sorted([*others, event.checkpoint], key=lambda checkpoint: checkpoint.step)
    return with_job(state, replace(job, checkpoints=tuple(found)))


def checkpoint_dropped(event: CheckpointDropped, state: State) -> State:
    """Forget a checkpoint."""
    job = state.jobs[event.job]
    kept = tuple(checkpoint for checkpoint in job.checkpoints if checkpoint.step != event.step)
    return with_job(state, replace(job, checkpoints=kept))
