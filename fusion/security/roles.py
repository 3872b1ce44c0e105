"""Who may call what: a table of all methods, and the interceptors that hold it on both kinds of server.

What is not in the table is refused. A call is judged each time, because a connection outlives a certificate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio

from fusion.base.clock import Clock, SystemClock
from fusion.base.errors import AuthError
from fusion.base.ids import ClusterId
from fusion.security.credentials import Role
from fusion.security.handlers import guard_aio, guard_sync
from fusion.security.tls import Caller, caller

_NODE = frozenset({Role.NODE})
_OWNERS = frozenset({Role.OWNER, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})
_NOBODY: frozenset[Role] = frozenset()

#: Every method of every service, by full name. Those of Enrolment stand open on a port of their own, to callers without
#: a valid certificate; no certificate lets anybody call them elsewhere.
METHOD_ROLES: dict[str, frozenset[Role]] = {
    "/fusion.wire.v1.Enrolment/Enrol": _NOBODY,
    "/fusion.wire.v1.Enrolment/RenewExpired": _NOBODY,
    "/fusion.wire.v1.NodeControl/Register": _NODE,
    "/fusion.wire.v1.NodeControl/Heartbeat": _NODE,
    "/fusion.wire.v1.NodeControl/Watch": _NODE,
    "/fusion.wire.v1.NodeControl/ReportStage": _NODE,
    "/fusion.wire.v1.NodeControl/ReportMetrics": _NODE,
    "/fusion.wire.v1.NodeControl/ReportLinks": _NODE,
    "/fusion.wire.v1.NodeControl/ProbeReachability": _NODE,
    "/fusion.wire.v1.NodeControl/Renew": _NODE,
    "/fusion.wire.v1.NodeControl/Leave": _NODE,
    "/fusion.wire.v1.NodeControl/ReportStates": _NODE,
    "/fusion.wire.v1.NodeControl/Drain": _NODE,
    "/fusion.wire.v1.Jobs/Submit": _OWNERS,
    "/fusion.wire.v1.Jobs/Get": _OWNERS,
    "/fusion.wire.v1.Jobs/List": _OWNERS,
    "/fusion.wire.v1.Jobs/Follow": _OWNERS,
    "/fusion.wire.v1.Jobs/Timeline": _OWNERS,
    "/fusion.wire.v1.Jobs/Cancel": _OWNERS,
    "/fusion.wire.v1.Jobs/Move": _OWNERS,
    "/fusion.wire.v1.Jobs/Pause": _OWNERS,
    "/fusion.wire.v1.Jobs/Resume": _OWNERS,
    "/fusion.wire.v1.Jobs/ListCheckpoints": _OWNERS,
    "/fusion.wire.v1.Blobs/Stat": _OWNERS | _NODE,
    "/fusion.wire.v1.Blobs/Put": _OWNERS | _NODE,
    "/fusion.wire.v1.Blobs/Get": _OWNERS | _NODE,
    "/fusion.wire.v1.Admin/CreateToken": _ADMIN,
    "/fusion.wire.v1.Admin/ListNodes": _OWNERS,
    "/fusion.wire.v1.Admin/Cluster": _OWNERS,
    "/fusion.wire.v1.Admin/Revoke": _ADMIN,
    "/fusion.wire.v1.Admin/Info": _OWNERS | _NODE,
    "/fusion.wire.v1.Peer/Exchange": _NODE,
    "/fusion.wire.v1.Probe/Ping": _NODE,
    "/fusion.wire.v1.Probe/Upload": _NODE,
    "/fusion.wire.v1.Probe/Download": _NODE,
    "/fusion.wire.v1.Relay/Connect": _NODE,
    "/fusion.wire.v1.Relay/Accept": _NODE,
}

ERROR_KEY = "fusion-error"  #: trailing metadata: the class of our error tree that a status stands for


class Access:
    """Decides about one call. `revoked` is asked each time."""

    def __init__(
        self,
        cluster: ClusterId,
        *,
        revoked: Callable[[], Container[str]] = frozenset,
        clock: Clock | None = None,
        roles: Mapping[str, frozenset[Role]] | None = None,
    ) -> None:
        self._cluster, self._revoked = cluster, revoked
        self._clock = clock or SystemClock()
        self._roles = METHOD_ROLES if roles is None else roles

    def check(self, method: str, context: Any) -> Caller:
        """Return the caller if it may call `method` now; _Refused otherwise."""
        try:
            who = caller(context)
        except AuthError as error:
            raise _Refused(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
        problem = self._identity_problem(who)
        if problem:
            raise _Refused(grpc.StatusCode.UNAUTHENTICATED, problem)
        if who.role not in self._roles.get(method, _NOBODY):
            raise _Refused(grpc.StatusCode.PERMISSION_DENIED, f"a {who.role} may not call {method.lstrip('/')}")
        return who

    def _identity_problem(self, who: Caller) -> str:
        now_s = self._clock.wall_s()
        if who.cluster != self._cluster:
            return f"the certificate is of cluster {who.cluster}, this is {self._cluster}"
        if now_s > who.valid_until_s:
            return f"certificate expired {now_s - who.valid_until_s:.0f} s ago; renew it or join again"
        # TLS has compared the begin of its validity when the connection was made. A clock that is put back later must
        # not throw everybody out.
        if who.identity in self._revoked():
            return f"the certificate of {who.identity} was revoked; join again with a new token"
        return ""


class _Refused(Exception):  # noqa: N818
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class AioAuthorizer(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Guards every handler of a `grpc.aio` server."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)

        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            try:
                self._access.check(method, context)
            except _Refused as refused:
                await context.abort(refused.code, refused.message, ((ERROR_KEY, AuthError.__name__),))
            yield

        return guard_aio(handler, guard)


class Authorizer(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Guards every handler of a threaded server."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)

        @contextmanager
        def guard(context: Any) -> Iterator[None]:
            try:
                self._access.check(method, context)
            except _Refused as refused:
                context.set_trailing_metadata(((ERROR_KEY, AuthError.__name__),))
                context.abort(refused.code, refused.message)
            yield

        return guard_sync(handler, guard)
