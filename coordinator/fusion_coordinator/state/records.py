"""What the coordinator remembers. Immutable records; every change makes new ones."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from fusion.base.ids import JobId, NodeId
from fusion.security.credentials import Role


class NodeState(StrEnum):
    """Whether a node belongs to the cluster now; whether it is busy follows from the jobs."""

    MEMBER = "member"
    LOST = "lost"  #: its lease ended
    LEFT = "left"


class JobState(IntEnum):
    """Same numbers as on the wire."""

    QUEUED = 1
    STARTING = 2
    RUNNING = 3
    SUCCEEDED = 4
    FAILED = 5
    CANCELLED = 6
    RECOVERING = 7  #: its workers end and its states are collected
    PAUSED = 8

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the job by itself."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def active(self) -> bool:
        """Whether nodes work on it, under the plan in force."""
        return self in (JobState.STARTING, JobState.RUNNING)


class StageState(IntEnum):
    """Same numbers as on the wire; ASSIGNED is what a stage is before its node has said anything."""

    ASSIGNED = 0
    STARTING = 1
    READY = 2
    RUNNING = 3
    FINISHED = 4
    FAILED = 5
    STOPPED = 6
    HELD = 7

    @property
    def ended(self) -> bool:
        """Whether the stage's worker has ended."""
        return self >= StageState.FINISHED

    def follows(self, old: StageState) -> bool:
        """Whether a stage in state `old` may come, or stay, in this one. A worker that has ended says nothing more."""
        return not old.ended and self >= old

    @property
    def ready(self) -> bool:
        """Whether the stage has loaded everything, or is past that."""
        return self in (StageState.READY, StageState.RUNNING, StageState.FINISHED, StageState.HELD)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all records."""


class TokenRecord(Record, frozen=True):
    """A join token. Only a hash of its secret is kept."""

    token_id: str
    secret_hash: bytes
    role: Role
    expires_wall_s: float
    used_by: str = ""  #: identity


class IdentityRecord(Record, frozen=True):
    """Somebody who holds a certificate."""

    identity: str
    role: Role
    name: str
    enrolled_wall_s: float


class HardwareRecord(Record, frozen=True):
    """What a node says of itself."""

    device: str
    device_name: str
    memory_bytes: int
    flops: float
    threads: int
    platform: str
    python_version: str
    torch_version: str
    package_version: str
    bytes_per_s: float = 0.0  #: 0: not measured
    efficiency: dict[str, float] = {}  #: by kind of operator


class NodeRecord(Record, frozen=True):
    """A node's latest registration."""

    node: NodeId
    name: str
    address: str  #: host:port of its data plane
    seen_host: str  #: where its calls came from
    hardware: HardwareRecord
    incarnation: int
    state: NodeState = NodeState.MEMBER
    reason: str = ""  #: why it is lost or has left
    since_wall_s: float = 0.0
    draining: bool = False  #: it wants to leave and gets no new work


class WeightsRecord(Record, frozen=True):
    """A blob that a stage uploaded: the weights of a finished one, the state of a held one."""

    digest: str
    size_bytes: int


class StageRecord(Record, frozen=True):
    """One stage of a job's plan, and how far it is."""

    node: NodeId
    node_name: str
    incarnation: int
    state: StageState = StageState.ASSIGNED
    detail: str = ""
    cause: str = ""  #: of FAILED
    peer_stage: int = -1  #: of a FAILED with cause "peer-lost"
    weights: WeightsRecord | None = None
    step: int = 0  #: after which it has stopped to hold; 0: it has not
    held: WeightsRecord | None = None  #: its state after that step, once it is HELD

    @property
    def holds(self) -> bool:
        """Whether the stage does no further step under this plan."""
        return self.step > 0


class Pause(StrEnum):
    """Why a job holds without a plan to go on by."""

    NO = ""
    OWNER = "owner"  #: until the owner resumes it
    REPLAN = "replan"  #: until there is a plan with the nodes that stay


class MoveRecord(Record, frozen=True):
    """The plan that a running job takes once all its stages hold; or none, if it is to pause."""

    epoch: int
    plan: bytes  #: a serialised Plan; empty if it pauses
    stages: tuple[StageRecord, ...]
    pause: Pause = Pause.NO


class ResumeRecord(Record, frozen=True):
    """Where a job goes on that was held, or broke, under another plan. The blob store has the states."""

    step: int  #: the last one done
    states: tuple[WeightsRecord, ...]  #: of all stages of that plan


class TroubleRecord(Record, frozen=True):
    """A failure that may be the job's own, and may come again: on which node, and how far the job was."""

    node: NodeId
    node_name: str
    cause: str
    step: int  #: last one done by then


class RecoveryRecord(Record, frozen=True):
    """What a job recovers from, until it runs again."""

    reason: str
    since_wall_s: float
    step: int = 0  #: it goes on after this one, once that is known
    lost: int = 0  #: steps that are done again


class CheckpointRecord(Record, frozen=True):
    """A committed checkpoint."""

    step: int
    epoch: int
    committed_wall_s: float
    states: tuple[WeightsRecord, ...]  #: by stage


class PastRecord(Record, frozen=True):
    """A plan that was in force."""

    last_step: int
    stages: int  #: how many it had


class JobRecord(Record, frozen=True):
    """A job from its submission on."""

    job: JobId
    owner: str  #: identity
    name: str
    spec: bytes  #: a serialised JobSpec
    steps: int
    submitted_wall_s: float
    state: JobState = JobState.QUEUED
    reason: str = ""
    epoch: int = 0
    plan: bytes = b""  #: a serialised Plan
    stages: tuple[StageRecord, ...] = ()
    finished_wall_s: float = 0.0
    next: MoveRecord | None = None  #: while the job moves
    resume: ResumeRecord | None = None  #: of the present plan; None: it began with the first step
    past: tuple[PastRecord, ...] = ()  #: the plans before, the first one first
    owner_paused: bool = False  #: it waits for its owner
    recovery: RecoveryRecord | None = None  #: until it runs again
    troubles: tuple[TroubleRecord, ...] = ()  #: the last ones
    limits: dict[NodeId, int] = {}  #: bytes that a node may be given by plans of this job, after it ran out of memory
    checkpoints: tuple[CheckpointRecord, ...] = ()  #: the earliest step first

    @property
    def wants_plan(self) -> bool:
        """Whether it would go on at once if there were a plan."""
        if self.owner_paused:
            return False
        return self.state in (JobState.QUEUED, JobState.PAUSED) or (
            self.state is JobState.RECOVERING and not self.stages
        )

    @property
    def collects(self) -> bool:
        """Whether it is broken and it is not decided yet from which step it goes on."""
        return self.state is JobState.RECOVERING and bool(self.stages)

    @property
    def holds(self) -> bool:
        """Whether a stage has stopped already to let the job move."""
        return any(stage.holds for stage in self.stages)


class State(Record, frozen=True):
    """Everything that outlives the process. The dicts are never changed in place."""

    tokens: dict[str, TokenRecord] = {}
    identities: dict[str, IdentityRecord] = {}
    nodes: dict[NodeId, NodeRecord] = {}
    jobs: dict[JobId, JobRecord] = {}
    revoked: frozenset[str] = frozenset()
    incarnation: int = 0  #: the last one given out
