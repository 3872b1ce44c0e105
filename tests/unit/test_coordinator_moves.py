"""Moving a running job: what each event, report, lost node and passing minute does to it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fusion.base.errors import ConfigError, StateError, WireError
from fusion.base.ids import Epoch, Incarnation, JobId, NodeId
from fusion.plan.types import Plan, PlannedStage
from fusion.protocol.plan import plan_to_proto
from fusion.wire.v1 import job_pb2, plan_pb2, tensor_pb2
from fusion_coordinator.decide import failures, jobs, moves, nodes, scheduling
from fusion_coordinator.liveness import JobWatch, Presence, forgive_job, reported
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import State, apply, apply_all
from fusion_coordinator.state.events import (
    JobEnded,
    JobMoves,
    JobPlanned,
    JobStays,
    JobSubmitted,
    NodeRegistered,
    StageMoved,
)
from fusion_coordinator.state.jobs import TransitionError
from fusion_coordinator.state.records import (
    HardwareRecord,
    JobState,
    NodeState,
    PastRecord,
    ResumeRecord,
    StageRecord,
    StageState,
    WeightsRecord,
)
from fusion_coordinator.store.memory import MemoryStore

SETTINGS = Settings()
HARDWARE = HardwareRecord("cpu", "CPU", 2**33, 1e10, 4, "linux", "3.11", "2.13.0", "0.1.0")
A, B, C, D = (NodeId(letter * 20) for letter in "abcd")
INCARNATION = {A: 1, B: 2, C: 3, D: 4}
JOB = JobId("job-aaaaaaaaaa")
SPEC = job_pb2.JobSpec(torch_version="2.13.0").SerializeToString()


def plan(*cut: tuple[NodeId, int], epoch: int = 1) -> Plan:
    """A plan from (node, end of its operators)."""
    stages, first = [], 0
    for node, end in cut:
        incarnation = Incarnation(INCARNATION[node])
        stages.append(PlannedStage(node, node[0], "10.0.0.1:7445", incarnation, first, end, 1, 1, 0.0, 0.0))
        first = end
    return Plan(Epoch(epoch), tuple(stages), (), "1f1b", 4)


def body(made: Plan) -> bytes:
    return plan_to_proto(made).SerializeToString(deterministic=True)


def records(*owners: NodeId) -> tuple[StageRecord, ...]:
    return tuple(StageRecord(node, node[0], INCARNATION[node]) for node in owners)


def member(node: NodeId) -> NodeRegistered:
    return NodeRegistered(1.0, node, node[0], "10.0.0.1:7445", "10.0.0.1", HARDWARE, INCARNATION[node])


def moved(stage: int, state: StageState, epoch: int = 1, **fields: object) -> StageMoved:
    return StageMoved(3.0, JOB, epoch, stage, state, **fields)  # type: ignore[arg-type]


def held(stage: int, step: int = 5, epoch: int = 1) -> StageMoved:
    return moved(stage, StageState.HELD, epoch, step=step, held=blob(stage))


def blob(number: int) -> WeightsRecord:
    return WeightsRecord(str(number) * 64, 10 + number)


OLD = plan((A, 3), (B, 9))
RUNNING = apply_all(
    [
        *map(member, (A, B, C, D)),
        JobSubmitted(1.0, JOB, "owner", "gpt", SPEC, 10),
        JobPlanned(2.0, JOB, 1, body(OLD), records(A, B)),
        moved(0, StageState.RUNNING),
        moved(1, StageState.RUNNING),
    ],
    State(),
)
TO_THREE = JobMoves(3.0, JOB, 2, body(plan((C, 2), (A, 5), (B, 9), epoch=2)), records(C, A, B), "moves")
MOVING = apply(TO_THREE, RUNNING)


def presences(*but: NodeId) -> dict[NodeId, Presence]:
    own = {A: JOB, B: JOB}
    return {
        node: Presence(incarnation, 100.0, 0.0, watching=True, job=own.get(node, ""))
        for node, incarnation in INCARNATION.items()
        if node not in but
    }


def report(stage: int, state: StageState, **fields: object) -> jobs.Report:
    node = (A, B)[stage]
    return jobs.Report(node, INCARNATION[node], JOB, 1, stage, state, **fields)  # type: ignore[arg-type]


# ---- from one plan to the next ----


def test_the_next_plan_is_in_force_once_all_stages_hold_after_one_step():
    state = apply(held(1), MOVING)
    assert (state.jobs[JOB].state, state.jobs[JOB].epoch) == (JobState.RUNNING, 1)
    job = apply(held(0), state).jobs[JOB]
    assert (job.state, job.epoch, job.next, job.reason) == (JobState.STARTING, 2, None, "")
    assert job.stages == records(C, A, B)
    assert job.plan == TO_THREE.plan
    assert job.resume == ResumeRecord(5, (blob(0), blob(1)))
    assert job.past == (PastRecord(5, 2),)


def test_a_job_moves_again_from_where_it_goes_on():
    state = apply_all([held(0), held(1), *(moved(stage, StageState.READY, 2) for stage in range(3))], MOVING)
    assert state.jobs[JOB].state is JobState.RUNNING
    back = JobMoves(4.0, JOB, 3, body(plan((D, 9), epoch=3)), records(D), "moves")
    job = apply_all([back, *(held(stage, 8, epoch=2) for stage in range(3))], state).jobs[JOB]
    assert (job.epoch, job.stages) == (3, records(D))
    assert job.resume == ResumeRecord(8, (blob(0), blob(1), blob(2)))
    assert job.past == (PastRecord(5, 2), PastRecord(8, 3))


def test_a_job_whose_last_step_is_over_before_it_holds_just_succeeds():
    done = [moved(stage, StageState.FINISHED, weights=blob(stage)) for stage in (0, 1)]
    job = apply_all(done, MOVING).jobs[JOB]
    assert (job.state, job.next, job.epoch) == (JobState.SUCCEEDED, None, 1)


def test_a_job_that_fails_while_it_moves_forgets_the_move():
    job = apply(JobEnded(4.0, JOB, JobState.FAILED, "why"), apply(held(0), MOVING)).jobs[JOB]
    assert (job.state, job.next) == (JobState.FAILED, None)


def test_a_move_that_is_given_up_leaves_the_job_as_it_was():
    assert apply(JobStays(4.0, JOB, "why"), MOVING) == RUNNING


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (MOVING, TO_THREE),
        (RUNNING, replace(TO_THREE, epoch=1)),
        (apply(JobEnded(4.0, JOB, JobState.CANCELLED, ""), RUNNING), TO_THREE),
        (RUNNING, held(0)),
        (RUNNING, JobStays(4.0, JOB, "why")),
        (apply(held(0), MOVING), JobStays(4.0, JOB, "why")),
        (apply(held(0), MOVING), moved(0, StageState.RUNNING)),
        (apply(held(0), MOVING), moved(0, StageState.FAILED, cause="error")),
        (apply(held(0), MOVING), held(1, step=6)),
        (apply_all([held(0), held(1)], MOVING), held(0)),
    ],
)
def test_what_cannot_be_is_a_bug_and_says_so(state, event):
    with pytest.raises(TransitionError, match=JOB):
        apply(event, state)


def test_a_restart_finds_the_move_where_it_was():
    store = MemoryStore()
    events = [
        *map(member, (A, B, C)),
        JobSubmitted(1.0, JOB, "owner", "gpt", SPEC, 10),
        JobPlanned(2.0, JOB, 1, body(OLD), records(A, B)),
        *(moved(stage, StageState.RUNNING) for stage in (0, 1)),
        TO_THREE,
        held(0),
    ]
    store.commit(events)
    assert store.load() == apply_all(events, State())
    assert store.load().jobs[JOB].next is not None
    store.commit([held(1)])
    assert store.load().jobs[JOB].resume == ResumeRecord(5, (blob(0), blob(1)))


# ---- who may move where ----


def move(state: State, made: Plan, *away: NodeId) -> list[JobMoves]:
    return moves.move(state, presences(*away), JOB, made, 4.0, "")


def test_a_running_job_may_take_its_own_nodes_and_idle_ones():
    (event,) = move(RUNNING, plan((C, 2), (B, 5), (D, 9)))
    assert event.epoch == 2
    assert plan_pb2.Plan.FromString(event.plan).epoch == 2
    assert [stage.node for stage in event.stages] == [C, B, D]
    assert event.reason == "moves at a step's end to 3 stages on c, b, d"
    apply(event, RUNNING)


def test_nodes_that_a_job_moves_to_are_reserved_for_it():
    assert {node.node for node in scheduling.idle(RUNNING, presences())} == {C, D}
    assert {node.node for node in scheduling.idle(MOVING, presences())} == {D}
    without_a = apply(JobMoves(3.0, JOB, 2, b"", records(C, B), ""), RUNNING)
    free = {**presences(), A: Presence(1, 100.0, 0.0, watching=True)}
    assert A not in {node.node for node in scheduling.idle(without_a, free)}
    assert A in {node.node for node in scheduling.idle(apply(held(0), without_a), free)}
    assert B not in {node.node for node in scheduling.idle(apply(held(1), without_a), free)}


@pytest.mark.parametrize(
    ("state", "made", "away", "error", "words"),
    [
        (MOVING, plan((D, 9)), (), StateError, "moves already, to epoch 2"),
        (
            apply(JobEnded(4.0, JOB, JobState.FAILED, ""), RUNNING),
            plan((D, 9)),
            (),
            StateError,
            "is failed; only a job",
        ),
        (apply(moved(0, StageState.FINISHED, weights=blob(0)), RUNNING), plan((D, 9)), (), StateError, "about to end"),
        (RUNNING, OLD, (), StateError, "by these cuts on these nodes already"),
        (RUNNING, plan((C, 3), (D, 9)), (C,), StateError, "node c is not free"),
        (RUNNING, plan((C, 3), (C, 9)), (), ConfigError, "named twice"),
    ],
)
def test_why_a_job_cannot_move_is_said(state, made, away, error, words):
    with pytest.raises(error, match=words):
        move(state, made, *away)


def test_nodes_are_named_by_name_or_id_in_the_order_of_the_stages():
    job = RUNNING.jobs[JOB]
    found = moves.named_nodes(RUNNING, presences(), job, ["d", A, "b"])
    assert [node.node for node in found] == [D, A, B]
    with pytest.raises(StateError, match=r"'c' cannot run .*; those that can: a, b, d"):
        moves.named_nodes(RUNNING, presences(C), job, ["c"])
    twins = apply(replace(member(D), name="c"), RUNNING)
    with pytest.raises(ConfigError, match="2 nodes are named 'c'"):
        moves.named_nodes(twins, presences(), job, ["c"])
    old = apply(replace(member(C), hardware=replace(HARDWARE, torch_version="2.9.0")), RUNNING)
    with pytest.raises(StateError, match=r"node c has torch 2\.9\.0, the job needs 2\.13\.x"):
        moves.named_nodes(old, presences(), job, ["c"])


# ---- reports ----


def test_a_stage_that_saves_is_known_to_hold_and_repeats_itself_for_nothing():
    saving = report(0, StageState.RUNNING, detail="saves", step=5)
    (event,) = jobs.stage_report(MOVING, saving, 4.0)
    state = apply(event, MOVING)
    assert state.jobs[JOB].holds
    assert jobs.stage_report(state, saving, 5.0) == []
    assert jobs.stage_report(state, report(0, StageState.HELD, step=5, held=blob(0)), 5.0) == [
        StageMoved(5.0, JOB, 1, 0, StageState.HELD, step=5, held=blob(0))
    ]


def test_stages_that_stop_for_a_move_that_was_given_up_go_on_by_the_plan_that_they_had():
    events = jobs.stage_report(RUNNING, report(0, StageState.HELD, step=5, held=blob(0)), 4.0)
    state = apply_all(events, RUNNING)
    assert not moves.overdue(state.jobs[JOB], JobWatch(0.0, moving_s=0.0), 1e6, 4.0, 120.0)
    (event,) = jobs.stage_report(state, report(1, StageState.HELD, step=5, held=blob(1)), 4.0)
    job = apply(event, state).jobs[JOB]
    assert (job.state, job.epoch, job.stages) == (JobState.STARTING, 2, records(A, B))
    assert plan_pb2.Plan.FromString(job.plan) == plan_to_proto(plan((A, 3), (B, 9), epoch=2))


def test_stages_that_hold_after_different_steps_fail_the_job():
    state = apply(held(0), MOVING)
    (event,) = jobs.stage_report(state, report(1, StageState.HELD, step=6, held=blob(1)), 4.0)
    job = apply(event, state).jobs[JOB]
    assert failures.verdict(job, JobWatch(0.0), presences(), 4.0, SETTINGS) == failures.Verdict(
        "node b (stage 1) failed: it holds after step 6, stage 0 after step 5", "error", 1
    )


def test_a_stage_holds_with_its_state_and_its_step_or_not_at_all():
    for fields in ({"step": 5}, {"held": blob(0)}):
        with pytest.raises(WireError, match="without its state or its step"):
            jobs.stage_report(MOVING, report(0, StageState.HELD, **fields), 4.0)


def test_reports_of_the_plan_before_are_stale():
    state = apply_all([held(0), held(1)], MOVING)
    with pytest.raises(StateError, match="stale epoch 1, current 2"):
        jobs.stage_report(state, report(0, StageState.HELD, step=5, held=blob(0)), 4.0)


# ---- lost nodes and time ----


def test_a_lost_node_that_was_only_moved_to_leaves_the_job_as_it_is_while_it_can():
    events = nodes.gone(MOVING, C, 3, NodeState.LOST, "no heartbeat", 4.0)
    assert apply_all(events, MOVING).jobs == RUNNING.jobs
    assert events[1:] == [JobStays(4.0, JOB, "node c was lost: no heartbeat")]
    holding = apply(held(0), MOVING)
    job = apply_all(nodes.gone(holding, C, 3, NodeState.LOST, "no heartbeat", 4.0), holding).jobs[JOB]
    assert job.reason == "node c (stage 0 of the plan that it moves to) was lost: no heartbeat"


def test_a_lost_node_that_works_breaks_the_job_once_also_if_it_is_moved_to():
    events = nodes.gone(MOVING, B, 2, NodeState.LOST, "why", 4.0)
    assert [type(event).__name__ for event in events] == ["NodeGone", "JobBroke"]
    watched = {**presences(), B: Presence(2, 0.0, 0.0), C: Presence(3, 0.0, 0.0)}
    both = nodes.leases_over(MOVING, watched, 100.0, 4.0, SETTINGS)
    assert apply_all(both, MOVING).jobs[JOB].reason == "node b (stage 1) was lost: no heartbeat for 100 s"


def test_a_node_that_holds_and_is_left_out_may_go():
    state = apply_all([JobMoves(3.0, JOB, 2, b"", records(C, B), ""), held(0)], RUNNING)
    assert [type(event).__name__ for event in nodes.gone(state, A, 1, NodeState.LEFT, "bye", 4.0)] == ["NodeGone"]


def test_a_move_is_given_up_when_no_stage_stops_for_it_in_time():
    job, watch = MOVING.jobs[JOB], JobWatch(0.0, moving_s=100.0)
    assert moves.overdue(job, watch, 219.0, 4.0, moves.patience_s(SETTINGS, 1.0)) == []
    (event,) = moves.overdue(job, watch, 220.0, 4.0, moves.patience_s(SETTINGS, 1.0))
    assert event.reason == "no stage has stopped for the move within 120 s"
    assert moves.overdue(job, watch, 220.0, 4.0, moves.patience_s(SETTINGS, 60.0)) == []  # five steps of a minute
    assert moves.overdue(job, forgive_job(watch, 30.0), 220.0, 4.0, 120.0) == []


def test_a_stage_that_never_holds_breaks_the_job_unless_it_says_that_it_saves():
    job = apply(held(0), MOVING).jobs[JOB]
    watch = JobWatch(0.0, moving_s=100.0)
    assert failures.verdict(job, watch, presences(), 219.0, SETTINGS) is None
    words = "node b (stage 1) did not hold: nothing heard of it for 120 s"
    assert failures.verdict(job, watch, presences(), 220.0, SETTINGS) == failures.Verdict(words, "silent", 1)
    assert failures.verdict(job, watch, presences(), 220.0, SETTINGS, step_s=60.0) is None
    assert failures.verdict(job, reported(watch, 1, False, 150.0), presences(), 220.0, SETTINGS) is None


# ---- afterwards ----


def test_states_that_a_job_went_on_from_are_needed_until_it_has_newer_ones_or_ends():
    starting = apply_all([held(0), held(1)], MOVING)
    running = apply_all([moved(stage, StageState.READY, 2) for stage in range(3)], starting)
    assert moves.outdated(MOVING.jobs[JOB], starting.jobs[JOB]) == []
    assert moves.outdated(starting.jobs[JOB], running.jobs[JOB]) == []  # whatever breaks next goes back to them
    newer = replace(running.jobs[JOB], resume=ResumeRecord(9, (blob(7), blob(1))))
    assert moves.outdated(running.jobs[JOB], newer) == [blob(0).digest]
    failed = apply(JobEnded(4.0, JOB, JobState.FAILED, ""), apply(held(0), MOVING)).jobs[JOB]
    assert moves.outdated(apply(held(0), MOVING).jobs[JOB], failed) == [blob(0).digest]
    both = [blob(0).digest, blob(1).digest]
    assert moves.outdated(running.jobs[JOB], apply(JobEnded(4.0, JOB, JobState.FAILED, ""), running).jobs[JOB]) == both
    assert set(both) <= moves.referenced(running)


def test_blobs_that_something_else_refers_to_are_kept_whatever_a_node_calls_its_state():
    graph, weights, data, evaluation = (tensor_pb2.BlobRef(digest=str(n) * 64, size_bytes=1) for n in range(1, 5))
    spec = job_pb2.JobSpec(graph=graph, weights=weights)
    spec.data.files.add(blob=data)
    spec.eval_data.files.add(blob=evaluation)
    state = replace(RUNNING, jobs={JOB: replace(RUNNING.jobs[JOB], spec=spec.SerializeToString())})
    state = apply(moved(0, StageState.FINISHED, weights=blob(5)), state)
    assert moves.droppable(state, [str(number) * 64 for number in range(8)]) == ["0" * 64, "6" * 64, "7" * 64]
