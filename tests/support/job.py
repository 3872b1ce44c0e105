"""A scripted coordinator with real TLS and sockets, for tests of the owner's client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from fusion.base.ids import ClusterId
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import server_credentials
from fusion.wire.v1 import coordinator_pb2 as messages
from fusion.wire.v1 import coordinator_pb2_grpc as services
from fusion.wire.v1 import node_pb2

JOB = "job-abcdefghij"
Script = Callable[[Any, Any], Iterator[messages.JobEvent]]


def status(state: int, step: int = 0, reason: str = "") -> messages.JobEvent:
    return messages.JobEvent(status=messages.JobStatus(job_id=JOB, state=state, step=step, steps=9, reason=reason))


def metrics(step: int) -> messages.JobEvent:
    return messages.JobEvent(metrics=messages.StepMetrics(step=step, loss=1.0 / step))


def log(text: str) -> messages.JobEvent:
    return messages.JobEvent(log=node_pb2.LogLine(text=text, origin="n1", level="INFO", wall_s=1.5))


class ScriptedCoordinator(services.JobsServicer):
    """Answers Follow with one script after the other; counts and keeps every request."""

    def __init__(self) -> None:
        ca = CertificateAuthority.create(ClusterId("abcdefghij"), time.time())
        self._server_credentials = ca.new_credentials(Role.COORDINATOR, "c", "", time.time())
        self.owner = ca.new_credentials(Role.OWNER, "me", "127.0.0.1:1", time.time())
        self.scripts: list[Script] = []
        self.follows: list[messages.FollowRequest] = []
        self.submits: list[messages.SubmitRequest] = []
        self.submit_failures = 0
        self.port = 0
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def credentials(self) -> Credentials:
        return self.owner

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        services.add_JobsServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self.port}"
        self.port = self._server.add_secure_port(address, server_credentials(self._server_credentials))
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def Follow(self, request: messages.FollowRequest, context: Any) -> Iterator[messages.JobEvent]:  # noqa: N802
        self.follows.append(messages.FollowRequest.FromString(request.SerializeToString()))
        yield from self.scripts.pop(0)(request, context)

    def Get(self, request: messages.GetJobRequest, context: Any) -> messages.JobStatus:  # noqa: N802
        if request.job_id != JOB:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no job {request.job_id}")
        return status(messages.JOB_STATE_RUNNING, 3).status

    def Submit(self, request: messages.SubmitRequest, context: Any) -> messages.SubmitResponse:  # noqa: N802
        self.submits.append(request)
        if self.submit_failures:
            self.submit_failures -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
        return messages.SubmitResponse(job_id=JOB)
