"""kill -9 of the coordinator: what was answered is kept, nodes carry on, and what cannot carry on says so."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time

import grpc
import pytest

from fusion.base.errors import ConfigError, StateError
from fusion.wire.v1 import coordinator_pb2
from tests.support.coordinator import CoordinatorProcess, FakeNode, FakeOwner, opens, request_id, stubs, wait_until


@pytest.fixture
def coordinator(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"lease_s": 3.0, "self_fence_s": 2.5}) as process:
        yield process
        assert "Traceback" not in process.log(), process.log()


def running_job(coordinator, owner, **settings):
    nodes = [FakeNode(coordinator, f"n{index}").join() for index in (0, 1)]
    job = owner.submit(owner.job(**settings))
    for node in nodes:
        node.assigned()
        node.report("starting")
        node.report("ready")
    owner.wait_for(job, "running")
    return job, nodes


def again(node):
    """The daemon's Watch loop: try until the stream stands."""
    wait_until(lambda: opens(node), "Watch after the restart")


def test_f7_a_killed_coordinator_comes_back_and_the_job_goes_on_to_its_end(coordinator):
    owner = FakeOwner(coordinator)
    request = request_id()
    spec = owner.job(steps=4)
    queued = owner.submit(spec, request)
    owner.cancel(queued)
    job, nodes = running_job(coordinator, owner, steps=4)
    for node in nodes:
        node.report_steps(1, 2, loss=node.stage == 1)
    nodes[0].report_steps(3, 3, loss=False)  # the other half of step 3 comes after the restart
    before = owner.status(job)
    coordinator.kill()
    coordinator.start()
    wait_until(lambda: owner.status(job) == before, "the same status")
    assert before.step == 2
    assert owner.submit(spec, request) == queued
    for node in nodes:
        again(node)
    nodes[1].report_steps(3, 4, loss=True)
    nodes[0].report_steps(4, 4, loss=False)
    for node in nodes:
        node.finish(owner.upload(b"weights %d" % node.stage))
    status = owner.wait_for(job, "succeeded")
    assert status.step == 4
    steps = [event.metrics for event in owner.follow(job) if event.HasField("metrics")]
    assert [(metrics.step, metrics.loss, len(metrics.stages)) for metrics in steps] == [
        (step, 10.0 - step, 2) for step in (1, 2, 3, 4)
    ]
    for node in nodes:
        assert node.commands.empty()
        node.die()
    owner.close()


@pytest.mark.slow
def test_a_node_that_died_while_the_coordinator_was_away_breaks_its_job_after_a_fresh_lease(coordinator):
    owner = FakeOwner(coordinator)
    job, nodes = running_job(coordinator, owner)
    coordinator.kill()
    nodes[1].die()
    coordinator.start()
    wait_until(lambda: owner.state(job) == "running", "nobody is blamed before a full lease")
    assert owner.broke(job) == "node n1 (stage 1) was lost: no heartbeat for 3 s"
    again(nodes[0])
    wait_until(lambda: not nodes[0].commands.empty(), "the other worker is told to stop")
    nodes[0].die()
    owner.close()


def test_f9_an_epoch_that_was_committed_but_not_delivered_is_delivered_after_the_restart(coordinator):
    owner = FakeOwner(coordinator)
    node = FakeNode(coordinator, "n0").join()
    job = owner.submit(owner.job())
    first = node.assigned()
    node.job = ""  # as if the assignment had been lost with the coordinator
    coordinator.kill()
    coordinator.start()
    again(node)
    assert node.assigned() == first
    assert owner.state(job) == "starting"
    node.die()
    owner.close()


def test_tokens_and_revocations_outlive_the_process(coordinator):
    from fusion.security.enrolment import enrol, parse_join_string

    with coordinator.channel(coordinator.admin()) as channel:
        request = coordinator_pb2.CreateTokenRequest(request_id=request_id(), role="node", valid_s=60)
        text = stubs(channel).admin.CreateToken(request, timeout=10).join_string
        node = FakeNode(coordinator, "n0").join()
        revoke = coordinator_pb2.RevokeRequest(request_id=request_id(), identity=node.identity)
        stubs(channel).admin.Revoke(revoke, timeout=10)
        coordinator.kill()
        coordinator.start()
        wait_until(lambda: stubs(channel).admin.CreateToken(request, wait_for_ready=True, timeout=10), "answer")
        assert stubs(channel).admin.CreateToken(request, timeout=10).join_string == text
    join = parse_join_string(text)
    assert enrol(join, "new").cluster == coordinator.config.cluster
    with pytest.raises(Exception, match="was used by another machine"):
        enrol(join, "newer")
    fresh = FakeNode(coordinator, "n0", credentials=node.credentials)
    with pytest.raises(grpc.RpcError, match="was revoked"):
        fresh.register()
    fresh.die()
    node.die()


def test_f32_sigterm_ends_it_cleanly_and_leaves_the_state_as_it_is(coordinator):
    owner = FakeOwner(coordinator)
    job, nodes = running_job(coordinator, owner)
    follower = owner.follow(job, wait=True)
    next(follower)
    assert coordinator.stop() == 0
    wait_until(lambda: nodes[0].watch_error is not None, "streams end")
    assert nodes[0].watch_error.code() is grpc.StatusCode.UNAVAILABLE
    database = sqlite3.connect(coordinator.directory / "coordinator.db")
    assert database.execute("PRAGMA quick_check").fetchone() == ("ok",)
    database.close()
    coordinator.start()
    wait_until(lambda: owner.state(job) == "running", "still running")
    for node in nodes:
        node.die()
    owner.close()


def test_f30_a_second_coordinator_on_the_same_state_or_the_same_port_refuses_to_start(coordinator, tmp_path):
    from fusion_coordinator.server import Listen, serve

    def start(directory, listen):
        asyncio.run(serve(directory, Listen(listen), started=print, stop=asyncio.Event(), lock_wait_s=0.0))

    pid = coordinator.process.pid
    with pytest.raises(StateError, match=rf"another coordinator \(pid {pid}\) holds"):
        start(coordinator.directory, "127.0.0.1:0")
    other = CoordinatorProcess(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"cannot listen on {coordinator.address}"):
        start(other.directory, coordinator.address)


@pytest.mark.slow
def test_a_coordinator_that_stood_still_blames_nobody_for_it(coordinator):
    owner = FakeOwner(coordinator)
    job, nodes = running_job(coordinator, owner)
    coordinator.process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)  # longer than a lease
    coordinator.process.send_signal(signal.SIGCONT)
    wait_until(lambda: "stood still" in coordinator.log(), "it notices")
    assert owner.state(job) == "running"
    nodes[0].fall_silent()
    assert "no heartbeat" in owner.broke(job)
    for node in nodes:
        node.die()
    owner.close()
