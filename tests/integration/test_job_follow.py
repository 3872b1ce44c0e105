"""Following a job over real TLS: nothing twice, nothing left out, and an end whatever happens to the coordinator."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fusion.base.errors import AuthError, JobError, NotFoundError, UnreachableError, UsageError
from fusion.graph.dag import TensorSpec
from fusion.job.client import Client
from fusion.job.run import Run, attach
from fusion.protocol.job import BlobRef, DataField, DataFile, DataSpec, JobSpec, OptimizerSpec, RowSource
from fusion.protocol.jobstatus import JobState
from fusion.security.credentials import Credentials
from fusion.wire.v1 import coordinator_pb2 as messages
from tests.support.job import JOB, ScriptedCoordinator, log, metrics, status

QUEUED, RUNNING = messages.JOB_STATE_QUEUED, messages.JOB_STATE_RUNNING
SUCCEEDED, FAILED = messages.JOB_STATE_SUCCEEDED, messages.JOB_STATE_FAILED


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    server = ScriptedCoordinator()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(coordinator: ScriptedCoordinator) -> Iterator[Run]:
    with Run(Client(coordinator.address, coordinator.credentials, patience_s=3.0), JOB) as made:
        yield made


def _breaks(context: Any) -> None:
    import grpc

    context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")


def test_metrics_come_in_order_and_end_with_the_job(coordinator: ScriptedCoordinator, run: Run) -> None:
    def script(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield status(QUEUED)
        yield status(RUNNING)
        yield from (metrics(step) for step in (1, 2, 3))
        yield status(SUCCEEDED, 3)

    coordinator.scripts = [script]
    assert [item.step for item in run.metrics()] == [1, 2, 3]
    assert coordinator.follows[0].wait


def test_a_broken_stream_is_taken_up_after_the_last_step(coordinator: ScriptedCoordinator, run: Run) -> None:
    def first(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield metrics(1)
        yield metrics(2)
        _breaks(context)

    def second(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield status(RUNNING, request.after_step)
        yield metrics(request.after_step + 1)

    def third(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield metrics(request.after_step + 1)
        yield status(SUCCEEDED, 4)

    coordinator.scripts = [first, second, third]
    assert [item.step for item in run.metrics()] == [1, 2, 3, 4]
    assert [request.after_step for request in coordinator.follows] == [0, 2, 3]


def test_a_restarted_coordinator_is_found_again(coordinator: ScriptedCoordinator, run: Run) -> None:
    stopped = threading.Event()

    def first(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield metrics(1)
        stopped.wait(10)

    def second(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield metrics(2)
        yield status(SUCCEEDED, 2)

    coordinator.scripts = [first, second]
    steps = run.metrics()
    assert next(steps).step == 1
    coordinator.stop()
    stopped.set()
    coordinator.start()
    assert [item.step for item in steps] == [2]


@pytest.mark.slow
def test_a_coordinator_that_stays_away_is_told_with_the_way_back(coordinator: ScriptedCoordinator, run: Run) -> None:
    stopped = threading.Event()

    def script(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield metrics(1)
        stopped.wait(10)

    coordinator.scripts = [script]
    steps = run.metrics()
    next(steps)
    coordinator.stop()
    stopped.set()
    with pytest.raises(UnreachableError, match=rf"has not answered for 3 s .* fusion.attach\('{JOB}'\)") as caught:
        next(steps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [FAILED, messages.JOB_STATE_CANCELLED])
def test_a_failed_job_raises_its_reason(coordinator: ScriptedCoordinator, run: Run, state: int) -> None:
    def script(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        if request.after_step == 0:
            yield metrics(1)
        yield status(state, 1, "node n2 is lost")

    coordinator.scripts = [script, script]
    steps = run.metrics()
    assert next(steps).step == 1
    with pytest.raises(JobError, match=f"{JOB} (failed|cancelled) after step 1: node n2 is lost"):
        next(steps)
    with pytest.raises(JobError, match="node n2 is lost"):
        run.wait()


def test_logs_go_on_where_they_were(coordinator: ScriptedCoordinator, run: Run) -> None:
    def first(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield log("a")
        yield log("b")
        _breaks(context)

    def second(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield log("c")
        yield status(FAILED, 1, "x")

    coordinator.scripts = [first, second]
    assert [line.text for line in run.logs(follow=True)] == ["a", "b", "c"]
    assert [request.after_log for request in coordinator.follows] == [0, 2]


def test_logs_without_following_end_at_once(coordinator: ScriptedCoordinator, run: Run) -> None:
    def script(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield status(RUNNING)
        yield log("a")

    coordinator.scripts = [script]
    assert [(line.text, line.origin) for line in run.logs()] == [("a", "n1")]
    assert not coordinator.follows[0].wait


def test_waiting_can_be_limited_and_the_job_goes_on(coordinator: ScriptedCoordinator, run: Run) -> None:
    ended = threading.Event()

    def hangs(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield status(RUNNING)
        ended.wait(10)

    def ends(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield status(SUCCEEDED, 9)

    coordinator.scripts = [hangs, ends]
    with pytest.raises(TimeoutError, match=f"{JOB} has not ended in time; it goes on"):
        run.wait(timeout=0.4)
    ended.set()
    assert run.wait(timeout=5).state is JobState.SUCCEEDED


def test_unknown_jobs_are_refused_before_and_by_the_coordinator(coordinator: ScriptedCoordinator) -> None:
    with pytest.raises(NotFoundError, match="there is no job job-zzzzzzzzzz"):
        attach("job-zzzzzzzzzz", coordinator.address, coordinator.credentials)
    for text in ("../a", "", "job-\n", "x" * 100):
        with pytest.raises(NotFoundError, match="there is no job"):
            attach(text, coordinator.address, coordinator.credentials)
    with attach(JOB, coordinator.address, coordinator.credentials) as run:
        assert run.status().step == 3


def _spec() -> JobSpec:
    data = DataSpec((DataField("x", TensorSpec("float32", (2,)), RowSource(0, "x")),), (DataFile(node_path="/d"),), 4)
    blob = BlobRef("a" * 64, 1)
    return JobSpec("j", blob, blob, data, OptimizerSpec("sgd", 0.1), 2, 1, 3)


def test_a_submission_is_tried_again_under_the_same_request_id(coordinator: ScriptedCoordinator) -> None:
    coordinator.submit_failures = 1
    with Client(coordinator.address, coordinator.credentials) as client:
        assert client.submit(_spec(), "req-1") == JOB
    assert [request.request_id for request in coordinator.submits] == ["req-1", "req-1"]
    assert coordinator.submits[0].spec == coordinator.submits[1].spec


def test_b31_use_after_close_and_in_a_fork(coordinator: ScriptedCoordinator) -> None:
    client = Client(coordinator.address, coordinator.credentials)
    client._pid = os.getpid() + 1  # as a forked child finds it
    with pytest.raises(UsageError, match="forked process"):
        client.get(JOB)
    client._pid = os.getpid()
    client.close()
    client.close()
    for use in (lambda: client.get(JOB), lambda: list(client.follow(JOB)), lambda: client.blobs):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_b31_several_threads_may_share_a_run(coordinator: ScriptedCoordinator, run: Run) -> None:
    def script(request: Any, context: Any) -> Iterator[messages.JobEvent]:
        yield from (metrics(step) for step in range(1, 50))
        yield status(SUCCEEDED, 49)

    coordinator.scripts = [script] * 3
    seen: list[list[int]] = []
    threads = [threading.Thread(target=lambda: seen.append([item.step for item in run.metrics()])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [list(range(1, 50))] * 3


def test_b33_an_expired_certificate_is_told_before_anything_is_sent(coordinator: ScriptedCoordinator) -> None:
    from fusion.security.ca import CertificateAuthority
    from fusion.security.credentials import Role

    past_s = time.time() - 20 * 365 * 86400
    ca = CertificateAuthority.create(coordinator.owner.cluster, past_s)
    expired: Credentials = ca.new_credentials(Role.OWNER, "old", coordinator.address, past_s)
    with pytest.raises(AuthError, match="expired"):
        Client(coordinator.address, expired)
