"""What a daemon and its worker say to each other: JSON lines over the worker's stdin and stdout.

The daemon's first line is a WorkerConfig; later lines are commands. Every line of the worker is a report.
End of file on the worker's stdin means that the daemon is gone: the worker ends at once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from fusion.base.clock import SystemClock
from fusion.base.errors import WireError
from fusion.plan.timeline import Kind

StateName = Literal["starting", "ready", "running", "finished", "failed", "stopped", "held"]
Cause = Literal["", "error", "peer-lost", "crash", "out-of-memory", "device", "lease"]
Level = Literal["debug", "info", "warning", "error"]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

TERMINAL_STATES: frozenset[str] = frozenset({"finished", "failed", "stopped", "held"})
PROGRESS_INTERVAL_S = 1.0  #: how often a worker says that it lives
MAX_LINE_BYTES = 2**20  #: of a report
MAX_TEXT = 4000  #: characters of a detail or a log entry that are kept

ORPHANED_EXIT_CODE = 75  #: of a worker whose daemon is gone
FENCED_EXIT_CODE = 76  #: of one whose node's lease is over, and whose daemon is frozen
LEASE_GRACE_S = 2.0  #: for a worker to end in order when the lease has ended: others may be given the stage 5 s later


class WorkerConfig(msgspec.Struct, frozen=True, tag="config"):
    """What one worker is started with."""

    assignment: bytes  #: a serialised Assignment; base64 on the line
    listen: str  #: host:port to bind the data plane to
    credentials_dir: str  #: of the node; renewed certificates appear there
    coordinator: str  #: host:port of its mutual-TLS port
    cache_dir: str  #: for blobs; made by the worker if it is missing
    incarnation: int  #: of this node's registration
    device: str = "cpu"  #: "cpu", "cuda:0", "mps"
    threads: int = 1  #: compute threads, unless the job states its own
    memory_limit_bytes: int = 0  #: what the owner lets a job use; 0: not limited
    allow_data: tuple[str, ...] = ()  #: directories that a job's data may lie in
    state_dirs: tuple[str, ...] = ()  #: where states are kept, the best place first; none: below `cache_dir`
    emulate_flops: float = 0.0  #: lab only: stretch every pass to the time that it takes at this speed; 0: don't
    routes: dict[str, str] = {}  #: dial the right address wherever a peer states the left one
    answering: tuple[str, ...] = ()  #: nodes that cannot be dialled, and call instead


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End in order and say "stopped"."""

    reason: str


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """End at the next step's end, alike on all stages, and say "held". For the worker of stage 0."""


class Recode(msgspec.Struct, frozen=True, tag="recode"):
    """Use other codecs from one of the next steps on, alike on all stages. For the worker of stage 0."""

    revision: Count
    links: tuple[tuple[Index, Index, str], ...]  #: (source, target, codec)


class Emulate(msgspec.Struct, frozen=True, tag="emulate"):
    """Lab only: stand for a device of another speed from now on."""

    flops: float


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Until then this node may speak for its stage; without a newer word the worker ends. So a daemon that is frozen
    does not leave a worker that trains for ever."""

    until_s: float  #: by SystemClock, which all processes of a machine share
    contact_s: float = 0.0  #: when the last heartbeat that was answered was sent
    fence_s: float = 0.0  #: the lease ends so long after that, unless no stage of the job has contact; 0: not stated


class StageStateReport(msgspec.Struct, frozen=True, tag="state"):
    """The stage has come into a state. After a terminal one the worker ends."""

    state: StateName
    detail: str = ""  #: one line; of "failed" the cause in words
    cause: Cause = ""  #: of "failed"
    peer_stage: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1  #: of "peer-lost": the stage that was lost
    weights_digest: str = ""  #: of "finished": the uploaded weights
    weights_size_bytes: Count = 0
    step: Count = 0  #: of "held", and of "running" once it does no further step: the last one done
    held_digest: str = ""  #: of "held": the uploaded state
    held_size_bytes: Count = 0


class Sending(msgspec.Struct, frozen=True):
    """How long sending to one target stage took in one step."""

    busy_s: float  #: with frames
    blocked_s: float  #: a message waited for credit
    raw_bytes: Count = 0  #: of values and gradients, before their codec
    coded_bytes: Count = 0  #: the same after it
    encode_s: float = 0.0
    codec: str = ""  #: in force


class Received(msgspec.Struct, frozen=True):
    """What came from one source stage in one step, in messages large enough to time."""

    bytes: Count  #: payload, without what arrives together with a message's header
    busy_s: float  #: from each message's header to its last byte
    decode_s: float = 0.0
    waited_s: float = 0.0  #: the stage had nothing else to do
    messages: Count = 0  #: that were timed


class SpanItem(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of time, by the worker's monotonic clock."""

    stage: Index  #: whose work it is; of a link the near end
    target: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]  #: of a link the far end; else -1
    kind: Kind
    micro_batch: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
    start_s: float
    end_s: float


class ClockItem(msgspec.Struct, frozen=True, array_like=True):
    """How far a peer's clock is ahead of the worker's."""

    offset_s: float
    error_s: float


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """What the stage did in one step; figures may be NaN or infinite."""

    step: Count  #: from 1
    loss: float | None = None  #: from the loss stage
    eval_loss: float | None = None
    grad_norm: float | None = None  #: from stage 0
    learning_rate: float = 0.0
    skipped: bool = False
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    samples: Count = 0
    tokens: Count = 0
    sent: dict[Index, Count] = {}  #: payload bytes to each target stage
    peak_memory_bytes: Count = 0
    sending: dict[Index, Sending] = {}  #: to each target stage
    received: dict[Index, Received] = {}  #: from each source stage
    codec_revision: Count = 0  #: of stage 0: of the last codecs that it was told and that were in force
    spans: tuple[SpanItem, ...] = ()  #: what the step was spent on; of some steps only
    clocks: dict[Index, ClockItem] = {}  #: of the peers, with the spans


class LogEntry(msgspec.Struct, frozen=True, tag="log"):
    """A line for the job's log."""

    level: Level
    text: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A sign of life with the stage's counters. A worker that sends none for long hangs."""

    step: Count  #: last finished
    micro_batches: Count  #: looks between two instructions, or while waiting; it only grows
    at_work: bool = False  #: whether it ought to grow: the stage is being trained


class StateUploaded(msgspec.Struct, frozen=True, tag="uploaded"):
    """The blob store has a state that this node keeps: a checkpoint's, or that of a stage that holds."""

    digest: str
    size_bytes: Count
    step: Count


class Unheard(msgspec.Struct, frozen=True, tag="unheard"):
    """No stage of the job has contact with the coordinator. Comes again and again while that is so."""

    quiet_s: float  #: how long ago any of them last had an answer


Command = Stop | Hold | Recode | Emulate | Lease
Report = StageStateReport | StepReport | LogEntry | Progress | StateUploaded | Unheard


def encode(message: WorkerConfig | Command | Report) -> bytes:
    """Return one JSON line, line end included. NaN and infinity are kept, as Python's own JSON writes them."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True), separators=(",", ":")).encode("ascii") + b"\n"


def _decode(line: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(json.loads(line), kind, str_keys=True)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise WireError(f"{what}: not understood: {line[:80]!r} ({error})") from None


def decode_config(line: bytes) -> WorkerConfig:
    """Return the configuration of a line; WireError if it is none."""
    config: WorkerConfig = _decode(line, WorkerConfig, "worker configuration")
    return config


def decode_command(line: bytes) -> Command:
    """Return the command of a line; WireError if it is none."""
    command: Command = _decode(line, Command, "command to the worker")
    return command


def decode_report(line: bytes) -> Report:
    """Return the report of a line; WireError if it is none."""
    report: Report = _decode(line, Report, "report of the worker")
    return report


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` without line breaks, cut to `limit` characters."""
    return " ".join(text.split())[:limit]


def exit_orphaned() -> None:
    """End this process at once: the daemon is gone, and nobody would hear of a cleaner end."""
    os._exit(ORPHANED_EXIT_CODE)


def _read_lines(descriptor: int) -> Iterator[bytes]:
    """Yield lines. Not a file object: its lock, held by a waiting thread, would abort the interpreter's exit."""
    pending = b""
    while chunk := os.read(descriptor, 2**16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines


class WorkerChannel:
    """The worker's end. `report` and `progress` may be called from any thread."""

    def __init__(self, commands: int, reports: int) -> None:
        """Take two file descriptors: to read the daemon's lines from, and to write reports to."""
        self._lines = _read_lines(commands)
        self._reports = reports
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        self._progress = Progress(0, 0)
        self._clock = SystemClock()
        self._lease_until_s = math.inf  #: until the daemon has stated one

    @classmethod
    def take_stdio(cls) -> WorkerChannel:
        """Take this process's stdin and stdout for the protocol.

        Afterwards stdin is empty, and everything printed to stdout goes to stderr, from C code as well, so that a
        stray print cannot break the protocol.
        """
        sys.stdout.flush()
        commands, reports = os.dup(0), os.dup(1)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        return cls(commands, reports)

    def read_config(self) -> WorkerConfig:
        """Return the daemon's first line. WireError if it is not a configuration or the daemon is gone."""
        return decode_config(next(self._lines, b""))

    def watch(
        self,
        on_stop: Callable[[str], None],
        on_orphaned: Callable[[], None] = exit_orphaned,
        on_hold: Callable[[], None] = lambda: None,
        on_emulate: Callable[[float], None] = lambda _flops: None,
        on_recode: Callable[[Recode], None] = lambda _change: None,
        on_lease: Callable[[Lease], None] = lambda _lease: None,
    ) -> None:
        """Start two daemon threads: one waits for commands, one sends signs of life every PROGRESS_INTERVAL_S.

        `on_stop(reason)`, `on_hold()`, `on_emulate(flops)`, `on_recode(change)` and `on_lease(lease)` are called on the
        first one's thread for the commands of these names; `on_orphaned()` once the daemon is gone.
        When the lease ends, `on_stop` comes too, and soon after it the process's end.
        """

        def obey(command: Command) -> None:
            match command:
                case Stop():
                    on_stop(command.reason)
                case Hold():
                    on_hold()
                case Recode():
                    on_recode(command)
                case Emulate():
                    on_emulate(command.flops)
                case Lease():
                    self._lease_until_s = command.until_s
                    on_lease(command)

        arguments = (obey, on_stop, on_orphaned)
        threading.Thread(target=self._watch, args=arguments, name="ipc-commands", daemon=True).start()
        threading.Thread(target=self._beat, args=(on_stop,), name="ipc-progress", daemon=True).start()

    def report(self, message: Report) -> None:
        """Send one report; after the daemon is gone it goes nowhere."""
        line = memoryview(encode(message))
        with self._write_lock:
            try:
                while line:
                    line = line[os.write(self._reports, line) :]
            except OSError:  # a closed pipe: the watching thread sees the end of file
                return

    def state(self, state: StateName, detail: str = "", **rest: Any) -> None:
        """Report a state of the stage; `rest` as in StageStateReport."""
        self.report(StageStateReport(state, one_line(detail), **rest))

    def log(self, level: Level, text: str) -> None:
        """Send a line for the job's log."""
        self.report(LogEntry(level, one_line(text)))

    def progress(self, step: int, micro_batches: int, at_work: bool = False) -> None:
        """Set the counters of the next signs of life; costs nothing."""
        self._progress = Progress(step, micro_batches, at_work)

    def close(self) -> None:
        """Stop the signs of life; what was reported has left already."""
        self._closed.set()

    def _watch(
        self, obey: Callable[[Command], None], on_stop: Callable[[str], None], on_orphaned: Callable[[], None]
    ) -> None:
        for line in self._lines:
            try:
                obey(decode_command(line))
            except WireError as error:
                on_stop(str(error))
        if not self._closed.is_set():
            on_orphaned()

    def _beat(self, on_stop: Callable[[str], None]) -> None:
        while not self._closed.wait(PROGRESS_INTERVAL_S):
            over_s = self._clock.monotonic_s() - self._lease_until_s
            if over_s > LEASE_GRACE_S:
                os._exit(FENCED_EXIT_CODE)
            if over_s > 0:
                on_stop("the node's lease is over, and its daemon does not answer")
            self.report(self._progress)
