"""The owner's calls to the coordinator: submit, look, follow, cancel, and bulk both ways. Knows no torch."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from fusion.base.address import join_address, split_address
from fusion.base.errors import AuthError, ConfigError, NotFoundError, UnreachableError, UsageError
from fusion.base.ids import is_id, random_id
from fusion.plan.types import Cluster
from fusion.protocol.cluster import cluster_from_proto
from fusion.protocol.job import JobSpec, job_to_proto
from fusion.protocol.jobstatus import (
    Checkpoint,
    JobStatus,
    LogLine,
    checkpoint_from_proto,
    log_from_proto,
    status_from_proto,
)
from fusion.protocol.metrics import StepMetrics, metrics_from_proto
from fusion.protocol.status import from_rpc_error
from fusion.protocol.timeline import StageSpans, stage_spans_from_proto
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.blobs import BlobClient
from fusion.transport.channels import RETRYABLE, backoff_s, check_server, open_channel, with_retries
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")
Event = StepMetrics | LogLine | JobStatus

DEFAULT_PORT = 7443
CALL_S = 30.0  #: how long a call is tried again before UnreachableError
PATIENCE_S = 30.0  #: how long a follower goes on without contact
_STREAM_S = 480.0  #: a stream is renewed after this: servers end connections that are an hour old


def fusion_home() -> Path:
    """Return the directory that holds this user's state: $FUSION_HOME, else ~/.fusion."""
    return Path(_setting("FUSION_HOME") or Path.home() / ".fusion")


def _setting(name: str) -> str:
    """Return an environment variable, "" if it is not set; ConfigError if it is set to nothing."""
    value = os.environ.get(name)
    if value is not None and not value.strip():
        raise ConfigError(f"environment variable {name} is set but empty; unset it or give it a path")
    return value or ""


def credentials_directory() -> Path:
    """Return where this user's credentials lie: $FUSION_CREDENTIALS, else the directory `owner` of `fusion_home`."""
    return Path(_setting("FUSION_CREDENTIALS") or fusion_home() / "owner")


def owner_credentials(credentials: Credentials | str | os.PathLike[str] | None = None) -> Credentials:
    """Return the credentials to use: those given (or in the directory given), or those of `credentials_directory`.

    AuthError says how to get some.
    """
    if isinstance(credentials, Credentials):
        return credentials
    directory = credentials_directory() if credentials is None else Path(credentials)
    if not directory.is_dir():
        raise AuthError(
            f"no credentials in {directory}; run 'fusion join JOINSTRING' with a join string from "
            f"'fusion-coordinator token create --role owner', or point $FUSION_CREDENTIALS at some"
        )
    return Credentials.load(directory)


class Client:
    """A connection to one coordinator. Close it, or use it in a `with` block.

    Calls are tried again for a while when the coordinator does not answer; each raises an error of our tree. With
    `hasty` not where nothing listens, as long as no call was answered: for commands at which somebody waits.
    It belongs to the process that made it: gRPC does not survive a fork.
    """

    def __init__(
        self,
        address: str | None = None,
        credentials: Credentials | str | os.PathLike[str] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        hasty: bool = False,
    ) -> None:
        self.credentials = owner_credentials(credentials)
        self.credentials.check(time.time())
        host, port = split_address("coordinator", address or self.credentials.coordinator, DEFAULT_PORT)
        self.address = join_address(host, port)
        self.patience_s = patience_s
        self._hasty = hasty
        self._pid = os.getpid()
        name = coordinator_server_name(self.credentials.cluster)
        self._channel = open_channel(self.address, self.credentials, name)
        self._closer = weakref.finalize(self, self._channel.close)
        make_stub: Callable[[grpc.Channel], Any] = coordinator_pb2_grpc.JobsStub
        self._jobs = make_stub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._closer()

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsageError("a connection cannot be used in a forked process; make one there with fusion.attach()")
        if not self._closer.alive:
            raise UsageError("this connection was closed; make another one with fusion.attach()")

    def _call(self, what: str, call: Callable[[float], T]) -> T:
        self._check_usable()
        answer = with_retries(call, CALL_S, f"{what} (coordinator {self.address})", until_refused=self._hasty)
        self._hasty = False
        return answer

    @property
    def channel(self) -> grpc.Channel:
        """The connection itself, for services beside Jobs and Blobs."""
        self._check_usable()
        return self._channel

    @property
    def blobs(self) -> BlobClient:
        """The coordinator's store."""
        return BlobClient(self.channel)

    def submit(self, spec: JobSpec, request_id: str) -> str:
        """Start a job and return its id. The same `request_id` again gives the same job."""
        request = coordinator_pb2.SubmitRequest(request_id=request_id, spec=job_to_proto(spec))
        answer: coordinator_pb2.SubmitResponse = self._call("submit", lambda s: self._jobs.Submit(request, timeout=s))
        return answer.job_id

    def get(self, job_id: str) -> JobStatus:
        """Return a job's status; NotFoundError if there is none of that id."""
        request = coordinator_pb2.GetJobRequest(job_id=check_job_id(job_id))
        return status_from_proto(self._call(f"job {job_id}", lambda s: self._jobs.Get(request, timeout=s)))

    def timeline(self, job_id: str) -> list[StageSpans]:
        """Return what each stage did when in the last few steps, by its own clock."""
        request = coordinator_pb2.TimelineRequest(job_id=check_job_id(job_id))
        answer: coordinator_pb2.TimelineResponse = self._call(
            f"job {job_id}", lambda s: self._jobs.Timeline(request, timeout=s)
        )
        return [stage_spans_from_proto(item) for item in answer.stages]

    def list(self) -> list[JobStatus]:
        """Return the caller's jobs, as the coordinator orders them."""
        request = coordinator_pb2.ListJobsRequest()
        answer: coordinator_pb2.ListJobsResponse = self._call("jobs", lambda s: self._jobs.List(request, timeout=s))
        return [status_from_proto(job) for job in answer.jobs]

    def cancel(self, job_id: str, reason: str) -> JobStatus:
        """Cancel a job and return its status; StateError if it has ended."""
        request = coordinator_pb2.CancelRequest(
            request_id=random_id("req-", 20), job_id=check_job_id(job_id), reason=reason
        )
        return status_from_proto(self._call(f"cancel {job_id}", lambda s: self._jobs.Cancel(request, timeout=s)))

    def move(self, job_id: str, cuts: Sequence[int], nodes: Sequence[str]) -> JobStatus:
        """Let a running job go on under other cuts on other nodes (names or ids, one a stage), and return its status.

        Without cuts the coordinator cuts the job for these nodes. StateError says why the job cannot move now.
        """
        request = coordinator_pb2.MoveRequest(
            request_id=random_id("req-", 20), job_id=check_job_id(job_id), cuts=cuts, nodes=nodes
        )
        return status_from_proto(self._call(f"move {job_id}", lambda s: self._jobs.Move(request, timeout=s)))

    def pause(self, job_id: str) -> JobStatus:
        """Let a job stop at a step's end, and return its status; it keeps its state until it is resumed."""
        request = coordinator_pb2.PauseRequest(request_id=random_id("req-", 20), job_id=check_job_id(job_id))
        return status_from_proto(self._call(f"pause {job_id}", lambda s: self._jobs.Pause(request, timeout=s)))

    def resume(self, job_id: str, from_step: int | None = None) -> JobStatus:
        """Let a job go on that pauses, has failed or was cancelled, and return its status.

        from_step: of a checkpoint, or 0 for the start; by default where it paused, or its last checkpoint.
        """
        request = coordinator_pb2.ResumeRequest(
            request_id=random_id("req-", 20), job_id=check_job_id(job_id), from_step=from_step
        )
        return status_from_proto(self._call(f"resume {job_id}", lambda s: self._jobs.Resume(request, timeout=s)))

    def checkpoints(self, job_id: str) -> Sequence[Checkpoint]:
        """Return a job's checkpoints, the earliest step first."""
        request = coordinator_pb2.ListCheckpointsRequest(job_id=check_job_id(job_id))
        answer: coordinator_pb2.ListCheckpointsResponse = self._call(
            f"checkpoints of {job_id}", lambda s: self._jobs.ListCheckpoints(request, timeout=s)
        )
        return [checkpoint_from_proto(item) for item in answer.checkpoints]

    def info(self) -> coordinator_pb2.InfoResponse:
        """Return what the coordinator says about itself and the caller."""
        make_stub: Callable[[grpc.Channel], Any] = coordinator_pb2_grpc.AdminStub
        stub = make_stub(self.channel)
        answer: coordinator_pb2.InfoResponse = self._call(
            "info", lambda s: stub.Info(coordinator_pb2.InfoRequest(), timeout=s)
        )
        return answer

    def cluster(self, *, idle_only: bool = False) -> Cluster:
        """Return the nodes that are in contact and the links between them, as the coordinator's planner sees them."""
        make_stub: Callable[[grpc.Channel], Any] = coordinator_pb2_grpc.AdminStub
        stub = make_stub(self.channel)
        answer = self._call("cluster", lambda s: stub.Cluster(coordinator_pb2.ClusterRequest(), timeout=s))
        return cluster_from_proto(answer, idle_only=idle_only)

    def follow(
        self,
        job_id: str,
        *,
        after_step: int = 0,
        after_log: int = 0,
        wait: bool = True,
        deadline_s: float | None = None,
    ) -> Iterator[Event]:
        """Yield a job's metrics of later steps, its later log lines, and its status whenever that changes.

        With `wait` it goes on until the job has ended; the last event is then the final status. A broken stream is
        taken up where it stopped, as long as the coordinator answers again within `patience_s`; otherwise
        UnreachableError, and nothing is lost by following again later. TimeoutError once `deadline_s` (of
        time.monotonic) is reached.
        """
        self._check_usable()
        request = coordinator_pb2.FollowRequest(
            job_id=check_job_id(job_id), after_step=after_step, after_log=after_log, wait=wait
        )
        contact_s, attempt, problem = time.monotonic(), 0, ""
        while True:
            stream = self._jobs.Follow(request, timeout=_stream_s(deadline_s), wait_for_ready=False)
            try:
                for message in stream:
                    contact_s, attempt = time.monotonic(), 0
                    event = _event(message)
                    if isinstance(event, StepMetrics):
                        request.after_step = max(request.after_step, event.step)
                    elif isinstance(event, LogLine):
                        request.after_log += 1
                    if event is not None:
                        yield event
                    if isinstance(event, JobStatus) and event.state.ended:
                        return
                if not wait:
                    return
            except grpc.RpcError as error:
                connected = _quiet_end(error)
                check_server(error, f"job {job_id} (coordinator {self.address})")
                if error.code() not in RETRYABLE:
                    raise from_rpc_error(error, f"job {job_id} (coordinator {self.address})") from error
                contact_s = time.monotonic() if connected else contact_s
                problem = str(error.details() or error.code().name)
            finally:
                stream.cancel()
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(f"job {job_id} has not ended in time; it goes on")
            attempt = self._pause(job_id, attempt, contact_s, problem)

    def _pause(self, job_id: str, attempt: int, contact_s: float, problem: str) -> int:
        """Wait before another try, or give up; return the number of the next try."""
        left_s = contact_s + self.patience_s - time.monotonic()
        if left_s <= 0:
            raise UnreachableError(
                f"coordinator {self.address} has not answered for {self.patience_s:.0f} s ({problem}); "
                f"job {job_id} may go on: look again with fusion.attach({job_id!r}) or 'fusion status {job_id}'"
            )
        time.sleep(min(backoff_s(attempt), left_s))
        return attempt + 1


def live_cluster(
    address: str | None = None,
    credentials: Credentials | str | os.PathLike[str] | None = None,
    *,
    idle_only: bool = False,
) -> Cluster:
    """Return a running cluster as planners see it: nodes with speed, memory and site, and the measured links."""
    with Client(address, credentials) as client:
        return client.cluster(idle_only=idle_only)


def _stream_s(deadline_s: float | None) -> float:
    return _STREAM_S if deadline_s is None else min(_STREAM_S, max(0.001, deadline_s - time.monotonic()))


def _quiet_end(error: grpc.RpcError) -> bool:
    """Whether a stream ended at its own time limit, so that the coordinator was there all along."""
    return bool(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


def _event(message: coordinator_pb2.JobEvent) -> Event | None:
    match message.WhichOneof("body"):
        case "metrics":
            return metrics_from_proto(message.metrics)
        case "log":
            return log_from_proto(message.log)
        case "status":
            return status_from_proto(message.status)
    return None


def check_job_id(job_id: str) -> str:
    """Return `job_id`; NotFoundError if no job can have it."""
    if not isinstance(job_id, str) or not is_id(job_id):
        raise NotFoundError(f"there is no job {str(job_id)[:60]!r}; 'fusion status' lists your jobs")
    return job_id
