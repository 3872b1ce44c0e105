"""A job as its owner sees it from outside: JobStatus, log lines and the states of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fusion.base.ids import NodeId, StageIndex
from fusion.plan.types import Plan
from fusion.protocol.job import BlobRef, blob_from_proto
from fusion.protocol.metrics import StepMetrics, metrics_from_proto
from fusion.protocol.plan import plan_from_proto
from fusion.wire.v1 import coordinator_pb2, node_pb2


class JobState(StrEnum):
    """Where a job is. One that has failed or was cancelled goes on only if its owner resumes it."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECOVERING = "recovering"  #: something broke: it collects its state, then goes on under a new plan
    PAUSED = "paused"  #: by its owner, or because no plan is possible with the nodes there are

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


_STATES = {
    coordinator_pb2.JOB_STATE_QUEUED: JobState.QUEUED,
    coordinator_pb2.JOB_STATE_STARTING: JobState.STARTING,
    coordinator_pb2.JOB_STATE_RUNNING: JobState.RUNNING,
    coordinator_pb2.JOB_STATE_SUCCEEDED: JobState.SUCCEEDED,
    coordinator_pb2.JOB_STATE_FAILED: JobState.FAILED,
    coordinator_pb2.JOB_STATE_CANCELLED: JobState.CANCELLED,
    coordinator_pb2.JOB_STATE_RECOVERING: JobState.RECOVERING,
    coordinator_pb2.JOB_STATE_PAUSED: JobState.PAUSED,
}


@dataclass(frozen=True, slots=True)
class StageStatus:
    """Which part of the model runs where."""

    node: NodeId
    node_name: str
    first_operator: int
    end_operator: int  #: one past the last
    parameters: int  #: scalars held


@dataclass(frozen=True, slots=True)
class RelayedLink:
    """A directed pair of stages whose connection goes through a relay now."""

    source: StageIndex  #: that dials
    target: StageIndex
    by: str  #: "coordinator"
    bytes: int  #: both ways, TLS included, since the relay began


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job at one moment."""

    job_id: str
    name: str
    state: JobState
    reason: str  #: why it waits, pauses, recovers, failed or was cancelled, or where it moves to; one line
    step: int  #: last finished
    steps: int
    stages: tuple[StageStatus, ...]  #: empty until there is a plan
    stage_weights: tuple[BlobRef, ...]  #: of a job that succeeded, one file per stage
    last: StepMetrics | None
    submitted_wall_s: float
    finished_wall_s: float  #: 0 until it has ended
    owner: str
    graph: BlobRef | None = None
    weights: BlobRef | None = None  #: initial
    plan: Plan | None = None  #: in force, or the last one
    relayed: tuple[RelayedLink, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: one safetensors file per stage, and a manifest."""

    step: int  #: the last one done
    committed_wall_s: float
    states: tuple[BlobRef, ...]  #: by stage
    manifest: str  #: the text of MANIFEST.json

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(state.size_bytes for state in self.states)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that a node or the coordinator wrote about the job."""

    wall_s: float
    level: str
    text: str
    origin: str  #: node name, or "coordinator"


def status_from_proto(message: coordinator_pb2.JobStatus) -> JobStatus:
    """Return the status of a message; a state of a newer protocol reads as queued."""
    return JobStatus(
        job_id=message.job_id,
        name=message.name,
        state=_STATES.get(message.state, JobState.QUEUED),
        reason=message.reason,
        step=message.step,
        steps=message.steps,
        stages=tuple(
            StageStatus(
                NodeId(stage.node_id), stage.node_name, stage.first_operator, stage.end_operator, stage.parameters
            )
            for stage in message.plan.stages
        ),
        stage_weights=tuple(blob_from_proto(blob) for blob in message.stage_weights),
        last=metrics_from_proto(message.last) if message.HasField("last") else None,
        submitted_wall_s=message.submitted_wall_s,
        finished_wall_s=message.finished_wall_s,
        owner=message.owner,
        graph=blob_from_proto(message.graph) if message.HasField("graph") else None,
        weights=blob_from_proto(message.weights) if message.HasField("weights") else None,
        plan=plan_from_proto(message.plan) if message.plan.stages else None,
        relayed=tuple(
            RelayedLink(StageIndex(link.source), StageIndex(link.target), link.by, link.bytes)
            for link in message.relayed
        ),
    )


def log_from_proto(message: node_pb2.LogLine) -> LogLine:
    """Return the log line of a message."""
    return LogLine(message.wall_s, message.level, message.text, message.origin)


def checkpoint_from_proto(message: coordinator_pb2.Checkpoint) -> Checkpoint:
    """Return the checkpoint of a message."""
    states = tuple(blob_from_proto(state) for state in message.states)
    return Checkpoint(message.step, message.committed_wall_s, states, message.manifest)
