"""Moving a running job to another plan: when it may, what stands in its way, and what may be thrown away after."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusion.base.errors import ConfigError, StateError
from fusion.base.ids import JobId, NodeId
from fusion.plan.types import Plan
from fusion.protocol.plan import plan_to_proto
from fusion.wire.v1 import job_pb2, plan_pb2
from fusion_coordinator.decide import scheduling
from fusion_coordinator.liveness import JobWatch, Presences
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import State
from fusion_coordinator.state.events import JobMoves, JobStays
from fusion_coordinator.state.records import JobRecord, JobState, NodeRecord, PastRecord, StageRecord

_STEPS_OF_PATIENCE = 5  #: so many steps may pass until the one is over at whose end a job holds


def move(state: State, presences: Presences, job_id: JobId, plan: Plan, wall_s: float, why: str = "") -> list[JobMoves]:
    """Let a running job go on by `plan` (its epoch is set here); StateError says why that is not possible now."""
    job = state.jobs[job_id]
    check_runs(job)
    _check_nodes(state, presences, job, plan)
    message = plan_to_proto(plan)
    message.epoch = job.epoch + 1
    stages = tuple(StageRecord(stage.node, stage.node_name, stage.incarnation) for stage in plan.stages)
    if _division(message) == _division(plan_pb2.Plan.FromString(job.plan)):
        raise StateError(f"{job.job} runs by these cuts on these nodes already")
    names = ", ".join(stage.node_name for stage in stages)
    reason = f"moves at a step's end to {len(stages)} stages on {names}{': ' if why else ''}{why}"
    return [JobMoves(wall_s, job.job, message.epoch, message.SerializeToString(deterministic=True), stages, reason)]


def check_runs(job: JobRecord) -> None:
    """Raise StateError unless the job runs and does not move already."""
    if job.next is not None and job.next.pause:
        raise StateError(f"{job.job} is about to hold: {job.reason}")
    if job.next is not None:
        raise StateError(f"{job.job} moves already, to epoch {job.next.epoch}; wait until it runs again")
    if job.state is not JobState.RUNNING or any(stage.state.ended or stage.holds for stage in job.stages):
        raise StateError(f"{job.job} is {_words(job)}; only a job that runs can move")


def _words(job: JobRecord) -> str:
    return "about to end" if job.state is JobState.RUNNING else job.state.name.lower()


def _division(plan: plan_pb2.Plan) -> list[tuple[str, int, int]]:
    return [(stage.node_id, stage.incarnation, stage.first_operator) for stage in plan.stages]


def _check_nodes(state: State, presences: Presences, job: JobRecord, plan: Plan) -> None:
    if len({stage.node for stage in plan.stages}) < len(plan.stages):
        raise ConfigError("nodes: one of them is named twice; a node runs one stage of a job")
    usable = {(node.node, node.incarnation) for node in scheduling.usable_by(state, presences, job)}
    for stage in plan.stages:
        if (stage.node, stage.incarnation) not in usable:
            raise StateError(f"node {stage.node_name} is not free for {job.job}: it is away or works on another job")


def named_nodes(state: State, presences: Presences, job: JobRecord, names: Sequence[str]) -> list[NodeRecord]:
    """Return the nodes that somebody names for a job, by name or id, in that order; StateError if one cannot be had."""
    usable, remarks = scheduling.split_by_torch(scheduling.usable_by(state, presences, job), _torch_version(job))
    found = []
    for name in names:
        fit = [node for node in usable if name in (node.name, node.node)]
        if len(fit) > 1:
            raise ConfigError(f"nodes: {len(fit)} nodes are named {name[:80]!r}; state the id of the one that you mean")
        if not fit:
            others = ", ".join(node.name for node in usable) or "none"
            remark = "".join(f"; {remark}" for remark in remarks)
            raise StateError(f"nodes: {name[:80]!r} cannot run {job.job} now; those that can: {others}{remark}")
        found += fit
    return found


def _torch_version(job: JobRecord) -> str:
    return job_pb2.JobSpec.FromString(job.spec).torch_version


def same_plan(job: JobRecord, wall_s: float) -> JobMoves:
    """Let a job go on by the plan that it has, in a new epoch: its stages hold for a move that was given up."""
    plan = plan_pb2.Plan.FromString(job.plan)
    plan.epoch = job.epoch + 1
    stages = tuple(StageRecord(stage.node, stage.node_name, stage.incarnation) for stage in job.stages)
    body = plan.SerializeToString(deterministic=True)
    return JobMoves(wall_s, job.job, plan.epoch, body, stages, "held for a move that was given up; goes on as it was")


def moving_to(state: State, node: NodeId, incarnation: int) -> list[tuple[JobRecord, int, StageRecord]]:
    """Return the stages that jobs are about to put on that incarnation of a node."""
    return [
        (job, index, stage)
        for job in state.jobs.values()
        if job.next is not None
        for index, stage in enumerate(job.next.stages)
        if stage.node == node and stage.incarnation == incarnation
    ]


def patience_s(settings: Settings, step_s: float) -> float:
    """Return how long a job may take to come to a step's end, when its steps take `step_s`."""
    return max(settings.hold_timeout_s, _STEPS_OF_PATIENCE * step_s)


def overdue(job: JobRecord, watch: JobWatch, now_s: float, wall_s: float, limit_s: float) -> list[JobStays]:
    """Give up a move for which no stage has stopped: the job runs on as it is."""
    if job.next is None or job.holds or watch.moving_s is None or now_s - watch.moving_s < limit_s:
        return []
    return [
        JobStays(
            wall_s,
            job.job,
            f"no stage has stopped for {'a pause' if job.next.pause else 'the move'} within {limit_s:g} s",
        )
    ]


def never_held(job: JobRecord, watch: JobWatch, now_s: float, limit_s: float) -> tuple[int, str] | None:
    """Return the stage of a holding job that does not, and a line about it. A stage that saves says so all the time."""
    if job.next is None or not job.holds or watch.moving_s is None:
        return None
    for index, stage in enumerate(job.stages):
        silent_s = now_s - max(watch.moving_s, watch.last_sign_s(index))
        if not stage.state.ended and silent_s >= limit_s:
            what = "save its state" if stage.holds else "hold"
            line = f"node {stage.node_name} (stage {index}) did not {what}: nothing heard of it for {silent_s:.0f} s"
            return index, line
    return None


def past_counts(past: Collection[PastRecord]) -> tuple[tuple[int, int], ...]:
    """Return (last step, number of stages) of each earlier plan."""
    return tuple((plan.last_step, plan.stages) for plan in past)


def outdated(before: JobRecord, after: JobRecord) -> list[str]:
    """Return the digests of states that a job may have needed before a change, and will not after it."""
    return sorted(kept_for(before) - kept_for(after))


def kept_for(job: JobRecord) -> set[str]:
    """Return the digests of the states that a job may go on from. One that has ended goes on from a checkpoint only."""
    found = {blob.digest for checkpoint in job.checkpoints for blob in checkpoint.states}
    if not job.state.ended:
        found |= {stage.held.digest for stage in job.stages if stage.held is not None}
        found |= {blob.digest for blob in job.resume.states} if job.resume is not None else set()
    return found


def droppable(state: State, digests: Collection[str]) -> list[str]:
    """Return those of the states' blobs that nothing refers to, whatever a node has reported as its state."""
    return sorted(set(digests) - referenced(state))


def referenced(state: State) -> set[str]:
    """Return the digests of all blobs that are needed, or may be."""
    kept: set[str] = set()
    for job in state.jobs.values():
        spec = job_pb2.JobSpec.FromString(job.spec)
        kept |= {spec.graph.digest, spec.weights.digest}
        kept |= {file.blob.digest for data in (spec.data, spec.eval_data) for file in data.files}
        kept |= {stage.weights.digest for stage in job.stages if stage.weights is not None}
        kept |= kept_for(job)
    return kept
