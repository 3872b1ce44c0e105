"""Pausing and resuming, by a job's owner or because a node wants to leave; and which checkpoints are complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fusion.base.errors import NotFoundError, StateError
from fusion.base.ids import NodeId
from fusion.wire.v1 import job_pb2
from fusion_coordinator.keptstates import KeptState
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import JobHolds, JobPaused, JobResumed
from fusion_coordinator.state.records import JobRecord, JobState, NodeState, Pause, ResumeRecord, WeightsRecord


def pause(job: JobRecord, who: str, wall_s: float) -> list[AnyEvent]:
    """Let a job stop at a step's end, or not start; nothing happens if it pauses already. StateError: it cannot now."""
    reason = f"paused by {who}"
    if job.state.ended:
        raise StateError(f"{job.job} has ended already: {job.state.name.lower()}")
    if job.owner_paused or (job.next is not None and job.next.pause is Pause.OWNER):
        return []
    if job.state is JobState.STARTING or job.next is not None:
        raise StateError(f"{job.job} is just starting or moving; pause it once it runs again, in a moment")
    if job.state is JobState.RUNNING:
        return [JobHolds(wall_s, job.job, Pause.OWNER, reason)]
    return [JobPaused(wall_s, job.job, reason, by_owner=True)]


def resume(job: JobRecord, from_step: int | None, wall_s: float) -> JobResumed:
    """Let a job go on that pauses, has failed or was cancelled; StateError or NotFoundError say what stands against it.

    Without `from_step` it goes on from where it paused, or from its last checkpoint.
    """
    if job.state is JobState.SUCCEEDED:
        raise StateError(f"{job.job} has succeeded; there is nothing to go on with")
    if job.state not in (JobState.PAUSED, JobState.FAILED, JobState.CANCELLED):
        more = "pause or cancel it first" if from_step is not None else "only a job that pauses or has ended resumes"
        raise StateError(f"{job.job} is {job.state.name.lower()}; {more}")
    if from_step is not None:
        return JobResumed(wall_s, job.job, from_step, _checkpoint(job, from_step))
    if job.state is JobState.PAUSED:
        return JobResumed(wall_s, job.job, 0 if job.resume is None else job.resume.step, job.resume)
    if not job.checkpoints:
        raise StateError(f"{job.job} has no checkpoint to go on from; '--from 0' begins anew")
    step = job.checkpoints[-1].step
    return JobResumed(wall_s, job.job, step, _checkpoint(job, step))


def _checkpoint(job: JobRecord, step: int) -> ResumeRecord | None:
    if not step:
        return None
    for checkpoint in job.checkpoints:
        if checkpoint.step == step:
            return ResumeRecord(step, checkpoint.states)
    known = ", ".join(str(checkpoint.step) for checkpoint in job.checkpoints) or "none"
    raise NotFoundError(f"{job.job} has no checkpoint of step {step}; it has: {known} (and 0, the start)")


def drains(state: State, wall_s: float) -> list[JobHolds]:
    """Let all running jobs hold that run on nodes which want to leave; each then goes on without them."""
    found = []
    for job in state.jobs.values():
        if job.state is not JobState.RUNNING or job.next is not None:
            continue
        leaving = [
            stage.node_name
            for stage in job.stages
            if not stage.state.ended
            and (node := state.nodes.get(stage.node)) is not None
            and node.draining
            and (node.state, node.incarnation) == (NodeState.MEMBER, stage.incarnation)
        ]
        if leaving:
            names = f"node{'s' if len(leaving) > 1 else ''} {', '.join(leaving)} want{'' if len(leaving) > 1 else 's'}"
            found.append(JobHolds(wall_s, job.job, Pause.REPLAN, f"{names} to leave: goes on without"))
    return found


@dataclass(frozen=True, slots=True)
class Complete:
    """All states of one step, uploaded."""

    step: int
    states: tuple[WeightsRecord, ...]  #: by stage


def complete_checkpoints(job: JobRecord, kept: Mapping[NodeId, Collection[KeptState]]) -> list[Complete]:
    """Return the checkpoint steps of which all stages' states of this epoch are uploaded, and that are not made yet."""
    states = [state for of_node in kept.values() for state in of_node if state.uploaded and state.epoch == job.epoch]
    if not states:
        return []
    every = job_pb2.JobSpec.FromString(job.spec).checkpoint_every_steps
    newest = job.checkpoints[-1].step if job.checkpoints else 0
    found = []
    for step in sorted({state.step for state in states}):
        if not every or step <= newest or (step % every and step != job.steps):
            continue
        by_stage = {
            state.stage: WeightsRecord(state.digest, state.size_bytes) for state in states if state.step == step
        }
        if by_stage.keys() == set(range(len(job.stages))):
            found.append(Complete(step, tuple(by_stage[stage] for stage in range(len(job.stages)))))
    return found
