"""The links between daemons, measured while nothing trains: one answers on the data plane's port, another dials.

The port belongs to the worker as soon as there is one; so the one that answers gives it back before a worker starts.
Whom to dial and whom to let in says the coordinator. What is sent is random bytes, and few.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from fusion.base.errors import AuthError, ConfigError, FusionError, UnreachableError, WireError
from fusion.base.units import KIB, MIB
from fusion.links.estimate import goodput, most_rate
from fusion.observe.logs import fields
from fusion.protocol.status import from_rpc_error, status_of
from fusion.security.credentials import Credentials
from fusion.security.roles import Access, AioAuthorizer
from fusion.security.tls import CredentialsSource, caller, node_server_name, server_credentials
from fusion.transport.channels import DATA_PLANE_CLIENT_OPTIONS, DATA_PLANE_SERVER_OPTIONS, open_aio_channel
from fusion.wire.v1 import node_pb2, probe_pb2, probe_pb2_grpc
from fusion_node.reachability import check_advertised
from fusion_node.relaying import Relays

log = logging.getLogger("fusion.node.probes")

CHUNK_BYTES, MAX_CHUNK_BYTES = 16 * KIB, 64 * KIB
MAX_BYTES = 4 * MIB  #: one way
LET_IN_S = 60.0
LET_IN_BYTES = 4 * MAX_BYTES  #: that a caller may make us take or send in that time
MEASURE_S = 4.0  #: one way; what has come by then is enough
CONNECT_S, CALL_S = 6.0, 10.0
RELAYED_PROBE_BYTES = 256 * KIB  #: where only a round trip was asked for
PINGS = 4
_NOT_YET_TRIES, _NOT_YET_PAUSE_S = 8, 0.25  #: the other side may hear later than we that we come
#: Flow control must not be what is measured.
_WINDOW = (("grpc.http2.lookahead_bytes", MAX_BYTES),)


@dataclass(slots=True)
class _Visitor:
    until_s: float  #: monotonic
    bytes_left: int = LET_IN_BYTES


class ProbeService(probe_pb2_grpc.ProbeServicer):
    """Answers the nodes that were named to it, within their allowance."""

    def __init__(self) -> None:
        self._visitors: dict[str, _Visitor] = {}

    def let_in(self, callers: Iterable[str]) -> None:
        """Answer these nodes for the next LET_IN_S seconds."""
        now_s = time.monotonic()
        self._visitors = {node: visitor for node, visitor in self._visitors.items() if visitor.until_s > now_s}
        for node in callers:
            self._visitors[node] = _Visitor(now_s + LET_IN_S)

    async def Ping(self, request: probe_pb2.ProbePing, context: Any) -> probe_pb2.ProbePong:  # noqa: N802
        """Answer at once."""
        await self._charge(context, 0)
        return probe_pb2.ProbePong()

    async def Upload(self, request_iterator: AsyncIterator[probe_pb2.ProbeChunk], context: Any) -> Any:  # noqa: N802
        """Take bytes, and say how fast they came."""
        arrivals: list[tuple[float, int]] = []
        total = 0
        async for chunk in request_iterator:
            size = len(chunk.data)
            total += size
            if size > MAX_CHUNK_BYTES or total > MAX_BYTES:
                await _refuse(context, WireError(f"a probe has at most {MAX_BYTES} bytes, {MAX_CHUNK_BYTES} a chunk"))
            await self._charge(context, size)
            arrivals.append((time.monotonic(), size))
            if arrivals[-1][0] - arrivals[0][0] > MEASURE_S:
                break
        return probe_pb2.ProbeReceipt(bytes=total, bytes_per_s=goodput(arrivals))

    async def Download(  # noqa: N802
        self, request: probe_pb2.ProbeDownloadRequest, context: Any
    ) -> AsyncIterator[probe_pb2.ProbeChunk]:
        """Send as many bytes as are asked for."""
        if not 0 < request.bytes <= MAX_BYTES:
            await _refuse(context, WireError(f"bytes must be 1..{MAX_BYTES}, got {request.bytes}"))
        await self._charge(context, request.bytes)
        for chunk in _chunks(request.bytes):
            yield chunk

    async def _charge(self, context: Any, count: int) -> None:
        """Refuse callers that nobody named, or that take more than their share."""
        who = caller(context).identity
        visitor = self._visitors.get(who)
        if visitor is None or time.monotonic() > visitor.until_s:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"node {who} was not announced by the coordinator")
            raise AssertionError  # abort does not return
        visitor.bytes_left -= count
        if visitor.bytes_left < 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many bytes; probes are small")


async def _refuse(context: Any, error: FusionError) -> None:
    await context.abort(*status_of(error))


def _chunks(count: int) -> Iterable[probe_pb2.ProbeChunk]:
    data = os.urandom(CHUNK_BYTES)
    for offset in range(0, count, CHUNK_BYTES):
        yield probe_pb2.ProbeChunk(data=data[: count - offset])


class ProbePort:
    """Holds the data plane's port while it is wanted, and gives it back in time. Use it in one event loop."""

    def __init__(self, cluster: Any, source: CredentialsSource) -> None:
        self.service = ProbeService()
        self._cluster, self._source = cluster, source
        self._server: grpc.aio.Server | None = None
        self._wanted = ""  #: the address to listen on; empty: none
        self._lock = asyncio.Lock()
        self._warned = False

    @property
    def settled(self) -> bool:
        """Whether the port is held or given back, as is wanted, or that is being done."""
        return self._lock.locked() or bool(self._wanted) == (self._server is not None)

    def want(self, listen: str) -> None:
        """Say where to listen, "" for nowhere; `settle` makes it so."""
        self._wanted = listen

    async def settle(self) -> None:
        """Return once the port is held or given back, as is wanted."""
        async with self._lock:
            if self._server is not None and not self._wanted:
                await self._server.stop(None)
                self._server = None
            elif self._server is None and self._wanted:
                await self._listen(self._wanted)

    async def release(self) -> None:
        """Give the port back: a worker is about to need it."""
        self.want("")
        await self.settle()

    async def _listen(self, address: str) -> None:
        server = grpc.aio.server(
            interceptors=[AioAuthorizer(Access(self._cluster))],
            options=[*DATA_PLANE_SERVER_OPTIONS, *_WINDOW],
            maximum_concurrent_rpcs=16,
        )
        probe_pb2_grpc.add_ProbeServicer_to_server(self.service, server)  # type: ignore[no-untyped-call]
        try:
            bound = server.add_secure_port(address, server_credentials(self._source))
        except RuntimeError:
            bound = 0
        if not bound:
            if not self._warned:
                log.warning("the links to this node are not measured: its port is taken", extra=fields(port=address))
            self._warned = True
            await server.stop(None)
            return
        self._warned, self._server = False, server
        await server.start()


async def measure(
    target: node_pb2.ProbeTarget, credentials: Credentials, routes: Mapping[str, str], relays: Relays | None = None
) -> node_pb2.LinkReport:
    """Dial a node and measure the link to it and back; what cannot be measured is told in the report.

    A node whose worker holds the port answers too, by a refusal: it is reachable, and a round trip is a round trip.
    One that cannot be dialled is tried through the coordinator, and then its goodput is always measured: it has
    little to do with that of the other way.
    """
    try:
        check_advertised(target.address, credentials.coordinator)
        try:
            return await _measured(target, credentials, routes.get(target.address, target.address))
        except UnreachableError as error:
            if relays is None:
                raise
            return await _relayed(target, credentials, relays, error)
    except (ConfigError, UnreachableError, AuthError, WireError) as error:
        return node_pb2.LinkReport(node_id=target.node_id, reason=str(error)[:300])


async def _relayed(
    target: node_pb2.ProbeTarget, credentials: Credentials, relays: Relays, cause: UnreachableError
) -> node_pb2.LinkReport:
    asked = node_pb2.ProbeTarget(
        node_id=target.node_id, address=target.address, bytes=target.bytes or RELAYED_PROBE_BYTES
    )
    try:
        report = await _measured(asked, credentials, relays.route(target.node_id))
    except UnreachableError as error:
        words = relays.last_words.get(target.node_id) or str(error)
        raise UnreachableError(f"{cause}; through the coordinator: {words}") from None
    report.relayed = True
    return report


async def _measured(target: node_pb2.ProbeTarget, credentials: Credentials, address: str) -> node_pb2.LinkReport:
    name = node_server_name(credentials.cluster, target.node_id)
    channel = open_aio_channel(address, credentials, name, (*DATA_PLANE_CLIENT_OPTIONS, *_WINDOW))
    try:
        return await _Probe(target, channel).run()
    finally:
        await channel.close(None)


class _Probe:
    """One measurement over one channel."""

    def __init__(self, target: node_pb2.ProbeTarget, channel: grpc.aio.Channel) -> None:
        self._target = target
        self._stub: Any = probe_pb2_grpc.ProbeStub(channel)  # type: ignore[no-untyped-call]

    async def run(self) -> node_pb2.LinkReport:
        report = node_pb2.LinkReport(node_id=self._target.node_id, reachable=True)
        welcome = await self._knock()
        round_trips = []
        for _ in range(PINGS):
            began_s = time.monotonic()
            await self._ping(CALL_S)
            round_trips.append(time.monotonic() - began_s)
        report.round_trip_s = min(round_trips)
        count = min(self._target.bytes, MAX_BYTES)
        if welcome and count:
            report.there_bytes_per_s = await self._upload(count, report.round_trip_s)
            report.back_bytes_per_s = await self._download(count, report.round_trip_s)
            report.bytes = count
        return report

    async def _knock(self) -> bool:
        """Connect; return whether we are let in. UnreachableError if nobody answers there, or another node."""
        welcome = await self._ping(CONNECT_S)
        for _ in range(_NOT_YET_TRIES if self._target.bytes else 0):
            if welcome is not None:
                break
            await asyncio.sleep(_NOT_YET_PAUSE_S)
            welcome = await self._ping(CALL_S)
        return bool(welcome)

    async def _ping(self, timeout_s: float) -> bool | None:
        """Whether the other side lets us measure; None: not yet. Any answer of it is an answer."""
        try:
            await self._stub.Ping(probe_pb2.ProbePing(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return None
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                return False
            raise from_rpc_error(error, f"node at {self._target.address}") from None
        return True

    async def _upload(self, count: int, round_trip_s: float) -> float:
        """Return bytes per second as the other side saw them come; 0 if it did not tell."""
        began_s = time.monotonic()
        try:
            receipt = await self._stub.Upload(iter(_chunks(count)), timeout=CALL_S)
        except grpc.aio.AioRpcError:
            return 0.0
        elapsed_s = time.monotonic() - began_s
        return min(float(receipt.bytes_per_s), most_rate(receipt.bytes, elapsed_s, round_trip_s))

    async def _download(self, count: int, round_trip_s: float) -> float:
        began_s = time.monotonic()
        arrivals: list[tuple[float, int]] = []
        call = self._stub.Download(probe_pb2.ProbeDownloadRequest(bytes=count), timeout=CALL_S)
        try:
            async for chunk in call:
                arrivals.append((time.monotonic(), len(chunk.data)))
                if arrivals[-1][0] - arrivals[0][0] > MEASURE_S:
                    break
        except grpc.aio.AioRpcError:
            return 0.0
        finally:
            call.cancel()
        total = sum(size for _, size in arrivals)
        return min(goodput(arrivals), most_rate(total, time.monotonic() - began_s, round_trip_s))
