"""The daemon's decisions: leases, fencing, epochs, and what is said of a worker."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node import events as a
from fusion_node.agent import Agent
from fusion_node.events import Assignment, StageRef
from fusion_node.ipc import Lease, LogEntry, Progress, StageStateReport, StateUploaded, StepReport, Unheard

NODE, CLUSTER, JOB = "node-under-test", "cluster-one", "job-aaaaaaaaaa"


def assignment(epoch: int = 1, job: str = JOB, incarnation: int = 7, **changes: str) -> Assignment:
    given_fields = {"cluster": CLUSTER, "node": NODE, **changes}
    return Assignment(StageRef(job, epoch, 0), incarnation=incarnation, payload=b"work", **given_fields)


def registered(at_s: float = 100.0, incarnation: int = 7) -> Agent:
    agent = Agent(CLUSTER, NODE, random.Random(1))
    agent.start()
    agent.handle(a.Registered(incarnation, at_s, heartbeat_s=5.0, self_fence_s=25.0), at_s)
    return agent


def assign(agent: Agent, now_s: float = 101.0, incarnation: int = 7, **kwargs: Any) -> list[a.Action]:
    return agent.handle(a.Assigned(incarnation, assignment(incarnation=incarnation, **kwargs)), now_s)


def training(at_s: float = 100.0) -> Agent:
    agent = registered(at_s)
    assert [type(x) for x in assign(agent, at_s)] == [a.StartWorker]
    agent.handle(a.WorkerReported(StageStateReport("running")), at_s)
    return agent


def only(actions: list[a.Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def reports(actions: list[a.Action]) -> list[tuple[str, int, str, str]]:
    return [(x.ref.job, x.ref.epoch, x.report.state, x.report.cause) for x in only(actions, a.ReportStage)]


def beat(agent: Agent, sent_s: float, now_s: float, incarnation: int = 7) -> list[a.Action]:
    return agent.handle(a.HeartbeatAnswered(incarnation, sent_s), now_s)


# ---- registration ----


def test_registers_at_once_and_backs_off_with_full_jitter_up_to_15_seconds():
    agent = Agent(CLUSTER, NODE, random.Random(0))
    assert agent.start() == [a.Register(0.0)]
    delays = [
        only(agent.handle(a.RegisterFailed("away"), float(second)), a.Register)[0].delay_s for second in range(200)
    ]
    for attempt, delay_s in enumerate(delays):
        assert 0.0 <= delay_s <= min(15.0, 0.5 * 2**attempt)
    assert max(delays) > 12.0  # it does reach the long waits ...
    assert min(delays[10:]) < 2.0  # ... and stays jittered over the whole range


def test_a_final_refusal_ends_the_daemon_with_its_exit_code():
    agent = Agent(CLUSTER, NODE)
    agent.start()
    actions = agent.handle(a.RegisterFailed("memory_bytes is 0", exit_code=10), 1.0)
    assert only(actions, a.Exit) == [a.Exit(10, "memory_bytes is 0")]


def test_heartbeats_every_five_seconds_say_what_runs():
    agent = training(100.0)
    agent.handle(a.WorkerReported(StepReport(step=3)), 101.0)
    sent = []
    for tenth in range(1001, 1112):
        sent += only(agent.handle(a.Tick(), tenth / 10), a.Heartbeat)
        agent.handle(a.WorkerReported(Progress(3, tenth)), tenth / 10)
    assert sent == [a.Heartbeat(7, 1, JOB, 1, 3), a.Heartbeat(7, 2, JOB, 1, 3)]


def test_a_heartbeat_that_says_the_node_is_free_follows_the_end_of_its_work_at_once():
    agent = training(100.0)
    agent.handle(a.WorkerReported(StageStateReport("finished")), 104.0)  # its process still uploads, closes, ends
    assert only(agent.handle(a.Tick(), 105.0), a.Heartbeat) == [a.Heartbeat(7, 1, "", 0, 0)]

    agent = training(100.0)
    agent.handle(a.StopOrdered(7, JOB, 1, "cancelled"), 101.0)
    assert only(agent.handle(a.Tick(), 105.0), a.Heartbeat) == [a.Heartbeat(7, 1, JOB, 1, 0)]
    agent.handle(a.WorkerExited("crash", "it was stopped"), 106.0)
    assert only(agent.handle(a.Tick(), 106.5), a.Heartbeat) == [a.Heartbeat(7, 2, "", 0, 0)]
    assert only(agent.handle(a.Tick(), 107.0), a.Heartbeat) == []


# ---- the lease ----


def test_the_lease_counts_from_when_the_answered_heartbeat_was_sent():
    agent = training(100.0)
    beat(agent, sent_s=105.0, now_s=108.9)
    for now_s in (110.0, 120.0, 129.9):
        agent.handle(a.WorkerReported(Progress(0, 0)), now_s)
        assert only(agent.handle(a.Tick(), now_s), a.StopWorker) == []
    stopped = agent.handle(a.Tick(), 130.0)
    assert [x.grace_s <= 5.0 for x in only(stopped, a.StopWorker)] == [True]  # others may take over 5 s later
    assert len(only(stopped, a.Register)) == 1
    assert agent.incarnation == 0


def test_the_stage_is_reported_as_lost_lease_once_its_worker_is_gone():
    agent = training(100.0)
    assert reports(agent.handle(a.Tick(), 125.0)) == []
    gone = agent.handle(a.WorkerExited("crash", "killed by signal 9"), 126.0)
    assert reports(gone) == [(JOB, 1, "failed", "lease")]
    assert "no answered heartbeat for 25 s" in only(gone, a.ReportStage)[0].report.detail


def test_what_a_fenced_worker_still_says_does_not_count():
    agent = training(100.0)
    agent.handle(a.Tick(), 125.0)
    assert agent.handle(a.WorkerReported(StageStateReport("finished", weights_digest="00")), 125.1) == []
    assert agent.handle(a.WorkerReported(StepReport(step=4)), 125.2) == []


def test_an_answer_that_comes_after_the_lease_ended_does_not_bring_it_back():
    agent = training(100.0)
    actions = beat(agent, sent_s=110.0, now_s=136.0)
    assert len(only(actions, a.StopWorker)) == 1
    assert agent.incarnation == 0


def test_an_older_answer_never_shortens_the_lease():
    agent = training(100.0)
    beat(agent, sent_s=110.0, now_s=110.1)
    beat(agent, sent_s=105.0, now_s=110.2)
    assert agent.handle(a.WorkerReported(Progress(0, 0)), 134.0) == []
    assert only(agent.handle(a.Tick(), 134.9), a.StopWorker) == []


def test_f15_a_pause_of_ten_seconds_changes_nothing():
    agent = training(100.0)
    agent.handle(a.Tick(), 100.5)
    actions = agent.handle(a.Tick(), 110.5)
    assert [type(x) for x in actions] == [a.Heartbeat]


def test_f15b_after_a_pause_of_thirty_seconds_the_node_knows_that_its_lease_is_over():
    agent = training(100.0)
    agent.handle(a.Tick(), 100.5)
    actions = assign(agent, now_s=130.5, epoch=2)  # whatever comes first after the pause
    assert only(actions, a.StartWorker) == []
    assert len(only(actions, a.StopWorker)) == len(only(actions, a.Register)) == 1


def test_a_registration_that_the_coordinator_no_longer_knows_is_made_anew():
    agent = training(100.0)
    actions = agent.handle(a.RegistrationLost(7, "unknown incarnation"), 103.0)
    assert [type(x) for x in actions] == [a.Note, a.Watch, a.StopWorker, a.Register]
    assert agent.handle(a.RegistrationLost(6, "late answer to an older call"), 103.1) == []
    agent.handle(a.Registered(8, 104.0, 5.0, 25.0), 104.1)
    assert agent.incarnation == 8


def test_a_new_stage_waits_until_the_fenced_worker_is_gone():
    agent = training(100.0)
    agent.handle(a.Tick(), 125.0)
    agent.handle(a.Registered(8, 126.0, 5.0, 25.0), 126.1)
    actions = agent.handle(a.Assigned(8, assignment(epoch=2, incarnation=8)), 126.2)
    assert only(actions, a.StartWorker) == []
    exited = agent.handle(a.WorkerExited("crash", "killed"), 126.5)
    assert reports(exited) == [(JOB, 1, "failed", "lease")]
    assert [x.assignment.ref.epoch for x in only(exited, a.StartWorker)] == [2]


# ---- commands ----


def test_a_stale_epoch_is_refused():
    agent = registered()
    assign(agent, epoch=5)
    actions = assign(agent, epoch=4)
    assert reports(actions) == [(JOB, 4, "failed", "error")]
    assert only(actions, a.ReportStage)[0].report.detail == "stale epoch 4, current 5"


def test_the_same_command_twice_starts_one_worker():
    agent = registered()
    assert len(only(assign(agent), a.StartWorker)) == 1
    assert assign(agent) == []


def test_a_newer_epoch_replaces_the_worker_and_starts_only_after_it_is_gone():
    agent = training()
    actions = assign(agent, epoch=2)
    assert [type(x) for x in actions] == [a.StopWorker]
    exited = agent.handle(a.WorkerExited("crash", "exit code 0"), 103.0)
    assert reports(exited) == [(JOB, 1, "stopped", "")]
    assert [x.assignment.ref.epoch for x in only(exited, a.StartWorker)] == [2]


def test_of_two_newer_epochs_only_the_newest_starts():
    agent = training()
    assign(agent, epoch=2)
    assert reports(assign(agent, epoch=3)) == [(JOB, 2, "stopped", "")]
    exited = agent.handle(a.WorkerExited("crash", "exit code 0"), 103.0)
    assert [x.assignment.ref.epoch for x in only(exited, a.StartWorker)] == [3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": "cluster-two"}, "cluster-two"),
        ({"node": "somebody-else"}, "somebody-else"),
        ({"incarnation": 6}, "incarnation 6"),
    ],
)
def test_work_for_somebody_else_is_refused(changes: dict[str, Any], reason: str):
    agent = registered()
    actions = agent.handle(a.Assigned(7, assignment(**changes)), 101.0)
    assert only(actions, a.StartWorker) == []
    assert reason in only(actions, a.ReportStage)[0].report.detail


def test_a_command_received_under_an_older_registration_is_ignored():
    agent = registered()
    assert agent.handle(a.Assigned(6, assignment(incarnation=6)), 101.0) == []
    assert agent.handle(a.StopOrdered(6, JOB, 0, "cancelled"), 101.0) == []


def test_a_second_job_is_refused_while_one_runs():
    agent = training()
    actions = assign(agent, job="job-bbbbbbbbbb")
    assert reports(actions) == [("job-bbbbbbbbbb", 1, "failed", "error")]
    assert "busy with job-aaaaaaaaaa" in only(actions, a.ReportStage)[0].report.detail


def test_a_second_job_waits_for_the_worker_of_one_that_is_over():
    agent = training()
    agent.handle(a.WorkerReported(StageStateReport("finished", weights_digest="00")), 102.0)
    assert only(assign(agent, job="job-bbbbbbbbbb"), a.StartWorker) == []
    exited = agent.handle(a.WorkerExited("crash", "exit code 0"), 103.0)
    assert [x.assignment.ref.job for x in only(exited, a.StartWorker)] == ["job-bbbbbbbbbb"]
    assert reports(exited) == []


def test_a_stop_ends_the_worker_and_says_stopped():
    agent = training()
    actions = agent.handle(a.StopOrdered(7, JOB, 1, "cancelled by its owner"), 102.0)
    assert actions == [a.StopWorker("cancelled by its owner", 10.0)]
    assert reports(agent.handle(a.WorkerExited("crash", "killed by signal 15"), 103.0)) == [(JOB, 1, "stopped", "")]


def test_a_stop_for_another_epoch_or_job_leaves_the_worker_alone():
    agent = registered()
    assign(agent, epoch=2)
    assert agent.handle(a.StopOrdered(7, JOB, 1, "late"), 102.0) == []
    assert agent.handle(a.StopOrdered(7, "job-bbbbbbbbbb", 0, "other"), 102.0) == []


def test_a_stop_that_overtakes_its_assignment_wins():
    agent = registered()
    agent.handle(a.StopOrdered(7, JOB, 1, "cancelled"), 101.0)
    assert only(assign(agent, epoch=1), a.StartWorker) == []


def test_a_stop_also_ends_what_waits_to_start():
    agent = training()
    assign(agent, epoch=2)
    actions = agent.handle(a.StopOrdered(7, JOB, 2, "cancelled"), 102.0)
    assert reports(actions) == [(JOB, 2, "stopped", "")]
    assert only(agent.handle(a.WorkerExited("crash", "x"), 103.0), a.StartWorker) == []


# ---- the worker ----


def test_states_figures_and_logs_of_the_worker_are_passed_on():
    agent = training()
    assert reports(agent.handle(a.WorkerReported(StageStateReport("ready")), 101.0)) == [(JOB, 1, "ready", "")]
    step, line = StepReport(step=1, loss=float("nan")), LogEntry("info", "fetching data")
    ref = StageRef(JOB, 1, 0)
    assert agent.handle(a.WorkerReported(step), 102.0) == [a.ReportMetrics(ref, 7, step)]
    assert agent.handle(a.WorkerReported(line), 102.0) == [a.ReportMetrics(ref, 7, line)]


def test_a_crash_is_reported_with_how_it_ended():
    agent = training()
    actions = agent.handle(a.WorkerExited("out-of-memory", "worker killed by the kernel: out of memory"), 102.0)
    assert reports(actions) == [(JOB, 1, "failed", "out-of-memory")]


def test_a_finished_worker_is_let_end_by_itself_and_reported_once():
    agent = training()
    actions = agent.handle(a.WorkerReported(StageStateReport("finished", weights_digest="00")), 102.0)
    assert reports(actions) == [(JOB, 1, "finished", "")]
    assert [x.ask for x in only(actions, a.StopWorker)] == [False]  # only the deadline to be gone
    assert reports(agent.handle(a.WorkerExited("crash", "exit code 1"), 103.0)) == []


def test_f18_a_worker_without_a_sign_of_life_is_killed_and_reported():
    agent = training(100.0)
    now_s = 100.0
    actions: list[a.Action] = []
    while not only(actions, a.StopWorker):
        now_s += 0.5
        beat(agent, now_s, now_s)
        actions = agent.handle(a.Tick(), now_s)
        assert now_s < 125.0
    assert 119.5 <= now_s <= 121.0
    assert only(actions, a.StopWorker)[0].grace_s == 0.0
    gone = agent.handle(a.WorkerExited("crash", "worker killed by signal 9 (out of memory?)"), now_s)
    assert reports(gone) == [(JOB, 1, "failed", "crash")]
    assert "no sign of life" in only(gone, a.ReportStage)[0].report.detail


def test_a_worker_may_take_two_minutes_to_come_up():
    agent = registered(100.0)
    assign(agent, now_s=100.0)
    for half_seconds in range(1, 239):
        now_s = 100.0 + half_seconds / 2
        beat(agent, now_s, now_s)
        assert only(agent.handle(a.Tick(), now_s), a.StopWorker) == []


def test_the_workers_silence_means_nothing_while_the_daemon_itself_did_not_run():
    agent = training(100.0)
    agent.handle(a.Tick(), 100.5)
    assert only(agent.handle(a.Tick(), 122.5), a.StopWorker) == []
    beat(agent, 123.0, 123.0)
    assert only(agent.handle(a.Tick(), 123.0), a.StopWorker) == []


# ---- the end ----


def test_f31_a_signal_without_a_worker_takes_leave_and_exits_zero():
    agent = registered()
    (leave,) = agent.handle(a.Signalled(15, "SIGTERM"), 101.0)
    assert isinstance(leave, a.Leave)
    assert leave.incarnation == 7
    assert only(agent.handle(a.Left(), 101.2), a.Exit)[0].code == 0


def test_f31_a_signal_lets_the_jobs_go_on_first_and_then_takes_leave():
    agent = training()
    assert [type(x) for x in agent.handle(a.Signalled(15, "SIGTERM"), 101.0)] == [a.Note, a.Drain]
    agent.handle(a.WorkerReported(StageStateReport("held", step=5)), 101.5)
    assert assign(agent, 101.6, epoch=2) == []
    assert only(agent.handle(a.WorkerExited("", ""), 102.0), a.Leave) == []
    beat(agent, 105.0, 105.0)
    assert len(only(agent.handle(a.Drained(), 106.0), a.Leave)) == 1
    assert only(agent.handle(a.Left(), 106.2), a.Exit)[0].code == 0


def test_f31_a_node_that_was_waited_for_in_vain_stops_its_worker_and_reports_it():
    agent = training()
    agent.handle(a.Signalled(15, "SIGTERM"), 101.0)
    actions = agent.handle(a.Drained("not within 120 s: stage 0 of a job"), 102.0)
    assert [type(x) for x in actions] == [a.Note, a.StopWorker]
    assert only(actions, a.StopWorker)[0].grace_s <= 5.0
    gone = agent.handle(a.WorkerExited("crash", "exit code 0"), 102.0)
    assert reports(gone) == [(JOB, 1, "stopped", "")]
    assert len(only(gone, a.Leave)) == 1


def test_f31_a_node_that_loses_its_lease_while_it_waits_leaves_without_a_word():
    agent = training()
    agent.handle(a.Signalled(15, "SIGTERM"), 101.0)
    lost = agent.handle(a.RegistrationLost(7, "unknown"), 102.0)
    assert len(only(lost, a.StopWorker)) >= 1
    assert only(agent.handle(a.WorkerExited("crash", "killed"), 103.0), a.Exit)[0].code == 0


def test_f31_a_second_signal_means_now():
    agent = training()
    agent.handle(a.Signalled(15, "SIGTERM"), 101.0)
    actions = agent.handle(a.Signalled(2, "SIGINT"), 101.1)
    assert only(actions, a.StopWorker)[0].grace_s == 0.0
    assert only(actions, a.Exit)[0].code == 130


def test_a_signal_before_the_node_is_registered_exits_at_once():
    agent = Agent(CLUSTER, NODE)
    agent.start()
    assert only(agent.handle(a.Signalled(15, "SIGTERM"), 1.0), a.Exit)[0].code == 0


def test_nothing_is_accepted_while_the_node_leaves():
    agent = training()
    agent.handle(a.Signalled(15, "SIGTERM"), 101.0)
    assert assign(agent, epoch=2) == []


@pytest.mark.parametrize(
    "event", [a.AccessRefused("certificate expired 3 s ago"), a.HeartbeatAnswered(7, 101.0, frozenset({NODE}))]
)
def test_a_node_that_may_not_take_part_kills_its_worker_and_exits_20(event: a.Event):
    agent = training()
    assert len(only(agent.handle(event, 101.0), a.StopWorker)) == 1
    assert only(agent.handle(a.WorkerExited("crash", "killed"), 102.0), a.Exit)[0].code == 20


def test_the_revocation_of_another_node_is_not_ours():
    agent = training()
    assert agent.handle(a.HeartbeatAnswered(7, 101.0, frozenset({"another"})), 101.0) == [
        a.LeaseWorker(Lease(126.0, 101.0, 25.0))
    ]


# ---- whatever happens ----

JOBS = ("job-aaaaaaaaaa", "job-bbbbbbbbbb")
EVENTS = st.one_of(
    st.just(("tick",)),
    st.just(("answered",)),
    st.just(("register",)),
    st.just(("lost",)),
    st.just(("exited",)),
    st.tuples(st.just("assign"), st.sampled_from(JOBS), st.integers(1, 5)),
    st.tuples(st.just("stop"), st.sampled_from(JOBS), st.integers(0, 5)),
    st.tuples(st.just("state"), st.sampled_from(["running", "finished", "failed", "held"])),
)


class Model:
    """Plays driver and coordinator, and checks what must hold after every action."""

    def __init__(self) -> None:
        self.agent = Agent(CLUSTER, NODE, random.Random(3))
        self.agent.start()
        self.now_s, self.lease_from_s, self.incarnation = 0.0, 0.0, 0
        self.worker: StageRef | None = None
        self.stop_ordered = False
        self.started: dict[str, int] = {}
        self.ended: set[StageRef] = set()

    def step(self, gap_s: float, what: tuple[Any, ...]) -> None:
        self.now_s += gap_s
        event = self.event(what)
        if event is None:
            return
        had_worker = self.worker
        if isinstance(event, a.WorkerExited):
            self.worker = None
        for action in self.agent.handle(event, self.now_s):
            self.check(action)
        lease_over = self.agent.incarnation == 0 or self.now_s - self.lease_from_s >= 25.0
        if self.worker is not None and self.worker == had_worker and lease_over:
            assert self.stop_ordered, "a worker runs on although the lease is over"

    def event(self, what: tuple[Any, ...]) -> a.Event | None:
        match what:
            case ("tick",):
                return a.Tick()
            case ("answered",):
                self.lease_from_s = self.now_s if self.agent.incarnation else self.lease_from_s
                return a.HeartbeatAnswered(self.incarnation, self.now_s)
            case ("register",) if self.agent.incarnation == 0:
                self.incarnation += 1
                self.lease_from_s = self.now_s
                return a.Registered(self.incarnation, self.now_s, 5.0, 25.0)
            case ("lost",):
                return a.RegistrationLost(self.incarnation, "lost")
            case ("exited",) if self.worker is not None:
                return a.WorkerExited("crash", "exit code 1")
            case ("assign", job, epoch):
                made = assignment(epoch=epoch, job=job, incarnation=self.incarnation)
                return a.Assigned(self.incarnation, made)
            case ("stop", job, epoch):
                return a.StopOrdered(self.incarnation, job, epoch, "cancelled")
            case ("state", state) if self.worker is not None:
                return a.WorkerReported(StageStateReport(state))
        return None

    def check(self, action: a.Action) -> None:
        match action:
            case a.StartWorker(assignment=made):
                assert self.worker is None, "two workers at a time"
                assert made.ref.epoch > self.started.get(made.ref.job, 0), "an older epoch was started"
                assert made.incarnation == self.agent.incarnation, "started for a registration that is over"
                self.started[made.ref.job] = made.ref.epoch
                self.worker, self.stop_ordered = made.ref, False
            case a.StopWorker():
                self.stop_ordered = True
            case a.ReportStage(ref=ref, report=report) if report.state in ("finished", "failed", "stopped", "held"):
                ours = ref.epoch <= self.started.get(ref.job, 0) and "stale" not in report.detail
                assert not (ours and ref in self.ended), "two ends of one stage"
                if ours and "busy" not in report.detail:
                    self.ended.add(ref)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 5.0, 12.0, 26.0]), EVENTS), max_size=40))
def test_never_two_workers_never_an_older_epoch_never_a_worker_without_a_lease(script: list[Any]):
    model = Model()
    model.step(0.0, ("register",))
    for gap_s, what in script:
        model.step(gap_s, what)


def at_work(agent: Agent, passes: int, now_s: float) -> list[a.Action]:
    agent.handle(a.WorkerReported(Progress(3, passes, at_work=True)), now_s)
    return agent.handle(a.Tick(), now_s)


def test_f17_a_worker_that_hangs_within_one_instruction_is_killed_though_it_gives_signs_of_life() -> None:
    agent = training()
    agent.handle(a.WorkerReported(StepReport(step=3, step_s=1.0)), 101.0)
    for second in range(101, 122):
        beat(agent, second, second)
        killed = [action for action in at_work(agent, 40, second) if isinstance(action, a.StopWorker)]
        assert bool(killed) == (second == 121)
    assert killed[0].grace_s == 0.0
    (report,) = [x for x in agent.handle(a.WorkerExited("crash", "signal 9"), 122.0) if isinstance(x, a.ReportStage)]
    assert (report.report.state, report.report.cause) == ("failed", "crash")
    assert "no progress in one instruction for 20 s" in report.report.detail


@pytest.mark.parametrize("why", ["it waits for its peers", "its steps are long", "it is not at work", "its first step"])
def test_a_worker_is_not_taken_for_hanging_because(why: str) -> None:
    agent = training()
    if why != "its first step":
        agent.handle(a.WorkerReported(StepReport(step=3, step_s=9.0 if why == "its steps are long" else 1.0)), 101.0)
    for second in range(101, 180):
        beat(agent, second, second)
        passes = second if why == "it waits for its peers" else 40
        agent.handle(a.WorkerReported(Progress(3, passes, at_work=why != "it is not at work")), second)
        assert not [action for action in agent.handle(a.Tick(), second) if isinstance(action, a.StopWorker)]


def test_the_worker_knows_until_when_its_node_may_speak_for_it() -> None:
    agent = registered()
    (start,) = assign(agent)
    assert isinstance(start, a.StartWorker)
    assert start.lease == Lease(125.0, 100.0, 25.0)
    assert agent.handle(a.HeartbeatAnswered(7, 105.0), 106.0) == [a.LeaseWorker(Lease(130.0, 105.0, 25.0))]


def test_states_are_reported_when_a_worker_has_ended_and_when_one_was_uploaded() -> None:
    agent = training()
    assert agent.handle(a.WorkerReported(StateUploaded("ab" * 32, 9, 4)), 101.0) == [a.ReportStates("ab" * 32)]
    ended = agent.handle(a.WorkerExited("crash", "signal 9"), 102.0)
    assert [type(action) for action in ended] == [a.ReportStage, a.ReportStates]
    agent = Agent(CLUSTER, NODE, random.Random(1))
    agent.start()
    assert a.ReportStates() in agent.handle(a.Registered(8, 100.0, 5.0, 25.0), 100.0)


# ---- the coordinator away ----


def training_with_grace(grace_s: float) -> Agent:
    agent = Agent(CLUSTER, NODE, random.Random(1))
    agent.start()
    agent.handle(a.Registered(7, 100.0, 5.0, 25.0, grace_s), 100.0)
    assign(agent, 100.0)
    agent.handle(a.WorkerReported(StageStateReport("running")), 100.0)
    return agent


def goes_on_until(agent: Agent, first_s: int, last_s: int, heard_until_s: int) -> int:
    """Return in which second the agent gives up its registration, while no stage has contact until `heard_until_s`."""
    for second in range(first_s, last_s):
        reports = [Unheard(second - 100.0)] * (second <= heard_until_s) + [Progress(1, second, at_work=True)]
        actions = [action for one in reports for action in agent.handle(a.WorkerReported(one), second)]
        if only(actions + agent.handle(a.Tick(), second), a.Register):
            return second
    return last_s


def test_while_no_stage_has_contact_a_node_goes_on_for_as_long_as_the_grace():
    assert goes_on_until(training_with_grace(900.0), 101, 1100, heard_until_s=2000) == 1000
    assert goes_on_until(training_with_grace(0.0), 101, 1100, heard_until_s=2000) == 125


def test_once_some_stage_may_have_contact_the_lease_ends_within_seconds():
    assert goes_on_until(training_with_grace(900.0), 101, 300, heard_until_s=200) == 205
    assert goes_on_until(training_with_grace(900.0), 101, 300, heard_until_s=111) == 125  # too early to tell


def test_the_worker_hears_of_the_longer_lease_and_the_operator_once():
    agent = training_with_grace(900.0)
    assert agent.handle(a.WorkerReported(Unheard(12.4)), 112.4) == []
    said, lease = agent.handle(a.WorkerReported(Unheard(22.0)), 122.0)
    assert isinstance(said, a.Note)
    assert "no stage of the job has contact" in said.text
    assert lease == a.LeaseWorker(Lease(127.0, 100.0, 25.0))
    assert agent.handle(a.WorkerReported(Unheard(23.0)), 123.0) == [a.LeaseWorker(Lease(128.0, 100.0, 25.0))]
    said, lease = agent.handle(a.HeartbeatAnswered(7, 124.0), 124.0)
    assert isinstance(said, a.Note)
    assert lease == a.LeaseWorker(Lease(149.0, 124.0, 25.0))


def test_a_worker_that_is_being_stopped_has_no_say():
    agent = training_with_grace(900.0)
    agent.handle(a.StopOrdered(7, JOB, 1, "enough"), 110.0)
    assert agent.handle(a.WorkerReported(Unheard(22.0)), 122.0) == []
