"""The daemon's decisions, without I/O: events and the time go in, actions come out.

The agent holds a registration with its lease, and at most one worker. Three rules keep two nodes from ever training
one stage at a time without any common clock:

- the lease ends `self_fence_s` after the last answered heartbeat was *sent*, by this machine's own clock; later only
  while no stage of the job has had an answer for a while: then it is the coordinator that is away, see `contact`;
- a stage of an epoch that is not newer than the newest seen of that job is refused;
- a worker whose lease has ended is killed before the node speaks for it again.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import assert_never

from fusion_node.events import (
    AccessRefused,
    Action,
    Assigned,
    Assignment,
    CodecsOrdered,
    Drain,
    Drained,
    Event,
    Exit,
    Heartbeat,
    HeartbeatAnswered,
    HoldOrdered,
    HoldWorker,
    LeaseWorker,
    Leave,
    Left,
    Note,
    RecodeWorker,
    Register,
    Registered,
    RegisterFailed,
    RegistrationLost,
    ReportMetrics,
    ReportStage,
    ReportStates,
    Signalled,
    StageRef,
    StartWorker,
    StopOrdered,
    StopWorker,
    Tick,
    Watch,
    WorkerExited,
    WorkerReported,
)
from fusion_node.ipc import (
    TERMINAL_STATES,
    Lease,
    LogEntry,
    Progress,
    Report,
    StageStateReport,
    StateUploaded,
    StepReport,
    Unheard,
)

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 15.0
STOP_GRACE_S = 10.0  #: between asking a worker to end and killing it
END_GRACE_S = 20.0  #: for a worker to end by itself after its last report
LEAVE_GRACE_S = 5.0  #: the same when the daemon itself is asked to end
FENCE_GRACE_S = 1.0  #: the same when the lease has ended: others may be given the stage 5 s later
ALONE_SHARE = 0.5  #: of the time to the fence: so long no stage may have had an answer, for the coordinator to be away
ALONE_FOR_SHARE, ALONE_LEAST_S = 0.2, 3.0  #: of it, and at least: how long the lease then goes on, until told again
START_LIMIT_S = 120.0  #: until the first sign of life: torch is imported meanwhile
HANG_LIMIT_S = 20.0  #: without a sign of life thereafter
STUCK_LIMIT_S, STUCK_STEPS = 20.0, 10.0  #: and, at work, so long and so many median steps within one instruction
STUCK_FIRST_LIMIT_S = 600.0  #: the same before a step's time is known
STEPS_WATCHED = 20  #: for the median
PAUSE_S = 3.0  #: a longer gap between ticks means that this process itself did not run
REMEMBERED_JOBS = 1000
AUTH_EXIT_CODE = 20


@dataclass(slots=True)
class _Registration:
    incarnation: int
    lease_from_s: float  #: when the last answered heartbeat was sent
    heartbeat_s: float
    self_fence_s: float
    next_heartbeat_s: float
    grace_s: float = 0.0  #: as self_fence_s, while no stage of the job has contact
    alone_until_s: float = 0.0  #: until then it is known that none has
    sequence: int = 0

    @property
    def lease_until_s(self) -> float:
        """When this node may no longer speak for its stage."""
        alone_s = min(self.alone_until_s, self.lease_from_s + self.grace_s)
        return max(self.lease_from_s + self.self_fence_s, alone_s)

    @property
    def lease(self) -> Lease:
        """The same for the worker."""
        return Lease(self.lease_until_s, self.lease_from_s, self.self_fence_s)


@dataclass(slots=True)
class _Worker:
    assignment: Assignment
    sign_s: float  #: when it last gave a sign of life
    limit_s: float  #: how long it may go without one
    step: int = 0
    passes: int = -1  #: when it was last seen to work: looks between two instructions
    moved_s: float = 0.0  #: when that last grew, or when it was not at work
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_WATCHED))
    ended: bool = False  #: a terminal state has been reported for it
    stopping: bool = False
    outcome: StageStateReport | None = None  #: what to report once it is gone, instead of how it went
    muted: bool = False  #: what it says no longer counts


class Agent:
    """The state machine. `handle` is the only way in; the actions it returns are to be done in order."""

    def __init__(self, cluster: str, identity: str, rng: random.Random | None = None) -> None:
        self._cluster, self._identity = cluster, identity
        self._rng = rng or random.Random()  # noqa: S311  # jitter, no secret
        self._registration: _Registration | None = None
        self._attempts = 0
        self._worker: _Worker | None = None
        self._waiting: Assignment | None = None  #: starts once the present worker is gone
        self._newest: OrderedDict[str, int] = OrderedDict()  #: newest epoch seen of each job
        self._last_tick_s: float | None = None
        self._exit: Exit | None = None  #: how to exit once the worker is gone
        self._draining = ""  #: why this node wants to go, while its jobs still need it
        self._leaving = ""  #: why this node goes
        self._actions: list[Action] = []

    @property
    def incarnation(self) -> int:
        """The number of the present registration; 0 without one."""
        return self._registration.incarnation if self._registration else 0

    @property
    def can_be_probed(self) -> bool:
        """Whether nothing needs the data plane's port, and the node goes on."""
        return (
            self._registration is not None
            and self._worker is None
            and not (self._draining or self._leaving)
            and self._exit is None
        )

    def start(self) -> list[Action]:
        """Return the first actions."""
        return [Register(0.0)]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take an event at `now_s` (monotonic) and return what is to be done."""
        self._actions = []
        if isinstance(event, Tick):
            self._forgive_own_pause(now_s)
        self._fence(now_s)
        match event:
            case Tick():
                self._tick(now_s)
            case Registered():
                self._registered(event, now_s)
            case RegisterFailed():
                self._register_failed(event)
            case HeartbeatAnswered():
                self._heartbeat_answered(event)
            case RegistrationLost():
                if event.incarnation == self.incarnation:
                    self._lose_registration(event.detail)
            case AccessRefused():
                self._end(Exit(AUTH_EXIT_CODE, event.detail))
            case Assigned():
                self._assigned(event, now_s)
            case StopOrdered():
                self._stop_ordered(event)
            case HoldOrdered():
                self._ordered(event, HoldWorker())
            case CodecsOrdered():
                self._ordered(event, RecodeWorker(event.change))
            case WorkerReported():
                self._worker_reported(event.report, now_s)
            case WorkerExited():
                self._worker_exited(event, now_s)
            case Signalled():
                self._signalled(event)
            case Drained():
                self._drained(event.problem)
            case Left():
                self._do(Exit(0, f"left: {self._leaving}"))
            case _:
                assert_never(event)
        return self._actions

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    # ---- registration and lease ----

    def _backoff_s(self) -> float:
        """Full jitter: uniform between 0 and a bound that doubles with every attempt."""
        bound = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(self._attempts, 10))
        self._attempts += 1
        return self._rng.uniform(0.0, bound)

    def _registered(self, event: Registered, now_s: float) -> None:
        if self._leaving or self._exit:
            return
        self._attempts = 0
        self._registration = _Registration(
            event.incarnation,
            event.sent_s,
            event.heartbeat_s,
            event.self_fence_s,
            now_s + event.heartbeat_s,
            event.coordinator_grace_s,
        )
        self._do(Note("info", f"registered, incarnation {event.incarnation}"))
        self._do(Watch(event.incarnation))
        self._do(ReportStates())

    def _register_failed(self, event: RegisterFailed) -> None:
        if self._leaving or self._exit:
            return
        if event.exit_code:
            self._end(Exit(event.exit_code, event.detail))
            return
        delay_s = self._backoff_s()
        self._do(Note("warning", f"not registered: {event.detail}; trying again in {delay_s:.1f} s"))
        self._do(Register(delay_s))

    def _heartbeat_answered(self, event: HeartbeatAnswered) -> None:
        registration = self._registration
        if registration is None or event.incarnation != registration.incarnation:
            return
        registration.lease_from_s = max(registration.lease_from_s, event.sent_s)
        if registration.alone_until_s:
            registration.alone_until_s = 0.0
            self._do(Note("info", "the coordinator answers again"))
        if self._worker is not None:
            self._do(LeaseWorker(registration.lease))
        if self._identity in event.revoked:
            self._end(Exit(AUTH_EXIT_CODE, "this node has been revoked; ask the cluster's operator for a new token"))

    def _unheard(self, quiet_s: float, now_s: float) -> None:
        """No stage of the job has contact: nobody can have been given this node's, as long as that lasts."""
        registration = self._registration
        if registration is None or not registration.grace_s or quiet_s < ALONE_SHARE * registration.self_fence_s:
            return
        if not registration.alone_until_s:
            grace = f"training goes on without it for up to {registration.grace_s:.0f} s"
            self._do(Note("warning", f"no stage of the job has contact with the coordinator; {grace}"))
        registration.alone_until_s = now_s + max(ALONE_LEAST_S, ALONE_FOR_SHARE * registration.self_fence_s)
        self._do(LeaseWorker(registration.lease))

    def _fence(self, now_s: float) -> None:
        registration = self._registration
        if registration is None or now_s < registration.lease_until_s:
            return
        self._lose_registration(f"no answered heartbeat for {now_s - registration.lease_from_s:.0f} s")

    def _lose_registration(self, detail: str) -> None:
        """The lease is over: whatever runs here no longer counts, and the node starts afresh."""
        self._registration = None
        self._waiting = None
        self._do(Note("warning", f"registration lost: {detail}"))
        self._do(Watch(0))
        if self._worker is not None:
            report = StageStateReport("failed", f"the node lost its lease: {detail}; its worker was stopped", "lease")
            self._stop_worker("the node's lease is over", FENCE_GRACE_S, report)
            self._worker.muted = True
        if self._draining:
            self._drained(detail)
        elif self._leaving:
            self._go()
        elif not self._exit:
            self._do(Register(self._backoff_s()))

    def _tick(self, now_s: float) -> None:
        self._watch_worker(now_s)
        registration = self._registration
        if registration is None or now_s < registration.next_heartbeat_s:
            return
        registration.sequence += 1
        registration.next_heartbeat_s = now_s + registration.heartbeat_s
        worker = self._worker
        # A worker whose stage has ended keeps the node from no other job, though its process may still be going.
        works = worker is not None and not worker.muted and not worker.ended
        ref = worker.assignment.ref if worker and works else StageRef("", 0, 0)
        step = worker.step if worker and works else 0
        self._do(Heartbeat(registration.incarnation, registration.sequence, ref.job, ref.epoch, step))

    # ---- commands ----

    def _assigned(self, event: Assigned, now_s: float) -> None:
        assignment = event.assignment
        if event.incarnation != self.incarnation or self._draining or self._leaving or self._exit:
            return
        refusal = self._refusal(assignment)
        if refusal is None:
            self._accept(assignment, now_s)
        elif refusal:
            self._do(Note("warning", f"refused {assignment.ref}: {refusal}"))
            self._report(assignment, StageStateReport("failed", refusal, "error"))

    def _refusal(self, assignment: Assignment) -> str | None:
        """Return why not; None to accept; empty for a command that was seen before and needs no answer."""
        ref, worker = assignment.ref, self._worker
        if assignment.cluster != self._cluster:
            return f"the assignment is for cluster {assignment.cluster}, this node belongs to {self._cluster}"
        if assignment.node != self._identity:
            return f"the assignment is for node {assignment.node}, this is {self._identity}"
        if assignment.incarnation != self.incarnation:
            return f"the plan knows incarnation {assignment.incarnation} of this node, current {self.incarnation}"
        newest = self._newest.get(ref.job, 0)
        if ref.epoch < newest:
            return f"stale epoch {ref.epoch}, current {newest}"
        if ref.epoch == newest:
            return ""
        busy = worker is not None and not worker.stopping and not worker.ended
        if worker is not None and busy and worker.assignment.ref.job != ref.job:
            return f"the node is busy with {worker.assignment.ref.job}"
        return None

    def _accept(self, assignment: Assignment, now_s: float) -> None:
        self._remember(assignment.ref.job, assignment.ref.epoch)
        if self._worker is None:
            self._start(assignment, now_s)
            return
        if self._waiting is not None:
            self._report(self._waiting, StageStateReport("stopped", f"replaced by epoch {assignment.ref.epoch}"))
        self._waiting = assignment
        reason = f"replaced by epoch {assignment.ref.epoch}"
        self._stop_worker(reason, STOP_GRACE_S, StageStateReport("stopped", reason))

    def _start(self, assignment: Assignment, now_s: float) -> None:
        self._worker = _Worker(assignment, now_s, START_LIMIT_S)
        lease = self._registration.lease if self._registration is not None else Lease(0.0)
        self._do(StartWorker(assignment, lease))

    def _remember(self, job: str, epoch: int) -> None:
        self._newest[job] = max(epoch, self._newest.pop(job, 0))
        if len(self._newest) > REMEMBERED_JOBS:
            self._newest.popitem(last=False)

    def _stop_ordered(self, event: StopOrdered) -> None:
        if event.incarnation != self.incarnation:
            return
        if event.epoch:
            self._remember(event.job, event.epoch)
        stopped = StageStateReport("stopped", event.reason)
        waiting, worker = self._waiting, self._worker
        if waiting is not None and _meant(event, waiting.ref):
            self._waiting = None
            self._report(waiting, stopped)
        if worker is not None and _meant(event, worker.assignment.ref):
            self._stop_worker(event.reason, STOP_GRACE_S, stopped)

    def _ordered(self, event: HoldOrdered | CodecsOrdered, action: Action) -> None:
        """Pass a command on to the worker that it is meant for, while that works."""
        worker = self._worker
        if event.incarnation != self.incarnation or worker is None or worker.stopping or worker.ended:
            return
        if (event.job, event.epoch) == (worker.assignment.ref.job, worker.assignment.ref.epoch):
            self._do(action)

    # ---- the worker ----

    def _stop_worker(self, reason: str, grace_s: float, outcome: StageStateReport) -> None:
        """Ask the worker to end. What is reported of it is the first reason for which it was stopped."""
        worker = self._worker
        if worker is None:
            return
        if not worker.ended and worker.outcome is None:
            worker.outcome = outcome
        worker.stopping = True
        self._do(StopWorker(reason, grace_s, ask=not worker.ended))

    def _worker_reported(self, report: Report, now_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        worker.sign_s, worker.limit_s = now_s, HANG_LIMIT_S
        ref = worker.assignment.ref
        match report:
            case Progress():
                worker.step = max(worker.step, report.step)
                self._note_progress(worker, report, now_s)
            case StageStateReport():
                self._worker_state(worker, report)
            case StateUploaded():
                self._do(ReportStates(report.digest))
            case Unheard():
                if not (worker.muted or worker.ended or worker.stopping):
                    self._unheard(report.quiet_s, now_s)
            case StepReport() | LogEntry():
                if isinstance(report, StepReport):
                    worker.step = max(worker.step, report.step)
                    worker.step_times_s.append(report.step_s)
                if not worker.muted:
                    self._do(ReportMetrics(ref, worker.assignment.incarnation, report))
            case _:
                assert_never(report)

    def _worker_state(self, worker: _Worker, report: StageStateReport) -> None:
        if worker.muted or worker.ended:
            return
        worker.ended = report.state in TERMINAL_STATES
        self._report(worker.assignment, report)
        if worker.ended and not worker.stopping:
            self._stop_worker(f"the stage is {report.state}", END_GRACE_S, report)

    def _note_progress(self, worker: _Worker, report: Progress, now_s: float) -> None:
        """A stage that waits for its peers looks around every second; within an instruction it does not."""
        if report.micro_batches != worker.passes or not report.at_work:
            worker.passes, worker.moved_s = report.micro_batches, now_s

    def _watch_worker(self, now_s: float) -> None:
        worker = self._worker
        if worker is None or worker.stopping:
            return
        if now_s - worker.sign_s >= worker.limit_s:
            self._kill_stuck(worker, f"the worker gave no sign of life for {now_s - worker.sign_s:.0f} s")
        elif worker.passes >= 0 and now_s - worker.moved_s >= _stuck_limit_s(worker):
            self._kill_stuck(worker, f"no progress in one instruction for {now_s - worker.moved_s:.0f} s: it hangs")

    def _kill_stuck(self, worker: _Worker, what: str) -> None:
        detail = f"{what}; the worker was killed"
        self._do(Note("error", detail))
        self._stop_worker(detail, 0.0, StageStateReport("failed", detail, "crash"))
        worker.muted = True

    def _forgive_own_pause(self, now_s: float) -> None:
        """If this process itself did not run, its worker's silence means nothing."""
        gap_s = now_s - self._last_tick_s if self._last_tick_s is not None else 0.0
        self._last_tick_s = now_s
        if self._worker is not None and gap_s > PAUSE_S:
            self._worker.sign_s += gap_s
            self._worker.moved_s += gap_s

    def _worker_exited(self, event: WorkerExited, now_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        self._worker = None
        if self._registration is not None:  # the coordinator need not wait to hear that the node is free
            self._registration.next_heartbeat_s = now_s
        if not worker.ended:
            report = worker.outcome or StageStateReport("failed", event.detail, event.cause)
            self._report(worker.assignment, report)
        if self._registration is not None:
            self._do(ReportStates())
        if self._exit is not None:
            self._do(self._exit)
        elif self._leaving:
            self._go()
        elif self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._start(waiting, now_s)

    def _report(self, assignment: Assignment, report: StageStateReport) -> None:
        self._do(ReportStage(assignment.ref, assignment.incarnation, report))

    # ---- the end ----

    def _signalled(self, event: Signalled) -> None:
        if self._draining or self._leaving or self._exit:
            if self._worker is not None:
                self._do(StopWorker("a second signal", 0.0))
            self._do(Exit(128 + event.number, f"{event.name} again: ended without taking leave"))
            return
        reason = f"the node was asked to end ({event.name})"
        busy = self._waiting is not None or (self._worker is not None and not self._worker.ended)
        if self._registration is not None and busy:
            self._draining = reason
            self._do(Note("info", f"{reason}; its jobs go on without it first, a second signal ends it now"))
            self._do(Drain(self._registration.incarnation, reason))
        else:
            self._take_leave(reason)

    def _drained(self, problem: str) -> None:
        reason, self._draining = self._draining, ""
        if not reason or self._leaving or self._exit:
            return
        if problem:
            self._do(Note("warning", f"leaving though jobs may still need this node: {problem}"))
        self._take_leave(reason)

    def _take_leave(self, reason: str) -> None:
        self._leaving = reason
        self._waiting = None
        if self._worker is None:
            self._go()
        else:
            self._stop_worker(self._leaving, LEAVE_GRACE_S, StageStateReport("stopped", self._leaving))

    def _go(self) -> None:
        """Take leave, if there is somebody to take leave of and nothing runs any more."""
        if self._worker is not None:
            return
        if self._registration is None:
            self._do(Exit(0, f"left: {self._leaving}"))
        else:
            self._do(Leave(self._registration.incarnation, self._leaving))

    def _end(self, how: Exit) -> None:
        """Exit for a reason that waiting will not cure, once the worker is gone."""
        if self._exit is not None:
            return
        self._exit, self._registration, self._waiting = how, None, None
        self._do(Watch(0))
        if self._worker is None:
            self._do(how)
        else:
            self._stop_worker(how.message, FENCE_GRACE_S, StageStateReport("failed", how.message, "lease"))


def _stuck_limit_s(worker: _Worker) -> float:
    """Return how long one instruction may take."""
    times_s = worker.step_times_s
    return max(STUCK_LIMIT_S, STUCK_STEPS * median(times_s)) if times_s else STUCK_FIRST_LIMIT_S


def _meant(event: StopOrdered, ref: StageRef) -> bool:
    return event.job == ref.job and event.epoch in (0, ref.epoch)
