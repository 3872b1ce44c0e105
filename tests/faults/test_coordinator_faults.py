"""The coordinator is killed, stopped, cut off from itself in time, or talked to over calls that get lost."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import fusion
from fusion.base.ids import random_id
from fusion.security.credentials import new_key
from fusion.security.enrolment import _call, make_csr, parse_join_string
from fusion.security.tls import caller_of_certificate
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, History, make_job, paced

pytestmark = pytest.mark.faults


def goes_on_undisturbed(history: History) -> None:
    """One plan, no step done twice, no node given up."""
    assert history.epochs() == {1: 0}
    assert history.lost_steps() == 0
    assert history.nodes_gone() == []


def steps_between(history: History, begin_s: float, end_s: float) -> set[int]:
    """Return the steps that a stage finished in a time."""
    return {line["step"] for line in history.steps if begin_s < line["at_s"] < end_s}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["f7-kill9", "f32-sigterm"])
def test_f7_f32_training_goes_on_without_the_coordinator_and_nothing_is_lost(
    cluster: FaultCluster, how: signal.Signals
) -> None:
    cluster.set_failpoints(paced(0.12))
    job = make_job(60)  # it must not end while the coordinator is away
    away_s = 10.0 if how is signal.SIGKILL else 4.0
    with cluster.running(job, step=3) as run:
        begin_s = time.monotonic()
        if how is signal.SIGKILL:
            cluster.kill("coordinator")
        else:
            assert cluster.terminate("coordinator") == 0
        time.sleep(away_s)
        cluster.helpers.again("coordinator")
        back_s = time.monotonic()
        eventually(lambda: run.status().state is fusion.JobState.RUNNING, "the job runs, as the coordinator knows", 10)
        history = cluster.finishes(run, job)
    goes_on_undisturbed(history)
    assert len(steps_between(history, begin_s + 1.0, back_s)) >= 3


@pytest.fixture(scope="module")
def impatient_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """Nodes that end their work 12 s after an answer, and 45 s after it if nobody has had any."""
    settings = {"heartbeat_s": 2.0, "self_fence_s": 12.0, "lease_s": 30.0, "coordinator_grace_s": 45.0}
    with FaultCluster(tmp_path_factory.mktemp("impatient"), nodes=4, settings=settings) as made:
        yield made


def test_f8_the_coordinator_may_stay_away_for_longer_than_a_lease(impatient_nodes: FaultCluster) -> None:
    cluster = impatient_nodes
    cluster.heal()
    cluster.set_failpoints(paced(0.2))
    job = make_job(60)
    with cluster.running(job, step=3) as run:
        begin_s = time.monotonic()
        cluster.kill("coordinator")
        time.sleep(18.0)
        cluster.helpers.again("coordinator")
        back_s = time.monotonic()
        eventually(lambda: run.status().state is fusion.JobState.RUNNING, "the job runs, as the coordinator knows", 10)
        history = cluster.finishes(run, job)
    goes_on_undisturbed(history)
    finished = sorted(line["at_s"] for line in history.steps if begin_s < line["at_s"] < back_s)
    assert max(after - before for before, after in pairwise([begin_s, *finished, back_s])) < 4.0
    cluster.check_nothing_is_left()


def test_f8_after_the_grace_nodes_end_their_work_and_go_on_from_it_when_the_coordinator_is_back(
    impatient_nodes: FaultCluster,
) -> None:
    cluster = impatient_nodes
    cluster.heal()
    cluster.set_failpoints(paced(0.2))
    job = make_job(90)
    with cluster.running(job, step=3) as run:
        begin_s = time.monotonic()
        cluster.kill("coordinator")
        time.sleep(58.0)
        history = cluster.events(run.job_id)
        last_s = max(line["at_s"] for line in history.steps)
        assert 18.0 < last_s - begin_s < 52.0  # beyond the fence, not beyond the grace
        cluster.helpers.again("coordinator")
        run.wait(
            timeout=120.0
        )  # figures of steps that the coordinator heard of only after it had recovered may be missing
        history = cluster.validate(run, job, last_step=job.steps)
    assert len(history.epochs()) == 2
    assert history.lost_steps() <= 1
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("event", ["JobSubmitted", "JobPlanned"])
def test_f9_killed_at_a_commit_the_coordinator_comes_back_before_or_after_it_and_the_job_runs_once(
    cluster: FaultCluster, event: str, point: str
) -> None:
    cluster.restart_coordinator(f"store.{point}@kind={event}:kill9")
    job = make_job(3)
    with cluster.reviving("coordinator") as deaths, cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        assert [found.job_id for found in cluster.client().list() if not found.state.ended] == []
    assert len(deaths) == 1
    assert set(history.epochs().values()) == {0}
    planned = [line for line in history.plans if line["kind"] == "JobPlanned"]
    assert len(planned) == 1 or (event, point) == ("JobPlanned", "after_commit")  # committed, and not yet noted


def test_f9_killed_at_the_commit_of_a_checkpoint_the_coordinator_lists_it_whole_or_not_at_all(
    cluster: FaultCluster,
) -> None:
    kind = "kind=CheckpointCommitted:kill9"
    cluster.restart_coordinator(paced(0.1, f"store.before_commit@{kind}", f"store.after_commit@{kind}"))
    job = make_job(15, checkpoint=3)
    with cluster.reviving("coordinator") as deaths, cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        whole_checkpoints(cluster, run, 15)
    assert len(deaths) == 2
    goes_on_undisturbed(history)


def test_f4_killed_while_it_makes_a_checkpoint_the_coordinator_never_lists_half_of_one(cluster: FaultCluster) -> None:
    """Before there is a folder, between two files, before the folder has its name, and before it is committed."""
    places = ["begin", "stage@stage=1", "before_rename", "after_rename"]
    cluster.restart_coordinator(paced(0.1, *(f"checkpoint.{place}:kill9" for place in places)))
    job = make_job(60, checkpoint=3)  # so long that the last checkpoint finds a coordinator that has died often enough
    with cluster.reviving("coordinator") as deaths, cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        whole_checkpoints(cluster, run, 60)
    assert len(deaths) == len(places)
    goes_on_undisturbed(history)


def whole_checkpoints(cluster: FaultCluster, run: fusion.Run, newest: int) -> None:
    """Check that what is listed is what lies there, every file as its manifest says, up to step `newest`."""
    eventually(lambda: run.checkpoints() and run.checkpoints()[-1].step == newest, f"step {newest} is listed", 15.0)
    listed = {checkpoint.step: checkpoint for checkpoint in run.checkpoints()}
    folders = list((cluster.directory / "coordinator" / "checkpoints" / run.job_id).iterdir())
    assert {folder.name for folder in folders} == {f"step-{step}" for step in listed}
    for step, checkpoint in listed.items():
        files = json.loads(checkpoint.manifest)["files"]
        assert [file["digest"] for file in files] == [state.digest for state in checkpoint.states]
        for file in files:
            content = cluster.directory / "coordinator" / "checkpoints" / run.job_id / f"step-{step}" / file["name"]
            assert hashlib.sha256(content.read_bytes()).hexdigest() == file["sha256"]


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_f9_killed_while_it_takes_a_token_the_coordinator_gives_the_same_key_the_same_answer(
    cluster: FaultCluster, point: str
) -> None:
    cluster.restart_coordinator(f"store.{point}@kind=Enrolled:kill9")
    with cluster.reviving("coordinator") as deaths:
        join = parse_join_string(_token(cluster))
        csr = make_csr(new_key())
        address = f"{join.addresses[0].rpartition(':')[0]}:{join.enrol_port}"
        identities: list[str] = []

        def certified() -> bool:
            try:
                identities.append(caller_of_certificate(_call(join, address, "new", csr)).identity)
            except fusion.UnreachableError:
                return False
            return True

        eventually(certified, "the node is certified")
        assert caller_of_certificate(_call(join, address, "new", csr)).identity == identities[0]
    assert len(deaths) == 1
    with pytest.raises(fusion.AuthError):
        _call(join, address, "new", make_csr(new_key()))


def _token(cluster: FaultCluster) -> str:
    from fusion.job.client import Client

    with Client(cluster.address, cluster.directory / "coordinator" / "admin") as client:
        stub: Any = coordinator_pb2_grpc.AdminStub(client.channel)  # type: ignore[no-untyped-call]
        request = coordinator_pb2.CreateTokenRequest(request_id=random_id("req-", 20), role="node", valid_s=600.0)
        return str(stub.CreateToken(request, timeout=10.0).join_string)


def test_f39_subscribers_that_never_read_are_no_burden(cluster: FaultCluster) -> None:
    job = make_job(200)
    with cluster.submit(job) as run, cluster.client() as client:
        stub: Any = coordinator_pb2_grpc.JobsStub(client.channel)  # type: ignore[no-untyped-call]
        request = coordinator_pb2.FollowRequest(job_id=run.job_id, wait=True)
        silent = [stub.Follow(request, timeout=300.0) for _ in range(8)]
        next(silent[0])  # they do stand
        history = cluster.finishes(run, job)
        for stream in silent:
            stream.cancel()
    goes_on_undisturbed(history)
