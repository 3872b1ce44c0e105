"""A coordinator process with scripted nodes over real TLS: the way of a job from submission to its end."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time

import grpc
import pytest

from fusion.wire.v1 import coordinator_pb2, node_pb2
from tests.support.coordinator import CoordinatorProcess, FakeNode, FakeOwner, request_id, stubs, wait_until

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    with CoordinatorProcess(tmp_path_factory.mktemp("coordinator") / "state") as process:
        yield process
        assert process.process.poll() is None, process.log()
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def owner(coordinator):
    owner = FakeOwner(coordinator)
    yield owner
    owner.cancel_all()
    owner.close()


@pytest.fixture
def nodes(coordinator):
    """Makes nodes; at the end they leave, so that the next test begins with none."""
    made = []

    def make(count, **hardware):
        for index in range(count):
            made.append(FakeNode(coordinator, f"n{next(NUMBERS):04}-{index}", **hardware).join())
        return made[-count:]

    yield make
    for node in made:
        node.fall_silent()
        with contextlib.suppress(grpc.RpcError, ValueError):
            node.stub.Leave(node_pb2.LeaveRequest(incarnation=node.incarnation, reason="test over"), timeout=5)
        node.die()


def start(owner, nodes, **settings):
    """Submit a job and bring it to running."""
    job = owner.submit(owner.job(**settings))
    for node in nodes:
        node.assigned()
        node.report("starting")
        node.report("ready")
    owner.wait_for(job, "running")
    return job


def end(owner, job, nodes):
    if owner.state(job) not in ("succeeded", "failed", "cancelled"):
        owner.cancel(job)
    for node in nodes:
        node.job = ""


def test_a_job_goes_from_queued_to_succeeded_and_hands_out_its_weights(owner, nodes):
    job = owner.submit(owner.job(steps=3))
    assert owner.wait_for(job, "queued").steps == 3
    first, second = nodes(2)
    a, b = first.assigned(), second.assigned()
    assert (a.stage, b.stage) == (0, 1)
    assert a.plan == b.plan
    assert a.plan.epoch == 1
    assert [stage.incarnation for stage in a.plan.stages] == [first.incarnation, second.incarnation]
    assert [(stage.first_operator, stage.end_operator) for stage in a.plan.stages] == [(0, 2), (2, 5)]
    assert owner.state(job) == "starting"
    for node in (first, second):
        node.report("starting")
        node.report("ready")
    owner.wait_for(job, "running")
    first.report_steps(1, 3, loss=False)
    second.report_steps(1, 3, loss=True)
    files = [owner.upload(b"weights of stage %d" % stage) for stage in (0, 1)]
    first.finish(files[0])
    assert owner.state(job) == "running"
    second.finish(files[1])
    status = owner.wait_for(job, "succeeded")
    assert list(status.stage_weights) == files
    assert (status.step, status.last.loss, status.last.grad_norm) == (3, 7.0, 3.0)
    assert status.last.bytes == 200
    assert status.finished_wall_s >= status.submitted_wall_s > 0


def test_follow_tells_the_whole_story_to_early_late_and_several_listeners(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair, steps=4)
    seen = []
    early = threading.Thread(target=lambda: seen.extend(owner.follow(job, wait=True)))
    early.start()
    for step in range(1, 5):
        pair[0].report_steps(step, step, loss=False)
        pair[1].report_steps(step, step, loss=True)
    line = node_pb2.LogLine(level="info", text="hello\x1b[2J", origin="n0")
    report = node_pb2.MetricsReport(job_id=job, epoch=1, incarnation=pair[0].incarnation, logs=[line])
    pair[0].stub.ReportMetrics(report, timeout=10)
    for node in pair:
        node.finish(owner.upload(b"w"))
    early.join(20)
    late = list(owner.follow(job))
    for events in (seen, late):
        steps = [event.metrics for event in events if event.HasField("metrics")]
        assert [metrics.step for metrics in steps] == [1, 2, 3, 4]
        assert [metrics.loss for metrics in steps] == [9.0, 8.0, 7.0, 6.0]
        assert all(len(metrics.stages) == 2 for metrics in steps)
        texts = [event.log.text for event in events if event.HasField("log")]
        assert "hello\\x1b[2J" in texts
        assert events[-1].status.state == coordinator_pb2.JOB_STATE_SUCCEEDED
    assert seen[0].HasField("status")
    rest = [event.metrics.step for event in owner.follow(job, after_step=3) if event.HasField("metrics")]
    assert rest == [4]
    lines = [event.log for event in late if event.HasField("log")]
    after = [event.log for event in owner.follow(job, after_log=2) if event.HasField("log")]
    assert after == lines[2:]


def test_a_follower_that_does_not_read_holds_nobody_up(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair, steps=1000)
    owner.follow(job, wait=True)  # never read
    for first in range(1, 1000, 100):
        pair[0].report_steps(first, first + 99, loss=False)
        pair[1].report_steps(first, first + 99, loss=True)
    assert owner.status(job).step == 1000
    steps = [event.metrics.step for event in owner.follow(job) if event.HasField("metrics")]
    assert steps == list(range(1, 1001))
    end(owner, job, pair)


def test_a_failure_names_node_stage_and_cause_and_ends_the_others(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[1].fail("RuntimeError: shapes differ")
    status = owner.wait_for(job, "failed")
    assert status.reason == f"node {pair[1].name} (stage 1) failed: RuntimeError: shapes differ"
    stop = pair[0].next("stop")
    assert (stop.job_id, stop.epoch) == (job, 1)
    assert "shapes differ" in stop.reason
    assert pair[1].commands.empty()


def test_the_root_cause_wins_over_its_consequences(owner, nodes):
    trio = nodes(3)
    job = start(owner, trio)
    trio[0].fail("stream broke", "peer-lost", peer_stage=1)
    trio[2].fail("stream broke", "peer-lost", peer_stage=1)
    assert owner.state(job) == "running"
    trio[1].fail("worker killed by signal 9", "crash")
    assert owner.broke(job) == f"node {trio[1].name} (stage 1) crashed: worker killed by signal 9"
    end(owner, job, trio)


def test_a_lost_peer_without_a_better_cause_breaks_the_job_after_a_moment(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[0].fail("no route", "peer-lost", peer_stage=1)
    assert owner.broke(job) == (
        f"node {pair[0].name} (stage 0) lost its connection to node {pair[1].name} (stage 1): no route"
    )
    end(owner, job, pair)


def test_p8_a_killed_node_whose_peers_miss_it_breaks_the_job_at_once_with_its_name(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[1].die()
    pair[0].fail("stream broke", "peer-lost", peer_stage=1)
    assert owner.broke(job).startswith(f"node {pair[1].name} (stage 1) was lost")
    end(owner, job, pair)


@pytest.mark.slow
def test_p8_a_silent_node_loses_its_lease_and_its_job(owner, nodes, coordinator):
    pair = nodes(2)
    job = start(owner, pair)
    pair[1].fall_silent()
    assert owner.broke(job) == f"node {pair[1].name} (stage 1) was lost: no heartbeat for 2 s"
    assert pair[0].next("stop").reason.startswith("recovery: ")
    with pytest.raises(grpc.RpcError, match=r"is lost.*register again") as caught:
        pair[1].beat()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    wait_until(lambda: pair[1].watch_error is not None, "the lost node's Watch stream ends")
    assert pair[1].watch_error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert node_states(coordinator)[pair[1].name] == "lost"
    end(owner, job, pair)


def node_states(coordinator):
    with coordinator.channel(coordinator.admin()) as channel:
        answer = stubs(channel).admin.ListNodes(coordinator_pb2.ListNodesRequest(), timeout=10)
    return {node.name: node.state for node in answer.nodes}


def test_a_broken_watch_stream_alone_is_no_death(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[1].drop_watch()
    time.sleep(0.5)
    pair[1].watch()
    assert owner.state(job) == "running"
    end(owner, job, pair)


def test_a_node_that_starts_anew_loses_what_it_worked_on(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[1].drop_watch()
    wait_until(lambda: pair[1].watch_error is not None, "stream ends")
    old = pair[1].incarnation
    pair[1].register()
    assert pair[1].incarnation > old
    assert (
        owner.broke(job)
        == f"node {pair[1].name} (stage 1) was lost: it registered anew, after a restart or too long without contact"
    )
    end(owner, job, pair)


def test_f21_a_copied_identity_is_refused_while_the_first_is_alive(coordinator, nodes):
    (node,) = nodes(1)
    copy = FakeNode(coordinator, "copy", credentials=node.credentials)
    with pytest.raises(grpc.RpcError, match="copied credentials") as caught:
        copy.register()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    node.beat()
    copy.die()


def test_a_job_goes_on_without_a_node_that_leaves(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[0].stub.Leave(node_pb2.LeaveRequest(incarnation=pair[0].incarnation, reason="SIGTERM"), timeout=5)
    assert owner.broke(job) == f"node {pair[0].name} (stage 0) left: SIGTERM"
    assert pair[1].next("stop").job_id == job
    pair[1].report("stopped", "recovery")
    assert len(pair[1].assigned().plan.stages) == 1
    end(owner, job, pair[1:])


def test_cancel_stops_the_workers_and_is_final(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    request = request_id()
    status = owner.cancel(job, "changed my mind", request)
    assert status.state == coordinator_pb2.JOB_STATE_CANCELLED
    assert status.reason == "cancelled by its owner: changed my mind"
    for node in pair:
        assert node.next("stop").job_id == job
    assert owner.cancel(job, "changed my mind", request) == status
    with pytest.raises(grpc.RpcError, match="has ended already") as caught:
        owner.cancel(job)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    pair[0].report("running")  # late reports change nothing
    assert owner.state(job) == "cancelled"


def test_a_worker_of_an_ended_job_is_told_again_to_stop(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    pair[0].drop_watch()
    wait_until(lambda: pair[0].watch_error is not None, "stream ends")
    owner.cancel(job)
    pair[0].watch()
    assert pair[0].next("stop").job_id == job


@pytest.mark.slow
def test_a_stage_that_vanished_without_a_word_breaks_its_job(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"vanished_s": 0.6, "start_timeout_s": 1.0}) as coordinator:
        owner = FakeOwner(coordinator)
        node = FakeNode(coordinator, "n0").join()
        job = owner.submit(owner.job())
        node.assigned()
        node.report("starting")
        node.report("ready")
        owner.wait_for(job, "running")
        time.sleep(0.4)
        node.job = ""  # its daemon lives, its worker does not
        assert owner.broke(job) == "node n0 (stage 0) no longer runs its worker, and did not say why"
        assert node.next("stop").job_id == job
        owner.cancel(job)
        node.commands.queue.clear()
        slow = owner.submit(owner.job())
        node.assigned()
        node.report("starting", "fetching weights")
        reason = owner.broke(slow)
        assert reason.startswith("node n0 (stage 0) did not start: nothing heard of it for 1 s")
        assert reason.endswith("its last report is starting: fetching weights")
        node.die()
        owner.close()


def test_f22_reports_of_other_epochs_incarnations_and_stages_change_nothing(owner, nodes):
    pair = nodes(2)
    job = start(owner, pair)
    for fields, code in (
        ({"epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 2}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"incarnation": 999_999}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"stage": 1}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"stage": 7}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"job_id": "job-nothere"}, grpc.StatusCode.NOT_FOUND),
        ({"state": 99}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"cause": "boredom"}, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            pair[0].report("failed", "no", **{"cause": "error"} | fields)
        assert caught.value.code() is code, fields
    with pytest.raises(grpc.RpcError, match="stale epoch 0, current 1"):
        pair[0].report("failed", "no", epoch=0)
    with pytest.raises(grpc.RpcError, match="not in the store"):
        pair[0].report("finished", weights={"digest": "0" * 64, "size_bytes": 4})
    pair[0].stage = 1
    with pytest.raises(grpc.RpcError, match="stage 1 of"):
        pair[0].report_steps(1, 1, loss=True)
    pair[0].stage = 0
    assert owner.state(job) == "running"
    end(owner, job, pair)


def test_a_job_waits_for_nodes_and_says_what_is_missing(owner, nodes):
    job = owner.submit(owner.job(layers=4, cuts=[1, 3]))
    words = ("no node has joined", "no node is here", "busy")
    wait_until(lambda: any(word in owner.status(job).reason for word in words), "reason")
    (old,) = nodes(1, torch="2.10.1")
    wait_until(lambda: "has torch 2.10.1, the job needs 2.13.x" in owner.status(job).reason, "torch remark")
    first = nodes(1)[0]
    wait_until(lambda: "3 stages, only 1 nodes are idle" in owner.status(job).reason, "too few nodes")
    others = nodes(2, torch="2.13.1+cpu")
    plan = first.assigned().plan
    assert [(stage.first_operator, stage.end_operator) for stage in plan.stages] == [(0, 1), (1, 3), (3, 5)]
    assert old.commands.empty()
    end(owner, job, [first, *others])


def test_memory_that_is_missing_keeps_a_job_waiting_until_it_is_there(owner, nodes):
    job = owner.submit(owner.job())
    small = nodes(1, memory_bytes=100)[0]
    wait_until(lambda: "memory:" in owner.status(job).reason, "reason")
    assert "more are needed" in owner.status(job).reason
    assert small.commands.empty()
    large = nodes(1)[0]
    assert len(large.assigned().plan.stages) == 1
    end(owner, job, [large])


def test_a_second_job_takes_the_nodes_that_the_first_left(owner, nodes):
    trio = nodes(3)
    job = owner.submit(owner.job(max_stages=2))
    for node in trio[:2]:
        node.assigned()
    second = owner.submit(owner.job())
    assert len(trio[2].assigned().plan.stages) == 1
    third = owner.submit(owner.job())
    wait_until(lambda: "are busy" in owner.status(third).reason, "third waits")
    for each in (third, second, job):
        owner.cancel(each)


def test_a_job_waits_a_while_for_nodes_that_still_end_the_work_of_the_one_before(owner, nodes):
    pair = nodes(2)
    first = start(owner, pair)
    for node in pair:
        node.beat()
    owner.cancel(first)
    pair[0].job = ""
    pair[0].beat()
    second = owner.submit(owner.job())
    with pytest.raises(queue.Empty):
        pair[0].next("assign", timeout_s=2.0)  # many times as long as a plan waits for nodes that come
    pair[1].job = ""
    assert len(pair[0].assigned().plan.stages) == 2
    owner.cancel(second)


def test_the_same_submission_again_is_the_same_job(owner):
    spec, request = owner.job(), request_id()
    job = owner.submit(spec, request)
    assert owner.submit(spec, request) == job
    assert owner.submit(spec) != job
    with pytest.raises(grpc.RpcError, match="request_id"):
        owner.submit(spec, "short")
    for status in owner.stubs.jobs.List(coordinator_pb2.ListJobsRequest(), timeout=10).jobs:
        if status.state == coordinator_pb2.JOB_STATE_QUEUED:
            owner.cancel(status.job_id)


def test_b17_a_foreign_job_is_not_there_and_an_admin_sees_all(owner, coordinator):
    job = owner.submit(owner.job())
    other, admin = FakeOwner(coordinator, "other"), FakeOwner(coordinator, "boss", "admin")
    for call in (other.status, other.cancel, lambda item: list(other.follow(item))):
        with pytest.raises(grpc.RpcError, match="there is no job") as caught:
            call(job)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert job not in [item.job_id for item in other.stubs.jobs.List(coordinator_pb2.ListJobsRequest()).jobs]
    assert job in [item.job_id for item in admin.stubs.jobs.List(coordinator_pb2.ListJobsRequest()).jobs]
    assert admin.cancel(job).reason == "cancelled by an admin"
    other.close()
    admin.close()
