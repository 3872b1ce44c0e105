"""The coordinator's pure core: what follows from what, without a clock, a disk or a network."""

from __future__ import annotations

import dataclasses
import json
import random

import msgspec
import pytest
from msgspec.structs import replace

from fusion.base.errors import AuthError, ConfigError, NotFoundError, StateError, WireError
from fusion.base.ids import JobId, NodeId
from fusion.protocol.status import RefusalError
from fusion.security.credentials import Role
from fusion_coordinator.decide import enrolment, failures, jobs, nodes, scheduling
from fusion_coordinator.liveness import JobWatch, Presence, heard, reported
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import State, apply, apply_all
from fusion_coordinator.state.events import (
    JobBroke,
    JobEnded,
    JobPlanned,
    JobRestored,
    JobSubmitted,
    JobWaits,
    NodeGone,
    NodeRegistered,
    StageMoved,
)
from fusion_coordinator.state.jobs import TransitionError
from fusion_coordinator.state.records import (
    HardwareRecord,
    JobState,
    NodeState,
    StageRecord,
    StageState,
    WeightsRecord,
)

SETTINGS = Settings()
HARDWARE = HardwareRecord("cpu", "CPU", 2**33, 1e10, 4, "linux", "3.11", "2.13.0", "0.1.0")
A, B, C = (NodeId(letter * 20) for letter in "abc")
JOB = JobId("job-aaaaaaaaaa")
W = WeightsRecord("f" * 64, 1)


def member(node, incarnation, name=""):
    return NodeRegistered(1.0, node, name or node[0], "10.0.0.1:7445", "10.0.0.1", HARDWARE, incarnation)


def planned(*owners, epoch=1):
    stages = tuple(StageRecord(node, node[0], incarnation) for node, incarnation in owners)
    return JobPlanned(2.0, JOB, epoch, b"plan", stages)


SUBMITTED = JobSubmitted(1.0, JOB, "owner", "gpt", b"spec", 10)
BASE = apply_all([member(A, 1), member(B, 2), SUBMITTED, planned((A, 1), (B, 2))], State())


def moved(stage, state, **fields):
    return StageMoved(3.0, JOB, 1, stage, state, **fields)


def failed(stage, cause, detail="", peer_stage=-1):
    return moved(stage, StageState.FAILED, cause=cause, detail=detail, peer_stage=peer_stage)


def present(incarnation=1, now_s=100.0, **fields):
    return Presence(**{"incarnation": incarnation, "heard_s": now_s, "heard_wall_s": 0.0, "watching": True} | fields)


def all_present(now_s=100.0):
    return {A: present(1, now_s), B: present(2, now_s)}


# ---- state ----


def test_apply_leaves_the_old_state_as_it_was():
    before = State()
    after = apply(member(A, 1), before)
    assert before == State()
    assert set(after.nodes) == {A}


def test_a_job_runs_once_all_are_ready_and_succeeds_once_all_have_finished():
    state = apply_all([moved(0, StageState.READY), moved(1, StageState.STARTING)], BASE)
    assert state.jobs[JOB].state is JobState.STARTING
    state = apply(moved(1, StageState.READY), state)
    assert state.jobs[JOB].state is JobState.RUNNING
    state = apply_all([moved(0, StageState.FINISHED, weights=W)], state)
    assert state.jobs[JOB].state is JobState.RUNNING
    state = apply(moved(1, StageState.FINISHED, weights=W), state)
    assert state.jobs[JOB].state is JobState.SUCCEEDED
    assert state.jobs[JOB].finished_wall_s == 3.0


@pytest.mark.parametrize(
    "event",
    [
        SUBMITTED,
        JobWaits(3.0, JOB, "why"),
        planned((A, 1), epoch=2),
        moved(2, StageState.READY),
        StageMoved(3.0, JOB, 2, 0, StageState.READY),
        JobEnded(3.0, JOB, JobState.SUCCEEDED, ""),
    ],
)
def test_a_transition_that_cannot_be_tells_the_jobs_story(event):
    with pytest.raises(TransitionError, match=r"job-aaaaaaaaaa: STARTING, epoch 1, stages \[a ASSIGNED, b ASSIGNED\]"):
        apply(event, BASE)


def test_stages_and_epochs_never_go_back():
    state = apply(moved(0, StageState.READY), BASE)
    with pytest.raises(TransitionError):
        apply(moved(0, StageState.STARTING), state)
    ended = apply(JobEnded(3.0, JOB, JobState.CANCELLED, ""), BASE)
    with pytest.raises(TransitionError):
        apply(moved(0, StageState.READY), ended)


# ---- tokens ----


def test_a_token_is_used_once_before_it_expires_by_who_knows_its_secret():
    created = enrolment.create_token("node", 60.0, "tok-1", b"s" * 32, 1000.0)
    assert b"s" * 32 not in (created.secret_hash,)
    state = apply(created, State())
    events, role = enrolment.enrol(state, "tok-1", b"s" * 32, A, "a", 1059.0)
    assert role is Role.NODE
    used = apply_all(events, state)
    assert enrolment.enrol(used, "tok-1", b"s" * 32, A, "a", 1059.5) == ([], Role.NODE)
    for secret, token, identity, now, message in (
        (b"x" * 32, "tok-1", A, 1001.0, "not known"),
        (b"s" * 32, "tok-2", A, 1001.0, "not known"),
        (b"s" * 32, "tok-1", B, 1001.0, "another machine"),
        (b"s" * 32, "tok-1", A, 1060.0, "expired"),
        (b"x" * 32, "tok-1", B, 1060.0, "not known"),
    ):
        with pytest.raises(AuthError, match=message):
            enrolment.enrol(used, token, secret, identity, "a", now)


def test_old_tokens_are_forgotten_a_day_after_they_expired():
    state = apply(enrolment.create_token("node", 60.0, "tok-1", b"s", 0.0), State())
    state = apply(enrolment.create_token("node", 60.0, "tok-2", b"s", 80_000.0), state)
    assert set(state.tokens) == {"tok-1", "tok-2"}
    state = apply(enrolment.create_token("node", 60.0, "tok-3", b"s", 90_000.0), state)
    assert set(state.tokens) == {"tok-2", "tok-3"}


# ---- registration and leases ----


def asked(node=A, host="10.0.0.1", **hardware):
    return nodes.Registration(node, "a", "10.0.0.1:7445", host, replace(HARDWARE, **hardware), 1)


def test_f21_only_a_restart_on_the_same_machine_is_taken_while_the_lease_runs():
    with pytest.raises(RefusalError, match="wait 20 s"):
        nodes.register(BASE, present(now_s=90.0), asked(), 100.0, 0.0, SETTINGS)
    with pytest.raises(RefusalError):
        nodes.register(BASE, present(watching=False), asked(host="10.0.0.9"), 100.0, 0.0, SETTINGS)
    _, incarnation = nodes.register(BASE, present(watching=False), asked(), 100.0, 0.0, SETTINGS)
    assert incarnation == 3
    _, incarnation = nodes.register(BASE, present(now_s=70.0), asked(host="10.0.0.9"), 100.0, 0.0, SETTINGS)
    assert incarnation == 3


def test_a_restarted_node_takes_its_job_down_by_name():
    events, _ = nodes.register(BASE, present(watching=False), asked(), 100.0, 0.0, SETTINGS)
    state = apply_all(events, BASE)
    assert state.jobs[JOB].state is JobState.RECOVERING
    assert (
        state.jobs[JOB].reason
        == "node a (stage 0) was lost: it registered anew, after a restart or too long without contact"
    )


def test_a_lease_ends_at_its_time_and_not_before():
    assert nodes.leases_over(BASE, all_present(), 129.9, 0.0, SETTINGS) == []
    presences = all_present() | {B: present(2, 120.0)}
    state = apply_all(nodes.leases_over(BASE, presences, 130.0, 0.0, SETTINGS), BASE)
    assert (state.nodes[A].state, state.nodes[B].state) == (NodeState.LOST, NodeState.MEMBER)
    assert state.jobs[JOB].reason == "node a (stage 0) was lost: no heartbeat for 30 s"


def test_nodes_that_are_lost_together_break_their_job_once():
    events = nodes.leases_over(BASE, all_present(), 140.0, 0.0, SETTINGS)
    assert [type(event) for event in events].count(JobBroke) == 1
    assert apply_all(events, BASE).jobs[JOB].state is JobState.RECOVERING


def test_nobody_is_expired_who_was_not_heard_since_the_restart():
    assert nodes.leases_over(BASE, {}, 1e9, 0.0, SETTINGS) == []


def test_the_end_of_an_older_registration_does_not_touch_the_newer_one():
    state = apply(member(A, 5), BASE)
    assert apply(NodeGone(9.0, A, 1, NodeState.LOST, "old"), state) == state


def test_a_node_outlives_one_lease_less_than_it_fences_itself():
    assert SETTINGS.self_fence_s + SETTINGS.heartbeat_s <= SETTINGS.lease_s


@pytest.mark.parametrize(
    "hardware",
    [
        {"memory_bytes": 0},
        {"flops": float("inf")},
        {"flops": -1.0},
        {"threads": 5000},
        {"device": "a\nb"},
        {"bytes_per_s": float("nan")},
        {"bytes_per_s": -1.0},
        {"efficiency": {"conv": 0.0}},
        {"efficiency": {"conv": float("nan")}},
        {"efficiency": {"a b": 0.5}},
        {"efficiency": {f"kind{number}": 0.5 for number in range(65)}},
    ],
)
def test_b29_impossible_machines_are_refused(hardware):
    with pytest.raises(ConfigError, match=next(iter(hardware))):
        nodes.register(State(), None, asked(**hardware), 0.0, 0.0, SETTINGS)


def test_a_registration_from_before_nodes_were_calibrated_is_read_and_a_newer_one_is_kept():
    new_node = replace(BASE.nodes[A], hardware=replace(HARDWARE, bytes_per_s=5e9, efficiency={"conv": 0.4}))
    old = json.loads(msgspec.json.encode(new_node))
    del old["hardware"]["bytes_per_s"], old["hardware"]["efficiency"]
    read = msgspec.json.decode(json.dumps(old), type=type(new_node))
    assert (read.hardware.bytes_per_s, read.hardware.efficiency) == (0.0, {})
    assert msgspec.json.decode(msgspec.json.encode(new_node), type=type(new_node)) == new_node


def test_only_the_present_incarnation_counts():
    assert nodes.current(BASE, A, 1).name == "a"
    with pytest.raises(NotFoundError, match="register first"):
        nodes.current(BASE, C, 1)
    with pytest.raises(StateError, match="stale incarnation 1, current 5"):
        nodes.current(apply(member(A, 5), BASE), A, 1)
    with pytest.raises(StateError, match="is lost: x; register again"):
        nodes.current(apply(NodeGone(9.0, A, 1, NodeState.LOST, "x"), BASE), A, 1)


def test_heartbeats_that_were_overtaken_renew_the_lease_only():
    presence = heard(present(), 5, "job", 1, 7, 110.0, 0.0)
    late = heard(presence, 4, "", 0, 0, 111.0, 0.0)
    assert (late.heard_s, late.job, late.step, late.sequence) == (111.0, "job", 7, 5)
    assert heard(presence, 6, "", 0, 0, 112.0, 0.0).idle_since_s == 112.0


# ---- stage reports ----


def report(**fields):
    defaults = {"node": A, "incarnation": 1, "job": JOB, "epoch": 1, "stage": 0, "state": 2, "cause": "error"}
    return jobs.Report(**defaults | fields)


def test_reports_that_are_repeated_late_or_of_ended_jobs_change_nothing():
    (event,) = jobs.stage_report(BASE, report(), 3.0)
    state = apply(event, BASE)
    assert jobs.stage_report(state, report(), 3.0) == []
    assert jobs.stage_report(state, report(state=1), 3.0) == []
    ended = apply(JobEnded(3.0, JOB, JobState.CANCELLED, ""), state)
    assert jobs.stage_report(ended, report(state=5), 3.0) == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"epoch": 2}, StateError),
        ({"epoch": 0}, StateError),
        ({"incarnation": 2}, StateError),
        ({"node": B}, StateError),
        ({"stage": 9}, WireError),
        ({"job": "job-x"}, NotFoundError),
        ({"state": 0}, WireError),
        ({"state": 7}, WireError),
        ({"state": 5, "cause": "boredom"}, WireError),
        ({"state": 4}, WireError),
    ],
)
def test_b17_f22_reports_from_elsewhere_are_refused(fields, error):
    with pytest.raises(error):
        jobs.stage_report(BASE, report(**fields), 3.0)


# ---- verdicts ----


def verdict(state, *, now_s=100.0, watch=None, presences=None):
    watch = watch or JobWatch(now_s)
    presences = all_present() if presences is None else presences
    found = failures.verdict(state.jobs[JOB], watch, presences, now_s, SETTINGS)
    return None if found is None else found.reason


def test_a_healthy_job_is_left_alone():
    state = apply_all([moved(0, StageState.READY), moved(1, StageState.READY)], BASE)
    assert verdict(state) is None


def test_the_graver_cause_wins_whoever_reports_first():
    state = apply_all([failed(0, "peer-lost", "broke", 1), failed(1, "out-of-memory", "needs 3 GiB")], BASE)
    assert verdict(state) == "node b (stage 1) ran out of memory: needs 3 GiB"
    state = apply_all([failed(0, "lease", ""), failed(1, "error", "NaN")], BASE)
    assert verdict(state) == "node b (stage 1) failed: NaN"
    assert verdict(apply(moved(1, StageState.STOPPED, detail="SIGTERM"), BASE)) == (
        "node b (stage 1) stopped its worker: SIGTERM"
    )


def test_a_lost_peer_waits_for_a_better_cause_unless_its_node_is_gone_too():
    state = apply(failed(0, "peer-lost", "broke", 1), BASE)
    watch = reported(JobWatch(90.0), 0, True, 100.0)
    assert verdict(state, now_s=102.9, watch=watch) is None
    assert verdict(state, now_s=103.0, watch=watch) == (
        "node a (stage 0) lost its connection to node b (stage 1): broke"
    )
    gone = all_present() | {B: present(2, watching=False)}
    assert verdict(state, now_s=100.1, watch=watch, presences=gone).startswith("node b (stage 1) was lost")
    anew = all_present() | {B: present(9)}
    assert verdict(state, now_s=100.1, watch=watch, presences=anew).startswith("node b (stage 1) was lost")


def test_a_stage_may_start_as_long_as_it_says_so():
    watch = reported(JobWatch(0.0), 0, False, 119.0)
    assert verdict(BASE, now_s=119.9, watch=watch) is None
    assert verdict(BASE, now_s=120.0, watch=watch).startswith("node b (stage 1) did not start")
    both = reported(watch, 1, False, 119.0)
    assert verdict(BASE, now_s=200.0, watch=both) is None
    assert verdict(BASE, now_s=239.0, watch=both).startswith("node a (stage 0) did not start")


def test_a_node_that_runs_nothing_any_more_has_lost_its_stage():
    state = apply_all([moved(0, StageState.READY), moved(1, StageState.READY)], BASE)
    idle = all_present() | {A: present(1, idle_since_s=50.0)}
    watch = reported(JobWatch(0.0), 0, False, 95.0)
    assert verdict(state, now_s=106.9, watch=watch, presences=idle) is None
    assert verdict(state, now_s=107.0, watch=watch, presences=idle).startswith("node a (stage 0) no longer runs")


# ---- scheduling ----


def test_only_nodes_that_are_here_free_and_listening_are_idle():
    state = apply_all([member(C, 3, "c"), JobEnded(3.0, JOB, JobState.CANCELLED, "")], BASE)
    presences = all_present() | {C: present(3)}
    names = lambda changed: [node.name for node in scheduling.idle(state, presences | changed)]  # noqa: E731
    assert names({}) == ["a", "b", "c"]
    assert names({A: present(1, job="job-old")}) == ["b", "c"]
    assert names({A: present(1, watching=False)}) == ["b", "c"]
    assert names({A: present(9)}) == ["b", "c"]
    busy = apply(member(C, 3, "c"), BASE)
    assert [node.name for node in scheduling.idle(busy, presences)] == ["c"]
    without = replace(state, revoked=frozenset({A}))
    assert [node.name for node in scheduling.idle(without, presences)] == ["b", "c"]


def test_a_node_leaves_a_job_that_is_over_and_no_other():
    ended = apply(JobEnded(50.0, JOB, JobState.CANCELLED, ""), BASE)
    names = lambda state, presences, after_s: [  # noqa: E731
        node.name for node in scheduling.leaving(state, presences, after_s)
    ]
    still = all_present() | {A: present(1, job=JOB)}
    assert names(ended, still, 45.0) == ["a"]
    assert names(ended, still, 50.0) == []  # it had its time
    assert names(ended, all_present(), 45.0) == []
    assert names(BASE, still, 0.0) == []  # that job still runs
    assert names(ended, {A: present(1, job=JOB, watching=False)}, 45.0) == []
    assert names(ended, {A: present(1, job="job-unknown")}, 45.0) == []


def test_f26_nodes_with_another_torch_are_left_out_with_a_remark():
    old = replace(BASE.nodes[A], hardware=replace(HARDWARE, torch_version="2.6.0+cu124"))
    fit, remarks = scheduling.split_by_torch([old, BASE.nodes[B]], "2.13.1")
    assert [node.name for node in fit] == ["b"]
    assert remarks == ["node a has torch 2.6.0+cu124, the job needs 2.13.x"]
    assert scheduling.split_by_torch([old], "") == ([old], [])


# ---- all together ----


def test_v2_v6_no_order_of_events_lets_numbers_go_back_or_two_hold_a_stage():
    """A random walk over everything that can be decided; the invariants hold after every step."""
    for seed in range(40):
        _walk(random.Random(seed))


def _walk(rng):
    state, presences, now_s, given = State(), {}, 0.0, []
    for _ in range(120):
        now_s += rng.uniform(0, 12)
        node = rng.choice([A, B, C])
        before = state
        try:
            events = _step(rng, state, presences, node, now_s)
        except (RefusalError, StateError, NotFoundError, WireError):
            continue
        state = apply_all(events, state)
        for event in events:
            if isinstance(event, NodeRegistered):
                given.append(event.incarnation)
                presences[event.node] = present(event.incarnation, now_s)
            elif isinstance(event, NodeGone):
                presences.pop(event.node, None)
        _check(before, state, given)


def _step(rng, state, presences, node, now_s):
    action = rng.randrange(8)
    presence = presences.get(node)
    if action == 0:
        return nodes.register(state, presence, asked(node), now_s, 0.0, SETTINGS)[0]
    if action == 1 and presence is not None:
        presences[node] = heard(presence, presence.sequence + 1, "", 0, 0, now_s, 0.0)
        return []
    if action == 2 and presence is not None:
        presences[node] = dataclasses.replace(presence, watching=not presence.watching)
        return []
    if action == 3:
        return nodes.leases_over(state, presences, now_s, 0.0, SETTINGS)
    if action == 4:
        return [JobSubmitted(now_s, JobId(f"job-{len(state.jobs)}"), "o", "j", b"", 1)]
    broken = [job for job in state.jobs.values() if job.collects]
    if action == 7 and broken:
        return [JobRestored(now_s, rng.choice(broken).job, 0, (), 0)]
    waiting, free = scheduling.waiting(state), scheduling.idle(state, presences)
    if action == 5 and waiting and free:
        stages = tuple(StageRecord(item.node, item.name, item.incarnation) for item in free)
        return [JobPlanned(now_s, waiting[0].job, scheduling.next_epoch(waiting[0]), b"", stages)]
    running = [job for job in state.jobs.values() if job.state.active]
    if not running:
        return []
    job = rng.choice(running)
    stage = rng.randrange(len(job.stages))
    owner = job.stages[stage]
    told = jobs.Report(
        owner.node, owner.incarnation, job.job, job.epoch, stage, rng.randrange(1, 7), cause="error", weights=W
    )
    return jobs.stage_report(state, told, now_s)


def _check(before, state, given):
    assert given == sorted(set(given))
    for job_id, job in state.jobs.items():
        old = before.jobs.get(job_id)
        if old is not None:
            assert job.epoch >= old.epoch
            assert job.state is not JobState.QUEUED or old.state is JobState.QUEUED
            assert not old.state.ended or job == old
    held = [
        (stage.node, stage.incarnation)
        for job in state.jobs.values()
        if job.state.active
        for stage in job.stages
        if not stage.state.ended
    ]
    assert len({node for node, _ in held}) == len(held)
    for node, incarnation in held:
        assert state.nodes[node].incarnation == incarnation
        assert state.nodes[node].state is NodeState.MEMBER
