"""The daemon's calls to the coordinator: every one with a deadline, heartbeats on a channel of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import grpc.aio

from fusion.base.errors import FusionError, UnreachableError
from fusion.protocol.status import from_rpc_error
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.channels import CLIENT_OPTIONS, open_aio_channel
from fusion.wire.v1 import node_pb2, node_pb2_grpc

T = TypeVar("T")

_END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its type stubs

HEARTBEAT_DEADLINE_S = 4.0
CALL_DEADLINE_S = 10.0
PROBE_DEADLINE_S = 20.0  #: the coordinator itself waits for the connection
LEAVE_DEADLINE_S = 2.0
WATCH_SILENCE_S = 25.0  #: the coordinator pings far more often
#: A coordinator that comes back is found well within a lease; grpc's own waits would grow to 15 s.
CHANNEL_OPTIONS = (
    *(option for option in CLIENT_OPTIONS if "reconnect_backoff" not in option[0]),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # what one attempt may take, with its TLS handshake
    ("grpc.max_reconnect_backoff_ms", 3_000),
)
OLD_CHANNEL_S = 60.0  #: how long calls under way may go on over a replaced channel


class Control:
    """A channel for calls and one for heartbeats, so that no bulk ever delays a heartbeat. Use inside a running loop.

    Every method raises an error of our tree: UnreachableError when another try may help, AuthError when the
    certificate is refused, StateError or NotFoundError when the registration is no longer known.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._open(credentials)
        self._closing: set[asyncio.Task[None]] = set()

    def _open(self, credentials: Credentials) -> None:
        self.address = credentials.coordinator
        name = coordinator_server_name(credentials.cluster)
        self._channels = [open_aio_channel(self.address, credentials, name, CHANNEL_OPTIONS) for _ in range(2)]
        self._calls, self._heartbeats = (_stub(channel) for channel in self._channels)

    def replace(self, credentials: Credentials) -> None:
        """Make new calls with renewed credentials; calls under way may end over the old channels."""
        old = self._channels
        self._open(credentials)
        task = asyncio.get_running_loop().create_task(_close_later(old), name="old-channels")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels; grpc never does by itself."""
        for task in self._closing:
            task.cancel()
        for channel in self._channels:
            await channel.close(None)

    async def register(self, request: node_pb2.RegisterRequest) -> node_pb2.RegisterResponse:
        """Register this node, which ends its earlier registration."""
        return await self._call(self._calls.Register(request, timeout=CALL_DEADLINE_S))

    async def heartbeat(self, request: node_pb2.HeartbeatRequest) -> node_pb2.HeartbeatResponse:
        """Renew the lease."""
        return await self._call(self._heartbeats.Heartbeat(request, timeout=HEARTBEAT_DEADLINE_S))

    async def report_stage(self, request: node_pb2.StageReport) -> node_pb2.StageReportResponse:
        """Tell about a stage's state; safe to repeat."""
        return await self._call(self._calls.ReportStage(request, timeout=CALL_DEADLINE_S))

    async def report_metrics(self, request: node_pb2.MetricsReport) -> node_pb2.MetricsReportResponse:
        """Pass on figures and log lines."""
        return await self._call(self._calls.ReportMetrics(request, timeout=CALL_DEADLINE_S))

    async def probe(self, address: str, nonce: bytes) -> node_pb2.ProbeResponse:
        """Ask the coordinator whether it reads `nonce` at `address`."""
        request = node_pb2.ProbeRequest(address=address, nonce=nonce)
        return await self._call(self._calls.ProbeReachability(request, timeout=PROBE_DEADLINE_S))

    async def report_links(self, request: node_pb2.LinksReport) -> node_pb2.LinksReportResponse:
        """Tell what probes have found."""
        return await self._call(self._calls.ReportLinks(request, timeout=CALL_DEADLINE_S))

    async def report_states(self, report: node_pb2.StatesReport) -> node_pb2.StatesReportResponse:
        """Tell which states are kept here; replaces what was told before."""
        return await self._call(self._calls.ReportStates(report, timeout=CALL_DEADLINE_S))

    async def renew(self, csr_der: bytes) -> bytes:
        """Return a new certificate (PEM) for the same key."""
        response: node_pb2.RenewResponse = await self._call(
            self._calls.Renew(node_pb2.RenewRequest(csr_der=csr_der), timeout=CALL_DEADLINE_S)
        )
        return response.certificate_pem

    async def drain(self, incarnation: int, reason: str) -> str:
        """Ask that jobs go on without this node; return what still needs it, or nothing. To be asked again."""
        request = node_pb2.DrainRequest(incarnation=incarnation, reason=reason)
        answer: node_pb2.DrainResponse = await self._call(self._calls.Drain(request, timeout=CALL_DEADLINE_S))
        return "" if answer.done else answer.waits_for or "a job"

    async def leave(self, incarnation: int, reason: str) -> None:
        """Tell that this node goes."""
        request = node_pb2.LeaveRequest(incarnation=incarnation, reason=reason)
        await self._call(self._calls.Leave(request, timeout=LEAVE_DEADLINE_S))

    async def watch(self, incarnation: int) -> AsyncIterator[node_pb2.Command]:
        """Yield commands until the coordinator ends the stream; UnreachableError after WATCH_SILENCE_S of silence."""
        call = self._calls.Watch(node_pb2.WatchRequest(incarnation=incarnation))
        try:
            while True:
                # Not wait_for: a read that fails in the moment of our own cancellation would hide it.
                async with asyncio.timeout(WATCH_SILENCE_S):
                    command = await self._call(call.read())
                if command is _END_OF_STREAM:
                    return
                yield command
        except TimeoutError:
            raise UnreachableError(f"coordinator {self.address}: silent for {WATCH_SILENCE_S:.0f} s") from None
        finally:
            call.cancel()

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc_error(error, f"coordinator {self.address}") from None


def _stub(channel: grpc.aio.Channel) -> Any:
    return node_pb2_grpc.NodeControlStub(channel)  # type: ignore[no-untyped-call]


def may_pass(error: FusionError) -> bool:
    """Whether the same call may succeed later: nothing answered, or the coordinator itself failed over it."""
    return isinstance(error, UnreachableError) or type(error) is FusionError


async def _close_later(channels: list[grpc.aio.Channel]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(OLD_CHANNEL_S)
    for channel in channels:
        await channel.close(None)
