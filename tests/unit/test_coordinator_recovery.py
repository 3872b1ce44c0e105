"""Whether, from which step, and with which nodes a broken job goes on: every case by itself."""

from __future__ import annotations

from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from fusion.base.ids import JobId, NodeId
from fusion.wire.v1 import job_pb2, plan_pb2
from fusion_coordinator.decide import pausing, recovery, scheduling
from fusion_coordinator.decide.failures import Verdict
from fusion_coordinator.keptstates import KeptState
from fusion_coordinator.liveness import Presence
from fusion_coordinator.state import State, apply, apply_all
from fusion_coordinator.state.events import (
    CheckpointCommitted,
    CheckpointDropped,
    JobBroke,
    JobEnded,
    JobHolds,
    JobPaused,
    JobPlanned,
    JobRestored,
    JobResumed,
    JobSubmitted,
    NodeDrains,
    NodeGone,
    NodeRegistered,
    StageMoved,
)
from fusion_coordinator.state.jobs import TransitionError
from fusion_coordinator.state.records import (
    CheckpointRecord,
    HardwareRecord,
    JobState,
    NodeState,
    PastRecord,
    Pause,
    ResumeRecord,
    StageRecord,
    StageState,
    TroubleRecord,
    WeightsRecord,
)

HARDWARE = HardwareRecord("cpu", "CPU", 1000, 1e10, 4, "linux", "3.11", "2.13.0", "0.1.0")
A, B, C = (NodeId(letter * 20) for letter in "abc")
JOB = JobId("job-aaaaaaaaaa")
SPEC = job_pb2.JobSpec(checkpoint_every_steps=10)
PLAN = plan_pb2.Plan(
    epoch=1,
    stages=[
        plan_pb2.Stage(node_id=A, node_name="a", memory_bytes=500, memory_limit_bytes=1000),
        plan_pb2.Stage(node_id=B, node_name="b", memory_bytes=2000, memory_limit_bytes=1000),
    ],
)


def blob(number: int) -> WeightsRecord:
    return WeightsRecord(f"{number:064x}", 100)


def stages(*nodes: NodeId) -> tuple[StageRecord, ...]:
    return tuple(StageRecord(node, node[0], "abc".index(node[0]) + 1) for node in nodes)


RUNNING = apply_all(
    [
        *(
            NodeRegistered(1.0, node, node[0], "10.0.0.1:7445", "10.0.0.1", HARDWARE, number)
            for number, node in enumerate((A, B, C), 1)
        ),
        JobSubmitted(1.0, JOB, "o", "gpt", SPEC.SerializeToString(), 100),
        JobPlanned(2.0, JOB, 1, PLAN.SerializeToString(), stages(A, B)),
        StageMoved(3.0, JOB, 1, 0, StageState.READY),
        StageMoved(3.0, JOB, 1, 1, StageState.READY),
    ],
    State(),
)
BROKEN = apply(JobBroke(4.0, JOB, "node b (stage 1) was lost"), RUNNING)


def job(state: State):
    return state.jobs[JOB]


def kept(stage: int, step: int, number: int, epoch: int = 1, uploaded: bool = False) -> KeptState:
    return KeptState(JOB, epoch, stage, step, blob(number).digest, 100, uploaded)


def cut(state: State, by_node, stored=(), told=None):
    found = recovery.best_cut(job(state), by_node, {blob(number).digest for number in stored}, told)
    return found.step, found.origin, [part.state for part in found.parts], [part.holders for part in found.parts]


# ---- from which step ----


def test_the_latest_step_of_which_every_stage_is_kept_somewhere_is_taken():
    by_node = {A: [kept(0, 6, 60), kept(0, 7, 70), kept(1, 6, 61)], C: [kept(1, 5, 51)]}
    assert cut(BROKEN, by_node) == (6, "kept", [blob(60), blob(61)], [(A,), (A,)])


def test_a_holder_serves_for_a_stage_whose_node_died_and_what_is_stored_needs_no_holder():
    by_node = {A: [kept(0, 7, 70), kept(1, 7, 71)], C: [kept(1, 7, 71)]}
    assert cut(BROKEN, by_node) == (7, "kept", [blob(70), blob(71)], [(A,), (A, C)])
    assert cut(BROKEN, by_node, stored=[70]) == (7, "kept", [blob(70), blob(71)], [(), (A, C)])


@pytest.mark.parametrize(("told", "step"), [(9, 9), (8, 8), (7, 7), (6, 9)])
def test_up_to_two_steps_are_done_again_when_their_losses_died_with_their_nodes(told: int, step: int):
    by_node = {A: [kept(stage, at, 10 * at + stage) for stage in (0, 1) for at in (2, 7, 8, 9)]}
    assert cut(BROKEN, by_node, told=told)[0] == step


def test_states_of_other_epochs_do_not_count():
    by_node = {A: [kept(0, 9, 90, epoch=2), kept(1, 9, 91, epoch=2), kept(0, 3, 30), kept(1, 3, 31)]}
    assert cut(BROKEN, by_node)[:2] == (3, "kept")
    assert cut(BROKEN, {A: [kept(0, 3, 30, epoch=0), kept(1, 3, 31, epoch=0)]})[:2] == (0, "start")


def test_an_epoch_that_kept_nothing_goes_back_to_what_it_began_with():
    resumed = replace(BROKEN, jobs={JOB: replace(job(BROKEN), resume=ResumeRecord(4, (blob(1), blob(2))))})
    assert cut(resumed, {A: [kept(0, 5, 50)]}, stored=[1, 2]) == (4, "resume", [blob(1), blob(2)], [(), ()])
    assert cut(resumed, {A: [kept(0, 5, 50), kept(1, 5, 51)]}, stored=[1, 2])[:2] == (5, "kept")
    assert cut(resumed, {}, stored=[1])[:2] == (0, "start")  # half of it is no start


def test_the_last_whole_checkpoint_serves_when_a_stage_is_kept_nowhere():
    checkpoints = tuple(CheckpointRecord(step, 1, 0.0, (blob(step), blob(step + 1))) for step in (10, 20))
    state = replace(BROKEN, jobs={JOB: replace(job(BROKEN), checkpoints=checkpoints)})
    assert cut(state, {A: [kept(0, 25, 250)]}, stored=[10, 11, 20, 21])[:2] == (20, "checkpoint")
    assert cut(state, {A: [kept(0, 25, 250)]}, stored=[10, 11, 20])[:2] == (10, "checkpoint")
    both = {A: [kept(0, 25, 250), kept(1, 25, 251)]}
    assert cut(state, both, stored=[10, 11, 20, 21])[:2] == (25, "kept")


def test_stages_that_held_for_a_move_count_with_what_they_uploaded():
    held = StageMoved(5.0, JOB, 1, 0, StageState.HELD, step=8, held=blob(80))
    state = apply(held, BROKEN)
    assert cut(state, {A: [kept(1, 8, 81)]}, stored=[80]) == (8, "kept", [blob(80), blob(81)], [(), (A,)])


# ---- whether it goes on ----


def test_what_the_job_itself_caused_fails_it_and_lost_nodes_never_do():
    wrong = recovery.broke(job(RUNNING), Verdict("bad token", "error", 1), 7, 5.0)
    assert wrong == JobEnded(5.0, JOB, JobState.FAILED, "bad token")
    for cause in ("node-lost", "peer-lost", "lease", "stopped"):
        assert recovery.broke(job(RUNNING), Verdict("why", cause, 1), 7, 5.0) == JobBroke(5.0, JOB, "why")


def test_the_same_failure_again_and_again_without_a_step_ends_the_job_and_with_steps_does_not():
    def after(steps):
        troubles = tuple(TroubleRecord(B, "b", "crash", step) for step in steps)
        return recovery.broke(replace(job(RUNNING), troubles=troubles), Verdict("it crashed", "crash", 1), 7, 5.0)

    last = after([7, 7, 7, 7])
    assert isinstance(last, JobEnded)
    assert last.reason == "it crashed; given up after 5 failures in a row without a step done"
    assert isinstance(after([7, 7, 7]), JobBroke)
    assert isinstance(after([7, 7, 6, 7, 7, 7]), JobBroke)


def test_f27_out_of_memory_lowers_what_plans_may_give_the_node_and_does_so_each_time():
    event = recovery.broke(job(RUNNING), Verdict("out of memory", "out-of-memory", 1), 7, 5.0)
    assert event.limit_bytes == 900  # of 1000 that it had, not of 2000 that the plan thought
    state = apply(event, RUNNING)
    assert job(state).limits == {B: 900}
    fit, remarks = recovery.fit_for(job(state), list(state.nodes.values()))
    assert [node.hardware.memory_bytes for node in fit] == [1000, 900, 1000]
    assert remarks == []


def test_a_node_is_avoided_after_the_same_trouble_in_a_row_and_not_for_mixed_ones():
    def avoided(*causes):
        troubles = tuple(TroubleRecord(B, "b", cause, 1) for cause in causes)
        return recovery.avoided(replace(job(RUNNING), troubles=troubles))

    assert avoided("crash", "crash") == {}
    assert avoided("crash", "crash", "crash") == {B: "crash 3 times in a row"}
    assert avoided("crash", "stuck", "crash", "crash") == {}
    assert avoided("device", "device") == {B: "device 2 times in a row"}
    assert avoided(*["out-of-memory"] * 5) == {}


# ---- the states of a job ----


def test_a_broken_job_is_restored_and_planned_anew_and_what_came_after_the_step_is_forgotten():
    state = apply(JobRestored(5.0, JOB, 6, (blob(60), blob(61)), 2), BROKEN)
    assert (job(state).state, job(state).stages, job(state).wants_plan) == (JobState.RECOVERING, (), True)
    assert job(state).resume == ResumeRecord(6, (blob(60), blob(61)))
    assert job(state).past == (PastRecord(6, 2),)
    state = apply(JobPlanned(6.0, JOB, 2, b"", stages(A, C)), state)
    assert (job(state).state, job(state).recovery.lost, job(state).recovery.step) == (JobState.STARTING, 2, 6)
    state = apply_all([StageMoved(7.0, JOB, 2, stage, StageState.READY) for stage in (0, 1)], state)
    assert (job(state).state, job(state).recovery) == (JobState.RUNNING, None)


def test_going_back_beyond_earlier_plans_forgets_those_and_keeps_how_many_stages_reported_a_step():
    past = (PastRecord(10, 2), PastRecord(20, 3))
    broken = replace(BROKEN, jobs={JOB: replace(job(BROKEN), past=past)})

    def after(step):
        states = (blob(1),) if step else ()
        return job(apply(JobRestored(5.0, JOB, step, states, 0), broken)).past

    assert after(25) == (*past, PastRecord(25, 2))
    assert after(15) == (PastRecord(10, 2), PastRecord(15, 3))
    assert after(10) == (PastRecord(10, 2),)
    assert after(0) == ()


def test_a_second_break_before_it_ran_again_counts_as_the_same_recovery():
    state = apply(JobRestored(5.0, JOB, 6, (blob(60), blob(61)), 2), BROKEN)
    state = apply(JobPlanned(6.0, JOB, 2, b"", stages(A, C)), state)
    state = apply(JobBroke(8.0, JOB, "again"), state)
    assert (job(state).recovery.since_wall_s, job(state).recovery.lost) == (4.0, 2)
    state = apply(JobRestored(9.0, JOB, 6, (blob(60), blob(61)), 0), state)
    assert (job(state).recovery.lost, job(state).epoch) == (2, 2)


def test_workers_that_end_late_are_noted_and_all_finished_is_success_even_then():
    state = apply(StageMoved(5.0, JOB, 1, 0, StageState.STOPPED), BROKEN)
    assert job(state).stages[0].state is StageState.STOPPED
    with pytest.raises(TransitionError):
        apply(StageMoved(5.0, JOB, 1, 1, StageState.RUNNING), BROKEN)
    done = [StageMoved(5.0, JOB, 1, stage, StageState.FINISHED, weights=blob(stage)) for stage in (0, 1)]
    assert job(apply_all(done, BROKEN)).state is JobState.SUCCEEDED


def test_a_job_without_a_plan_pauses_and_a_plan_takes_it_out_of_that():
    state = apply(JobRestored(5.0, JOB, 0, (), 3), BROKEN)
    state = apply(JobPaused(6.0, JOB, "no nodes"), state)
    assert (job(state).state, job(state).reason, job(state).wants_plan) == (JobState.PAUSED, "no nodes", True)
    assert job(apply(JobPlanned(7.0, JOB, 2, b"", stages(A)), state)).state is JobState.STARTING


def test_a_broken_job_goes_before_paused_and_queued_ones():
    other, last = JobId("job-bbbbbbbbbb"), JobId("job-cccccccccc")
    state = apply(JobRestored(5.0, JOB, 0, (), 0), BROKEN)
    state = apply_all([JobSubmitted(0.1, other, "o", "x", b"", 1), JobSubmitted(0.2, last, "o", "x", b"", 1)], state)
    state = apply(JobPaused(6.0, last, "no nodes"), state)
    assert [item.job for item in scheduling.waiting(state)] == [JOB, last, other]


# ---- pausing, resuming, draining ----


def test_pausing_holds_at_a_steps_end_and_is_left_only_by_the_owner():
    (event,) = pausing.pause(job(RUNNING), "its owner", 4.0)
    assert event == JobHolds(4.0, JOB, Pause.OWNER, "paused by its owner")
    state = apply(event, RUNNING)
    assert pausing.pause(job(state), "its owner", 4.0) == []
    held = [StageMoved(5.0, JOB, 1, stage, StageState.HELD, step=9, held=blob(stage)) for stage in (0, 1)]
    state = apply_all(held, state)
    assert (job(state).state, job(state).wants_plan) == (JobState.PAUSED, False)
    event = pausing.resume(job(state), None, 6.0)
    assert event == JobResumed(6.0, JOB, 9, ResumeRecord(9, (blob(0), blob(1))))
    assert (job(apply(event, state)).state, job(apply(event, state)).wants_plan) == (JobState.QUEUED, True)


def test_a_job_that_breaks_while_it_is_to_pause_pauses_with_what_was_collected():
    state = apply(JobHolds(4.0, JOB, Pause.OWNER, "paused by its owner"), RUNNING)
    state = apply(JobBroke(5.0, JOB, "lost"), state)
    state = apply(JobRestored(6.0, JOB, 6, (blob(60), blob(61)), 0), state)
    assert (job(state).state, job(state).owner_paused) == (JobState.PAUSED, True)


def test_an_ended_job_resumes_from_its_checkpoints():
    record = CheckpointRecord(10, 1, 0.0, (blob(10), blob(11)))
    state = apply_all([CheckpointCommitted(4.0, JOB, record), JobEnded(5.0, JOB, JobState.CANCELLED, "")], RUNNING)
    for from_step in (None, 10):
        resumed = apply(pausing.resume(job(state), from_step, 6.0), state)
        assert (job(resumed).state, job(resumed).resume.step) == (JobState.QUEUED, 10)
    assert job(apply(pausing.resume(job(state), 0, 6.0), state)).resume is None
    assert job(apply(CheckpointDropped(6.0, JOB, 10), state)).checkpoints == ()


def test_f31_jobs_on_a_draining_node_hold_and_the_node_gets_nothing_new():
    state = apply(NodeDrains(4.0, B, 2, "SIGTERM"), RUNNING)
    (event,) = pausing.drains(state, 5.0)
    assert event == JobHolds(5.0, JOB, Pause.REPLAN, "node b wants to leave: goes on without")
    state = apply(event, state)
    assert pausing.drains(state, 5.0) == []
    held = [StageMoved(6.0, JOB, 1, stage, StageState.HELD, step=9, held=blob(stage)) for stage in (0, 1)]
    state = apply_all(held, state)
    assert (job(state).state, job(state).wants_plan, job(state).resume.step) == (JobState.RECOVERING, True, 9)
    presences = {node: Presence(number, 0.0, 0.0, watching=True) for number, node in enumerate((A, B, C), 1)}
    assert [node.name for node in scheduling.ready_for(state, presences, job(state))] == ["a", "c"]
    presences[A] = replaced(presences[A], job=JOB)  # its worker, which held, has not ended yet
    assert [node.name for node in scheduling.ready_for(state, presences, job(state))] == ["a", "c"]
    presences[C] = replaced(presences[C], job="job-other")
    assert [node.name for node in scheduling.ready_for(state, presences, job(state))] == ["a"]


def test_who_is_waited_for_while_workers_end():
    assert recovery.still_working(BROKEN, job(BROKEN), {A, B}) == [0, 1]
    assert recovery.still_working(BROKEN, job(BROKEN), {A}) == [0]  # the other cannot be told
    stopped = apply(StageMoved(5.0, JOB, 1, 0, StageState.STOPPED), BROKEN)
    assert recovery.still_working(stopped, job(stopped), {A, B}) == [1]
    gone = apply(NodeGone(5.0, B, 2, NodeState.LOST, "silent"), BROKEN)
    assert recovery.still_working(gone, job(gone), {A, B}) == [0]
    assert recovery.absent(gone, job(gone), {A}) == {B: False}
    assert recovery.absent(BROKEN, job(BROKEN), {A}) == {B: True}  # its lease still runs: it may come back


# ---- checkpoints ----


def test_a_checkpoint_is_complete_when_all_stages_of_this_epoch_are_uploaded_after_a_step_that_is_one():
    def complete(*states):
        return [(found.step, found.states) for found in pausing.complete_checkpoints(job(RUNNING), {A: states})]

    both = kept(0, 20, 200, uploaded=True), kept(1, 20, 201, uploaded=True)
    assert complete(*both) == [(20, (blob(200), blob(201)))]
    assert complete(both[0], kept(1, 20, 201)) == []
    assert complete(kept(0, 21, 210, uploaded=True), kept(1, 21, 211, uploaded=True)) == []
    assert complete(kept(0, 100, 1, uploaded=True), kept(1, 100, 2, uploaded=True)) == [(100, (blob(1), blob(2)))]
    assert complete(kept(0, 20, 200, 2, uploaded=True), kept(1, 20, 201, 2, uploaded=True)) == []
    known = CheckpointRecord(20, 1, 0.0, (blob(200), blob(201)))
    again = apply(CheckpointCommitted(5.0, JOB, known), RUNNING)
    assert pausing.complete_checkpoints(job(again), {A: both}) == []
