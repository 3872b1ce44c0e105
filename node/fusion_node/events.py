"""What the daemon's agent is told (events) and what it wants done (actions): plain data, without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_node.ipc import Cause, Lease, LogEntry, Recode, Report, StageStateReport, StepReport


@dataclass(frozen=True, slots=True)
class StageRef:
    """Which stage of which plan."""

    job: str
    epoch: int
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.job} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A stage to be trained here. `payload` is the serialised message for the worker."""

    ref: StageRef
    cluster: str
    node: str
    incarnation: int
    payload: bytes


# ---- events ----


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; wanted at least once a second."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The coordinator has answered a Register that was sent at `sent_s`."""

    incarnation: int
    sent_s: float
    heartbeat_s: float
    self_fence_s: float
    coordinator_grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RegisterFailed:
    """A Register was not answered (`exit_code` 0: worth another try), or refused for good."""

    detail: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    """The heartbeat sent at `sent_s` was answered."""

    incarnation: int
    sent_s: float
    revoked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RegistrationLost:
    """The coordinator no longer takes this registration for alive."""

    incarnation: int
    detail: str


@dataclass(frozen=True, slots=True)
class AccessRefused:
    """The coordinator refuses this node's certificate."""

    detail: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """A command to train a stage, received under a registration."""

    incarnation: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StopOrdered:
    """A command to end a job's worker; epoch 0 means whichever runs."""

    incarnation: int
    job: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldOrdered:
    """A command to end the run of an epoch at a step's end, with the state uploaded."""

    incarnation: int
    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CodecsOrdered:
    """A command to use other codecs in an epoch from one of the next steps on."""

    incarnation: int
    job: str
    epoch: int
    change: Recode


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A line of the worker."""

    report: Report


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker is gone; `cause` and `detail` say how, in case it has not said so itself."""

    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM or SIGINT has come."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The coordinator needs this node no more, or was asked in vain; `problem` says why in vain."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The coordinator knows that this node goes, or was told in vain."""


Event = (
    Tick
    | Registered
    | RegisterFailed
    | HeartbeatAnswered
    | RegistrationLost
    | AccessRefused
    | Assigned
    | StopOrdered
    | HoldOrdered
    | CodecsOrdered
    | WorkerReported
    | WorkerExited
    | Signalled
    | Drained
    | Left
)

# ---- actions ----


@dataclass(frozen=True, slots=True)
class Register:
    """Register after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Listen for commands under this registration, and no other; 0: under none."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Send a heartbeat; answered or not, never wait for it."""

    incarnation: int
    sequence: int
    job: str
    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker. There is none at this moment."""

    assignment: Assignment
    lease: Lease  #: as in LeaseWorker


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Ask the worker to end (unless it ends by itself), and kill it after `grace_s`. May come again with less grace."""

    reason: str
    grace_s: float
    ask: bool = True


@dataclass(frozen=True, slots=True)
class HoldWorker:
    """Ask the worker to hold at a step's end."""


@dataclass(frozen=True, slots=True)
class RecodeWorker:
    """Ask the worker to use other codecs from one of the next steps on."""

    change: Recode


@dataclass(frozen=True, slots=True)
class LeaseWorker:
    """Tell the worker until when this node may speak for its stage."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class ReportStates:
    """Tell the coordinator which states this node keeps."""

    uploaded: str = ""  #: digest of one that the blob store has now


@dataclass(frozen=True, slots=True)
class ReportStage:
    """Tell the coordinator about a stage, once, in order, however long it takes."""

    ref: StageRef
    incarnation: int
    report: StageStateReport


@dataclass(frozen=True, slots=True)
class ReportMetrics:
    """Pass on figures or a log line of a stage."""

    ref: StageRef
    incarnation: int
    report: StepReport | LogEntry


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the coordinator to let its jobs go on without this node, until they do."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell the coordinator that this node goes."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the daemon."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the daemon's own log."""

    level: str
    text: str


Action = (
    Register
    | Watch
    | Heartbeat
    | StartWorker
    | StopWorker
    | HoldWorker
    | RecodeWorker
    | LeaseWorker
    | ReportStates
    | ReportStage
    | ReportMetrics
    | Drain
    | Leave
    | Exit
    | Note
)
