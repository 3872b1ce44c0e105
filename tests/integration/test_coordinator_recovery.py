"""Jobs that break and come back: from which step, with which nodes, whatever dies in between."""

from __future__ import annotations

import contextlib
import time

import grpc
import pytest

from fusion.wire.v1 import coordinator_pb2, node_pb2
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


@pytest.fixture
def coordinator(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"lease_s": 5.0, "self_fence_s": 4.0}) as process:
        yield process
        assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def owner(coordinator):
    owner = FakeOwner(coordinator)
    yield owner
    owner.close()


@pytest.fixture
def nodes(coordinator):
    made = [FakeNode(coordinator, name).join() for name in "abc"]
    yield made
    for node in made:
        with contextlib.suppress(grpc.RpcError, ValueError):
            node.die()


def start(owner, nodes, **settings):
    job = owner.submit(owner.job(max_stages=2, cuts=[2], **settings))
    begin(nodes[:2])
    owner.wait_for(job, "running")
    return job


def content(stage, step, epoch=1):
    return f"state of stage {stage} after step {step} of epoch {epoch}".encode()


def keep_both(job, own, replica, step, epoch=1):
    """Let `own`'s state after a step be kept by itself and by `replica`."""
    for node in (own, replica):
        node.keep(job, epoch, own.stage, step, content(own.stage, step, epoch))


def stop(node):
    """Do what a worker does that is told to stop for a recovery."""
    command = node.next("stop")
    assert command.reason.startswith("recovery: ")
    node.job = ""
    node.report("stopped", "recovery", job_id=command.job_id)


def test_a_dead_node_costs_one_step_and_its_state_comes_from_the_copy(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    for node, other in ((a, b), (b, a)):
        node.report_steps(1, 3, loss=node is b)
        for step in (2, 3):
            keep_both(job, node, other, step)
    a.report_steps(4, 4, loss=False)  # b died in step 4
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    a.job = ""
    digests = a.upload_states()
    assert len(digests) == 2
    first, second = begin([a, c])
    assert first.plan == second.plan
    assert first.plan.epoch == 2
    assert (first.resume.step, [state.digest for state in first.resume.states]) == (3, digests)
    assert [stage.replica_stage for stage in first.plan.stages] == [2, 1]
    status = owner.wait_for(job, "running")
    assert status.step == 3
    (line,) = owner.lines(job, "recovered within ")
    assert line.split(" s, ", 1)[1].startswith("went on after step 3, 1 step done again: node b (stage 1) was lost")
    for node in (a, c):
        node.report_steps(4, 10, loss=node is c)
        node.finish(owner.upload(b"weights"))
    assert owner.wait_for(job, "succeeded").step == 10
    steps = [event.metrics for event in owner.follow(job) if event.HasField("metrics")]
    assert [(one.step, one.loss) for one in steps] == [(step, 10.0 - step) for step in range(1, 11)]


def test_what_was_redone_is_kept_as_it_was_done_last_and_followers_see_each_step_once(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    seen = owner.follow(job, wait=True)
    for node, other in ((a, b), (b, a)):
        node.report_steps(1, 6, loss=node is b)
        keep_both(job, node, other, 4)
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    a.job = ""
    a.upload_states()
    begin([a, c])
    owner.wait_for(job, "running")
    assert owner.status(job).step == 4
    a.report_steps(5, 10, loss=False, skipped=True)  # to be told from the ones before
    c.report_steps(5, 10, loss=True)
    for node in (a, c):
        node.finish(owner.upload(b"weights"))
    steps = [event.metrics for event in seen if event.HasField("metrics")]
    assert [one.step for one in steps] == list(range(1, 11))
    kept = [event.metrics for event in owner.follow(job) if event.HasField("metrics")]
    assert [(one.step, one.skipped) for one in kept] == [(step, step > 4) for step in range(1, 11)]


def test_kill_9_of_the_coordinator_at_any_point_of_a_recovery_loses_nothing(coordinator, owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    for node, other in ((a, b), (b, a)):
        node.report_steps(1, 3, loss=node is b)
        keep_both(job, node, other, 3)
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    owner.wait_for(job, "recovering")
    restart(coordinator, owner, [a, c])  # before anything is uploaded
    a.job = ""
    wait_until(lambda: any(command.HasField("upload") for command in a.commands.queue), "the order to upload")
    a.commands.queue.clear()
    restart(coordinator, owner, [a, c])
    assert owner.state(job) == "recovering"
    wait_until(lambda: any(command.HasField("upload") for command in a.commands.queue), "the same order again")
    a.skip("stop")
    assert len(a.upload_states()) == 2
    first, _ = begin([a, c])
    assert (first.plan.epoch, first.resume.step) == (2, 3)
    restart(coordinator, owner, [a, c])
    owner.wait_for(job, "running")
    assert owner.status(job).step == 3


def test_a_crashed_worker_comes_back_on_its_node_with_what_its_node_keeps(owner, nodes):
    a, b, _ = nodes
    job = start(owner, nodes)
    for stage in (0, 1):
        b.keep(job, 1, stage, 5, content(stage, 5))
    b.fail("killed by signal 9", "crash")
    b.job = ""
    stop(a)
    wait_until(lambda: a.commands.qsize() or b.commands.qsize(), "the order to upload")
    uploaded = [digest for node in (a, b) if node.commands.qsize() for digest in node.upload_states()]
    assert len(uploaded) == 2
    assert [one.resume.step for one in begin([a, b])] == [5, 5]
    owner.wait_for(job, "running")


def test_without_a_state_of_every_stage_a_job_starts_anew_and_says_so(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    for node in (a, b):
        node.report_steps(1, 3, loss=node is b)
    a.keep(job, 1, 0, 3, content(0, 3))  # nobody has stage 1
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    a.job = ""
    assert [one.HasField("resume") for one in begin([a, c])] == [False, False]
    assert owner.wait_for(job, "running").step == 0
    assert "goes on from the start: nobody keeps a state of all stages; 3 steps to do again" in owner.lines(job)


def test_a_job_without_enough_nodes_pauses_and_goes_on_by_itself(coordinator, owner, nodes):
    a, b, c = nodes
    c.die()
    job = start(owner, nodes)
    for node in (a, b):
        node.report_steps(1, 2, loss=node is b)
    keep_both(job, a, b, 2)
    keep_both(job, b, a, 2)
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    a.job = ""
    digests = a.upload_states()
    status = owner.wait_for(job, "paused")
    assert "2 stages, only 1 nodes are idle" in status.reason
    restart(coordinator, owner, [a])
    assert owner.state(job) == "paused"
    a.kept.clear()  # the store has it
    d = FakeNode(coordinator, "d").join()
    found = begin([a, d])
    assert [(one.resume.step, sorted(state.digest for state in one.resume.states)) for one in found] == [
        (2, sorted(digests))
    ] * 2
    owner.wait_for(job, "running")
    d.die()


def test_an_error_of_the_job_itself_still_fails_it(owner, nodes):
    a, b, _ = nodes
    job = start(owner, nodes)
    keep_both(job, a, b, 2)
    keep_both(job, b, a, 2)
    b.fail("tokens.bin: token 70000 of 50257")
    assert owner.wait_for(job, "failed").reason == "node b (stage 1) failed: tokens.bin: token 70000 of 50257"


def test_f27_after_running_out_of_memory_the_node_is_given_less(owner, nodes):
    a, b, _ = nodes
    job = owner.submit(owner.job(max_stages=2))
    first = begin([a, b])[0]
    owner.wait_for(job, "running")
    need = first.plan.stages[1].memory_bytes
    b.fail("needs more", "out-of-memory")
    b.job = ""
    stop(a)
    placed = next_plan(nodes)
    assert placed.epoch == 2
    for stage in placed.stages:
        if stage.node_name == "b":
            assert stage.memory_limit_bytes <= 0.9 * need + 1


def next_plan(nodes):
    """Return the plan of whoever is assigned next."""

    def found():
        return next((node for node in nodes if any(one.HasField("assign") for one in node.commands.queue)), None)

    node = wait_until(found, "an assignment")
    node.skip("stop")
    return node.assigned().plan


def test_a_worker_that_crashes_again_and_again_is_avoided_on_its_node(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    for _ in range(2):
        b.fail("killed by signal 11", "crash")
        b.job = ""
        stop(a)
        begin([a, b])
        owner.wait_for(job, "running")
    b.fail("killed by signal 11", "crash")
    b.job = ""
    stop(a)
    assert [stage.node_name for stage in begin([a, c])[0].plan.stages] == ["a", "c"]
    owner.wait_for(job, "running")
    for turn in range(2):
        c.fail("killed by signal 11", "crash")
        if turn == 0:
            c.job = ""
            stop(a)
            begin([a, c])
            owner.wait_for(job, "running")
    status = owner.wait_for(job, "failed")
    assert status.reason.endswith("given up after 5 failures in a row without a step done")


def test_f34_a_revoked_node_is_out_of_a_running_job_at_once(coordinator, owner, nodes):
    from tests.support.coordinator import stubs

    a, b, c = nodes
    job = start(owner, nodes)
    with coordinator.channel(coordinator.admin()) as channel:
        request = coordinator_pb2.RevokeRequest(request_id=request_id(), identity=b.identity)
        stubs(channel).admin.Revoke(request, timeout=10)
    assert owner.broke(job) == "node b (stage 1) left: its certificate was revoked"
    stop(a)
    assert [stage.node_name for stage in begin([a, c])[0].plan.stages] == ["a", "c"]


# ---- pausing and draining ----


def pause(owner, job, request=""):
    message = coordinator_pb2.PauseRequest(request_id=request or request_id(), job_id=job)
    return owner.stubs.jobs.Pause(message, timeout=10)


def resume(owner, job, request="", **fields):
    message = coordinator_pb2.ResumeRequest(request_id=request or request_id(), job_id=job, **fields)
    return owner.stubs.jobs.Resume(message, timeout=10)


def test_an_owner_pauses_a_job_at_a_steps_end_and_resumes_it_on_other_nodes(coordinator, owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    request = request_id()
    assert pause(owner, job, request).reason == "paused by its owner"
    assert a.next("hold").job_id == job
    states = [hold(owner, node, 4) for node in (a, b)]
    assert owner.wait_for(job, "paused").reason == "paused by its owner"
    for node in (a, b):
        assert node.next("stop").job_id == job
    restart(coordinator, owner, nodes)
    assert pause(owner, job, request).state == coordinator_pb2.JOB_STATE_PAUSED
    time.sleep(0.5)
    assert [node.commands.qsize() for node in nodes] == [0, 0, 0]  # it waits for its owner, whatever nodes there are
    a.die()
    again = request_id()
    resume(owner, job, again)
    resume(owner, job, again)  # the answer was lost, say
    found = begin([b, c])
    assert [(one.plan.epoch, one.resume.step, list(one.resume.states)) for one in found] == [(2, 4, states)] * 2
    owner.wait_for(job, "running")


def test_why_a_job_does_not_pause_or_resume_is_one_line(owner, nodes):
    job = start(owner, nodes)
    with pytest.raises(grpc.RpcError, match="only a job that pauses or has ended resumes"):
        resume(owner, job)
    with pytest.raises(grpc.RpcError, match="pause or cancel it first"):
        resume(owner, job, from_step=0)
    queued = owner.submit(owner.job(cuts=[1, 2, 3]))
    assert pause(owner, queued).state == coordinator_pb2.JOB_STATE_PAUSED
    owner.cancel(queued)
    with pytest.raises(grpc.RpcError, match="has ended already: cancelled"):
        pause(owner, queued)
    with pytest.raises(grpc.RpcError, match="no checkpoint to go on from; '--from 0' begins anew"):
        resume(owner, queued)
    with pytest.raises(grpc.RpcError, match="has no checkpoint of step 7; it has: none"):
        resume(owner, queued, from_step=7)
    assert resume(owner, queued, from_step=0).state == coordinator_pb2.JOB_STATE_QUEUED


def drain(node):
    return node.stub.Drain(node_pb2.DrainRequest(incarnation=node.incarnation, reason="SIGTERM"), timeout=10)


def test_f31_a_node_that_drains_is_left_out_from_a_steps_end_on(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes)
    answer = drain(b)
    assert (answer.done, answer.waits_for) == (False, f"stage 1 of {job}")
    assert a.next("hold").job_id == job
    assert not drain(b).done
    states = [hold(owner, node, 3) for node in (a, b)]
    found = begin([a, c])
    assert [(one.resume.step, list(one.resume.states)) for one in found] == [(3, states)] * 2
    assert [stage.node_name for stage in found[0].plan.stages] == ["a", "c"]
    wait_until(lambda: drain(b).done, "the node may leave")
    b.stub.Leave(node_pb2.LeaveRequest(incarnation=b.incarnation, reason="SIGTERM"), timeout=5)
    status = owner.wait_for(job, "running")
    assert status.plan.epoch == 2
    (line,) = owner.lines(job, "recovered within ")
    assert line.endswith("went on after step 3, 0 steps done again: node b wants to leave: goes on without")


def test_f35_a_job_that_cannot_do_without_the_draining_node_pauses(coordinator, owner, nodes):
    a, b, c = nodes
    c.die()
    job = start(owner, nodes)
    drain(b)
    a.next("hold")
    for node in (a, b):
        hold(owner, node, 3)
    assert "2 stages, only 1 nodes are idle" in owner.wait_for(job, "paused").reason
    assert drain(b).done
    d = FakeNode(coordinator, "d").join()
    assert begin([a, d])[0].resume.step == 3
    d.die()


# ---- checkpoints ----


def checkpoint(owner, nodes, job, step, epoch=1):
    """Do what workers and daemons do at a checkpoint step; returns the digests by stage."""
    digests = uploaded(owner, nodes, job, step, epoch)
    for node in nodes:
        node.report_steps(step, step, loss=node is nodes[-1])
    return digests


def uploaded(owner, nodes, job, step, epoch=1):
    """Do the part of it that is about states."""
    import numpy
    from safetensors.numpy import save

    digests = []
    for node in nodes:
        values = {
            f"layers.{node.stage}.weight": numpy.full(3, step, dtype=numpy.float32),
            f"$held.{job}.e{epoch}.s{node.stage}": numpy.array(step),
        }
        node.keep(job, epoch, node.stage, step, save(values))
        node.kept[-1].uploaded = True
        owner.upload(node.contents[node.kept[-1].state.digest])
        node.report_states()
        digests.append(node.kept[-1].state.digest)
    return digests


def listed(owner, job):
    answer = owner.stubs.jobs.ListCheckpoints(coordinator_pb2.ListCheckpointsRequest(job_id=job), timeout=10)
    return [one.step for one in answer.checkpoints]


def test_a_checkpoint_is_a_folder_that_anybody_can_read_and_only_the_latest_stay(coordinator, owner, nodes):
    import hashlib
    import json

    from safetensors.numpy import load_file

    a, b, _ = nodes
    job = start(owner, nodes, checkpoint_every_steps=2, checkpoint_keep=2)
    for step in (2, 3, 4, 6):  # 3 is none
        digests = checkpoint(owner, [a, b], job, step)
    wait_until(lambda: listed(owner, job) == [4, 6], "two are kept")
    folder = coordinator.directory / "checkpoints" / job / "step-6"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["job"], manifest["step"], manifest["epoch"], manifest["format"]) == (job, 6, 1, 1)
    assert manifest["graph"] == owner.status(job).graph.digest
    assert [file["digest"] for file in manifest["files"]] == digests
    for stage, file in enumerate(manifest["files"]):
        content = (folder / file["name"]).read_bytes()
        assert (file["size_bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert load_file(folder / file["name"])[f"layers.{stage}.weight"].tolist() == [6.0] * 3
    wait_until(lambda: len(list(folder.parent.iterdir())) == 2, "the older one is removed")
    restart(coordinator, owner, nodes)
    assert listed(owner, job) == [4, 6]


def test_a_checkpoint_waits_until_the_losses_up_to_it_are_known(owner, nodes):
    a, b, _ = nodes
    job = start(owner, nodes, checkpoint_every_steps=2)
    uploaded(owner, [a, b], job, 2)
    a.report_steps(1, 2, loss=False)
    time.sleep(0.5)
    assert listed(owner, job) == []
    b.report_steps(1, 2, loss=True)
    wait_until(lambda: listed(owner, job) == [2], "the checkpoint")


def test_f5_when_a_stage_and_its_copy_die_the_job_goes_back_to_the_checkpoint(owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes, checkpoint_every_steps=2)
    for node in (a, b):
        node.report_steps(1, 5, loss=node is b)
    digests = checkpoint(owner, [a, b], job, 4)
    wait_until(lambda: listed(owner, job) == [4], "the checkpoint")
    a.kept.clear()
    b.die()
    a.fail("stream broke", "peer-lost", peer_stage=1)
    a.job = ""
    found = begin([a, c])
    assert [(one.resume.step, [s.digest for s in one.resume.states]) for one in found] == [(4, digests)] * 2
    assert "goes on from the checkpoint of step 4; 1 step to do again" in owner.lines(job)


def test_f25_a_damaged_checkpoint_is_refused_with_both_digests_and_an_earlier_one_taken(coordinator, owner, nodes):
    a, b, c = nodes
    job = start(owner, nodes, checkpoint_every_steps=2)
    for step in (2, 4):
        digests = checkpoint(owner, [a, b], job, step)
    wait_until(lambda: listed(owner, job) == [2, 4], "both checkpoints")
    damaged = coordinator.directory / "checkpoints" / job / "step-4" / "stage-1.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    owner.cancel(job)
    with pytest.raises(
        grpc.RpcError, match=rf"stage-1.safetensors is damaged: its digest is \w+, expected is {digests[1]}"
    ):
        resume(owner, job, from_step=4)
    assert resume(owner, job).step == 2
    (line,) = owner.lines(job, "checkpoint of step 4 cannot be used: ")
    assert line.endswith("an earlier one is taken")
    assert listed(owner, job) == [2]
    for node in nodes:
        node.job = ""
        node.skip("stop")
    assigned = wait_until(lambda: [n for n in nodes if any(x.HasField("assign") for x in n.commands.queue)], "plan")
    assert assigned[0].assigned().resume.step == 2
    assert c.commands.empty() or c in assigned


def test_fusion_checkpoints_pause_and_resume(coordinator, owner, nodes, tmp_path, monkeypatch, capsys):
    from safetensors.numpy import load_file

    from fusion.cli.main import main

    owner.credentials.save(tmp_path / "me")
    monkeypatch.setenv("FUSION_CREDENTIALS", str(tmp_path / "me"))
    a, b, _ = nodes
    job = start(owner, nodes, checkpoint_every_steps=2)

    def fusion(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--coordinator", coordinator.address])
        out, err = capsys.readouterr()
        return ended.value.code, out or err

    assert fusion("checkpoints", job) == (0, f"{job} has no checkpoint\n")
    checkpoint(owner, [a, b], job, 2)
    wait_until(lambda: listed(owner, job) == [2], "the checkpoint")
    code, said = fusion("checkpoints", job)
    assert (code, said.split()[:4]) == (0, ["step", "2", "2", "files"])
    folder = tmp_path / "mine"
    code, said = fusion("checkpoints", job, "--download", str(folder))
    assert (code, said.startswith(f"wrote the checkpoint of step 2 to {folder}")) == (0, True)
    assert load_file(folder / "stage-1.safetensors")["layers.1.weight"].tolist() == [2.0] * 3
    assert (folder / "MANIFEST.json").exists()
    assert "exists already; name a new folder" in fusion("checkpoints", job, "--download", str(folder))[1]
    assert fusion("checkpoints", job, "--download", str(tmp_path / "x"), "--step", "9")[1].endswith("it has: 2\n")
    assert fusion("pause", job) == (0, f"{job} running: paused by its owner\n")
    a.next("hold")
    for node in (a, b):
        hold(owner, node, 4)
    owner.wait_for(job, "paused")
    assert fusion("resume", job, "--from", "2") == (0, f"{job} queued, goes on after step 2\n")
    assert begin([a, b])[0].resume.step == 2
