"""What happened, as data: the only way in which the state changes, and what the store keeps."""

from __future__ import annotations

import msgspec

from fusion.base.ids import JobId, NodeId
from fusion.security.credentials import Role
from fusion_coordinator.state.records import (
    CheckpointRecord,
    HardwareRecord,
    JobState,
    NodeState,
    Pause,
    ResumeRecord,
    StageRecord,
    StageState,
    TroubleRecord,
    WeightsRecord,
)


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all events. `wall_s` is for people; nothing is decided by it but the end of tokens."""

    wall_s: float


class TokenCreated(Event, frozen=True):
    """The operator made a join token."""

    token_id: str
    secret_hash: bytes
    role: Role
    expires_wall_s: float


class Enrolled(Event, frozen=True):
    """Somebody used a token and got a certificate."""

    token_id: str
    identity: str
    role: Role
    name: str


class Revoked(Event, frozen=True):
    """The operator withdrew an identity."""

    identity: str


class NodeRegistered(Event, frozen=True):
    """A node daemon started."""

    node: NodeId
    name: str
    address: str
    seen_host: str
    hardware: HardwareRecord
    incarnation: int


class NodeGone(Event, frozen=True):
    """A node's lease ended, or it said goodbye."""

    node: NodeId
    incarnation: int
    state: NodeState
    reason: str


class NodeDrains(Event, frozen=True):
    """A node wants to leave: it gets no new work."""

    node: NodeId
    incarnation: int
    reason: str


class JobSubmitted(Event, frozen=True):
    """An owner handed in a job that passed all checks."""

    job: JobId
    owner: str
    name: str
    spec: bytes
    steps: int


class JobWaits(Event, frozen=True):
    """A queued job cannot start yet."""

    job: JobId
    reason: str


class JobPlanned(Event, frozen=True):
    """A job got an epoch: who runs what. Committed before any node hears of it."""

    job: JobId
    epoch: int
    plan: bytes
    stages: tuple[StageRecord, ...]


class StageMoved(Event, frozen=True):
    """A stage went on, by its node's report."""

    job: JobId
    epoch: int
    stage: int
    state: StageState
    detail: str = ""
    cause: str = ""
    peer_stage: int = -1
    weights: WeightsRecord | None = None
    step: int = 0
    held: WeightsRecord | None = None


class JobMoves(Event, frozen=True):
    """A running job is to hold at a step's end and to go on by another plan. Committed before any node hears of it."""

    job: JobId
    epoch: int
    plan: bytes
    stages: tuple[StageRecord, ...]
    reason: str = ""


class JobStays(Event, frozen=True):
    """The move is given up: no stage holds yet, as far as is known."""

    job: JobId
    reason: str


class JobHolds(Event, frozen=True):
    """A running job is to hold at a step's end, and then pauses."""

    job: JobId
    pause: Pause
    reason: str


class JobBroke(Event, frozen=True):
    """Something broke that another plan can cure: the workers of this epoch end, and their states are collected."""

    job: JobId
    reason: str
    trouble: TroubleRecord | None = None
    limit_bytes: int = 0  #: for trouble.node, if it ran out of memory


class JobRestored(Event, frozen=True):
    """It is decided from which step a broken job goes on; the store has what it needs. Later steps are done again."""

    job: JobId
    step: int  #: the last one that counts
    states: tuple[WeightsRecord, ...]  #: empty with step 0: from the start
    lost: int  #: steps that are done again


class JobPaused(Event, frozen=True):
    """A job that does not run waits: for its owner, or for nodes that make a plan possible."""

    job: JobId
    reason: str
    by_owner: bool = False


class JobResumed(Event, frozen=True):
    """Its owner lets a job go on that pauses or has ended. Steps later than `step` are done again."""

    job: JobId
    step: int
    resume: ResumeRecord | None  #: None: from the start


class CheckpointCommitted(Event, frozen=True):
    """A checkpoint is whole, on disk, and verified."""

    job: JobId
    checkpoint: CheckpointRecord


class CheckpointDropped(Event, frozen=True):
    """A checkpoint goes, because newer ones are enough, or because it is damaged."""

    job: JobId
    step: int


class JobRecoded(Event, frozen=True):
    """The links of a running job have other codecs since a step: the plan in force, with that written in it."""

    job: JobId
    epoch: int
    plan: bytes
    reason: str


class JobEnded(Event, frozen=True):
    """A job failed or was cancelled. (It succeeds by the last StageMoved to FINISHED.)"""

    job: JobId
    state: JobState
    reason: str


AnyEvent = (
    TokenCreated
    | Enrolled
    | Revoked
    | NodeRegistered
    | NodeGone
    | JobSubmitted
    | JobWaits
    | JobPlanned
    | StageMoved
    | JobMoves
    | JobStays
    | JobRecoded
    | NodeDrains
    | JobHolds
    | JobBroke
    | JobRestored
    | JobPaused
    | JobResumed
    | CheckpointCommitted
    | CheckpointDropped
    | JobEnded
)

_decoder = msgspec.json.Decoder(AnyEvent)


def encode_event(event: AnyEvent) -> bytes:
    """Return `event` as JSON."""
    return msgspec.json.encode(event)


def decode_event(body: bytes) -> AnyEvent:
    """Return the event of `encode_event`."""
    return _decoder.decode(body)


def redone_after(event: AnyEvent) -> tuple[JobId, int] | None:
    """Return the job, and the step after which what was reported does not count any more, if `event` says so."""
    return (event.job, event.step) if isinstance(event, JobRestored | JobResumed) else None
