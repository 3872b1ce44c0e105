"""The coordinator is killed, stopped, cut off from itself in time, or talked to over calls that get lost."""

from __future__ import annotations

import signal
import time
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
    gone = [line for line in history.of("coordinator", "committed") if line["kind"] == "NodeGone"]
    assert gone == []


def steps_between(history: History, begin_s: float, end_s: float) -> set[int]:
    """Return the steps that a stage finished in a time."""
    return {line["step"] for line in history.steps if begin_s < line["at_s"] < end_s}


def restarted_coordinator(cluster: FaultCluster, points: str) -> None:
    """Start the coordinator anew with other failpoints."""
    cluster.set_failpoints(points)
    cluster.terminate("coordinator")
    cluster.helpers.again("coordinator")
    eventually(lambda: set(cluster.node_states().values()) == {"idle"}, "the nodes are back")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["f7-kill9", "f32-sigterm"])
def test_f7_f32_training_goes_on_without_the_coordinator_and_nothing_is_lost(
    cluster: FaultCluster, how: signal.Signals
) -> None:
    cluster.set_failpoints(paced(0.12))
    job = make_job(36)
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


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
@pytest.mark.parametrize("event", ["JobSubmitted", "JobPlanned"])
def test_f9_killed_at_a_commit_the_coordinator_comes_back_before_or_after_it_and_the_job_runs_once(
    cluster: FaultCluster, event: str, point: str
) -> None:
    restarted_coordinator(cluster, f"store.{point}@kind={event}:kill9")
    job = make_job(3)
    with cluster.reviving("coordinator") as deaths, cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        assert [found.job_id for found in cluster.client().list() if not found.state.ended] == []
    assert len(deaths) == 1
    assert set(history.epochs().values()) == {0}
    planned = [line for line in history.plans if line["kind"] == "JobPlanned"]
    assert len(planned) == 1 or (event, point) == ("JobPlanned", "after_commit")  # committed, and not yet noted


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_f9_killed_while_it_takes_a_token_the_coordinator_gives_the_same_key_the_same_answer(
    cluster: FaultCluster, point: str
) -> None:
    restarted_coordinator(cluster, f"store.{point}@kind=Enrolled:kill9")
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
