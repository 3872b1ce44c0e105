"""A coordinator process moves a running job between scripted nodes: nothing is lost, repeated, or left behind."""

from __future__ import annotations

import contextlib
import threading
import time

import grpc
import pytest

from fusion.wire.v1 import coordinator_pb2
from tests.support.coordinator import (
    CoordinatorProcess,
    FakeNode,
    FakeOwner,
    begin,
    hold,
    request_id,
    restart,
    wait_until,
)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    directory = tmp_path_factory.mktemp("coordinator") / "state"
    with CoordinatorProcess(directory, {"lease_s": 5.0, "self_fence_s": 4.0}) as process:
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
    """Nodes a, b, c; the first two get the job."""
    made = [FakeNode(coordinator, name).join() for name in "abc"]
    yield made
    for node in made:
        node.fall_silent()
        with contextlib.suppress(grpc.RpcError, ValueError):
            leave(node)
        node.die()


def leave(node):
    from fusion.wire.v1 import node_pb2

    node.stub.Leave(node_pb2.LeaveRequest(incarnation=node.incarnation, reason="bye"), timeout=5)


def start(owner, nodes):
    """A job of two stages on a and b which runs."""
    job = owner.submit(owner.job(max_stages=2, cuts=[2]))
    begin(nodes[:2])
    owner.wait_for(job, "running")
    return job


def move(owner, job, cuts, names, request=""):
    message = coordinator_pb2.MoveRequest(request_id=request or request_id(), job_id=job, cuts=cuts, nodes=names)
    return owner.stubs.jobs.Move(message, timeout=10)


def fetch(owner, blob):
    parts = owner.stubs.blobs.Get(coordinator_pb2.GetBlobRequest(digest=blob.digest), timeout=10)
    return b"".join(part.data for part in parts)


def test_a_job_goes_from_two_nodes_to_three_and_to_one_with_one_unbroken_curve(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    seen = []
    follower = threading.Thread(target=lambda: seen.extend(owner.follow(job, wait=True)))
    follower.start()
    for node in (a, b):
        node.report_steps(1, 3, loss=node is b)
    request = request_id()
    status = move(owner, job, [1, 3], ["c", "a", "b"], request)
    assert status.reason == "moves at a step's end to 3 stages on c, a, b"
    assert (status.plan.epoch, len(status.plan.stages)) == (1, 2)
    assert a.next("hold").epoch == 1
    for node in (a, b):
        node.report_steps(4, 4, loss=node is b)
    states = [hold(owner, a, 4)]
    assert owner.state(job) == "running"
    assert c.commands.empty()
    states.append(hold(owner, b, 4))
    assignments = begin([c, a, b])
    assert [one.stage for one in assignments] == [0, 1, 2]
    for one in assignments:
        assert (one.plan.epoch, one.resume.step, list(one.resume.states)) == (2, 4, states)
    assert [stage.first_operator for stage in assignments[0].plan.stages] == [0, 1, 3]
    owner.wait_for(job, "running")
    assert fetch(owner, states[0]).startswith(b"state of a")  # whatever breaks now goes back to it
    for node in nodes:
        node.report_steps(5, 6, loss=node is b)
    again = move(owner, job, [1, 3], ["c", "a", "b"], request)  # the answer was lost, say: it moves once
    assert (again.plan.epoch, again.reason) == (2, "")
    move(owner, job, [], ["b"])
    assert c.next("hold").epoch == 2
    old, states = states[0], [hold(owner, node, 6) for node in nodes]
    assert {c.next("stop").epoch, a.next("stop").epoch} == {2}  # left out: nothing is kept for them
    (last,) = begin([b])
    with pytest.raises(grpc.RpcError, match="not in the store"):
        fetch(owner, old)
    assert (last.resume.step, {state.digest for state in last.resume.states}) == (6, {s.digest for s in states})
    b.report_steps(7, 10, loss=True)
    b.finish(owner.upload(b"weights"))
    status = owner.wait_for(job, "succeeded")
    assert (status.step, len(status.stage_weights)) == (10, 1)
    follower.join(20)
    for events in (seen, list(owner.follow(job))):
        steps = [event.metrics for event in events if event.HasField("metrics")]
        assert [(one.step, one.loss, len(one.stages)) for one in steps] == [
            (step, 10.0 - step, 2 if step <= 4 else 3 if step <= 6 else 1) for step in range(1, 11)
        ]


def test_kill_9_between_hold_and_next_epoch_loses_neither_the_move_nor_a_step(coordinator, owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    for node in (a, b):
        node.report_steps(1, 4, loss=node is b)
    move(owner, job, [1, 3], ["b", "c", "a"])
    restart(coordinator, owner, nodes)
    assert a.next("hold").job_id == job
    while not a.commands.empty():
        assert a.commands.get().WhichOneof("body") == "hold"  # told twice, which means no more than once
    hold(owner, a, 4)
    restart(coordinator, owner, nodes)
    assert a.commands.empty()
    hold(owner, b, 4)
    for node in nodes:
        assert node.assigned().resume.step == 4
    restart(coordinator, owner, nodes)
    begin(nodes)  # nobody had said anything of it yet, so it is told again
    owner.wait_for(job, "running")
    for node in nodes:
        node.report_steps(5, 7, loss=node is a)
    c.report_steps(8, 8, loss=False)
    restart(coordinator, owner, nodes)
    assert owner.status(job).step == 7
    a.report_steps(8, 8, loss=True)
    b.report_steps(8, 8, loss=False)
    steps = [event.metrics for event in owner.follow(job) if event.HasField("metrics")]
    assert [(one.step, one.loss, len(one.stages)) for one in steps] == [
        (step, 10.0 - step, 2 if step <= 4 else 3) for step in range(1, 9)
    ]
    assert [node.commands.qsize() for node in nodes] == [0, 0, 0]


def test_a_job_whose_stages_do_not_stop_stays_as_it_is_and_goes_on_if_they_stop_late(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"hold_timeout_s": 0.5}) as coordinator:
        owner = FakeOwner(coordinator)
        a, b, c = made = [FakeNode(coordinator, name).join() for name in "abc"]
        job = start(owner, made)
        move(owner, job, [], ["c"])
        a.next("hold")
        wait_until(lambda: owner.status(job).reason == "", "the move is given up")
        assert owner.state(job) == "running"
        lines = [event.log.text for event in owner.follow(job) if event.HasField("log")]
        assert "stays as it is: no stage has stopped for the move within 0.5 s" in lines
        hold(owner, b, 3)
        hold(owner, a, 3)
        assert [(one.plan.epoch, one.resume.step) for one in begin([a, b])] == [(2, 3), (2, 3)]
        owner.wait_for(job, "running")
        assert c.commands.empty()
        for node in made:
            node.die()
        owner.close()


def test_a_node_that_goes_while_the_job_is_to_move_to_it_is_given_up(owner, nodes):
    a, _, c = nodes
    job = start(owner, nodes)
    move(owner, job, [2], ["a", "c"])
    leave(c)
    assert (owner.state(job), owner.status(job).reason) == ("running", "")
    with pytest.raises(grpc.RpcError, match="'c' cannot run"):
        move(owner, job, [2], ["a", "c"])
    assert a.next("hold").job_id == job


def test_a_stage_that_fails_while_others_hold_fails_the_job(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    move(owner, job, [2], ["c", "b"])
    a.next("hold")
    state = hold(owner, a, 2)
    b.fail("no space left")
    assert owner.wait_for(job, "failed").reason == "node b (stage 1) failed: no space left"
    assert a.next("stop").job_id == job  # it has kept its state until now
    assert c.commands.empty()
    with pytest.raises(grpc.RpcError, match="not in the store"):
        list(owner.stubs.blobs.Get(coordinator_pb2.GetBlobRequest(digest=state.digest), timeout=10))


def test_why_a_job_does_not_move_is_one_line(coordinator, owner, nodes):
    queued = owner.submit(owner.job(cuts=[1, 2, 3, 4]))
    job = start(owner, nodes)
    for names, cuts, code, words in (
        (["a", "b"], [2], grpc.StatusCode.FAILED_PRECONDITION, "by these cuts on these nodes already"),
        (["a", "nobody"], [2], grpc.StatusCode.FAILED_PRECONDITION, "'nobody' cannot run .*; those that can: a, b, c"),
        (["a", "a"], [2], grpc.StatusCode.INVALID_ARGUMENT, "named twice"),
        (["a", "b"], [1, 2], grpc.StatusCode.INVALID_ARGUMENT, "2 cuts make 3 stages, 2 nodes are named"),
        (["a", "b", "c"], [2, 2], grpc.StatusCode.INVALID_ARGUMENT, "cuts must ascend"),
        (["a", "b"], [2_000_000], grpc.StatusCode.INVALID_ARGUMENT, "cut"),
        ([], [], grpc.StatusCode.INVALID_ARGUMENT, "0 are named"),
    ):
        with pytest.raises(grpc.RpcError, match=words) as caught:
            move(owner, job, cuts, names)
        assert caught.value.code() is code, names
    with pytest.raises(grpc.RpcError, match="is queued; only a job that runs can move"):
        move(owner, queued, [2], ["a", "b"])
    with pytest.raises(grpc.RpcError, match="there is no job"):
        move(FakeOwner(coordinator, "other"), job, [], ["c"])
    time.sleep(0.1)
    assert [node.commands.qsize() for node in nodes] == [0, 0, 0]
    assert owner.state(job) == "running"


def test_fusion_move_says_where_the_job_goes(coordinator, owner, nodes, tmp_path, monkeypatch, capsys):
    from fusion.cli.main import main

    owner.credentials.save(tmp_path / "me")
    monkeypatch.setenv("FUSION_CREDENTIALS", str(tmp_path / "me"))
    job = start(owner, nodes)

    def fusion_move(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["move", job, "--coordinator", coordinator.address, *arguments])
        out, err = capsys.readouterr()
        return ended.value.code, out or err

    for arguments, words in (
        (["--nodes", "a,,b"], "--nodes: 'a,,b' has an empty name"),
        (["--nodes", "a,b", "--cuts", "x"], "--cuts: 'x' is no operator position"),
        (["--nodes", "a,b", "--cuts", "99999999999"], "--cuts: '99999999999' is no operator position"),
    ):
        code, said = fusion_move(*arguments)
        assert code == 2
        assert said.startswith(f"fusion: {words}")
    code, said = fusion_move("--nodes", "c, a", "--cuts", "1")
    assert (code, said) == (0, f"{job} moves at a step's end to 2 stages on c, a\n")
    assert nodes[0].next("hold").job_id == job
