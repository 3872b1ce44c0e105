"""The operator's calls to the running coordinator, with the credentials in the state directory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fusion.base.address import join_address, split_address
from fusion.base.errors import UsageError
from fusion.base.ids import random_id
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.channels import open_channel, with_retries
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from fusion_coordinator.statedir import StateDir

R = TypeVar("R")
PATIENCE_S = 10.0
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared and replaced, never bound
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(field: str, text: str) -> float:
    """Return the seconds that `text` states, such as "90s", "15m" or "7d"."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"{field}: {text[:40]!r} is not a duration; write for example 90s, 15m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


class Admin:
    """A connection to the coordinator of one state directory. Use it in a `with` block."""

    def __init__(self, directory: Path) -> None:
        state = StateDir(directory)
        state.config()  # tells whoever is in the wrong directory
        credentials = Credentials.load(state.admin)
        credentials.check(time.time())
        host, port = split_address("server.json", state.running().address)
        self.address = join_address(_LOOPBACK.get(host, host), port)
        self._channel = open_channel(self.address, credentials, coordinator_server_name(credentials.cluster))
        self._admin: Any = coordinator_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._jobs: Any = coordinator_pb2_grpc.JobsStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self._channel.close()

    def _call(self, what: str, call: Callable[[float], R]) -> R:
        return with_retries(
            call, PATIENCE_S, f"{what} (coordinator {self.address}; is 'fusion-coordinator serve' running?)"
        )

    def create_token(self, role: str, valid_s: float) -> str:
        """Return a new join string."""
        request = coordinator_pb2.CreateTokenRequest(request_id=random_id("req-", 20), role=role, valid_s=valid_s)
        return str(self._call("token create", lambda s: self._admin.CreateToken(request, timeout=s)).join_string)

    def nodes(self) -> list[coordinator_pb2.NodeStatus]:
        """Return all nodes that ever registered."""
        request = coordinator_pb2.ListNodesRequest()
        return list(self._call("nodes", lambda s: self._admin.ListNodes(request, timeout=s)).nodes)

    def jobs(self) -> list[coordinator_pb2.JobStatus]:
        """Return the jobs of all owners, the newest first."""
        request = coordinator_pb2.ListJobsRequest()
        return list(self._call("jobs", lambda s: self._jobs.List(request, timeout=s)).jobs)

    def revoke(self, identity: str) -> None:
        """Withdraw an identity."""
        request = coordinator_pb2.RevokeRequest(request_id=random_id("req-", 20), identity=identity)
        self._call("revoke", lambda s: self._admin.Revoke(request, timeout=s))

    def info(self) -> coordinator_pb2.InfoResponse:
        """Return what the coordinator says of itself."""
        request = coordinator_pb2.InfoRequest()
        answer: coordinator_pb2.InfoResponse = self._call("info", lambda s: self._admin.Info(request, timeout=s))
        return answer
