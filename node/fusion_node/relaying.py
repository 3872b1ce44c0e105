"""Connections through the coordinator's relay, or over calls at the peer itself, for peers that cannot be dialled.

Each peer that is reached so gets a port of its own on this machine's loopback interface; whoever dials it, worker or
probe, comes out at the peer's data plane. What passes is TLS between the two nodes, so the loopback port, like the data
plane's own, lets in nobody but the cluster's nodes. Where this node can dial a peer that cannot dial it, it needs no
relay: it keeps a call waiting at the peer's worker (`fusion.transport.reverse`), which connects to us over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from fusion.base.address import join_address, split_address
from fusion.base.errors import FusionError, UnreachableError
from fusion.base.units import KIB
from fusion.observe.logs import fields
from fusion.protocol.status import from_rpc_error
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name, node_server_name
from fusion.transport.channels import CLIENT_OPTIONS, backoff_s, open_aio_channel
from fusion.wire.v1 import relay_pb2, relay_pb2_grpc
from fusion_node.reachability import is_wildcard

log = logging.getLogger("fusion.node.relay")

PIECE_BYTES = 64 * KIB
OPEN_S = 15.0  #: so long the coordinator may take to bring the other node
_CALL_AGAIN_S = 0.1  #: at least, after a peer had no use for a call
_END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its type stubs


@dataclass(frozen=True, slots=True)
class _Port:
    """Where a peer that cannot be dialled is reached instead."""

    address: str  #: host:port on the loopback interface
    serving: asyncio.Task[None]


class Relays:
    """This node's ends of relayed connections. Use it in one event loop; `close` ends them all.

    `last_words`: by node, why the last connection to it did not come about.
    """

    def __init__(self, credentials: Callable[[], Credentials]) -> None:
        self._credentials = credentials
        self._ports: dict[str, _Port] = {}  #: by node
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: list[asyncio.Task[None]] = []
        self.last_words: dict[str, str] = {}

    def route(self, node: str) -> str:
        """Return the address at which `node` is reached through the coordinator; it stays the same."""
        found = self._ports.get(node)
        if found is None:
            listener = socket.create_server(("127.0.0.1", 0))
            address = join_address("127.0.0.1", listener.getsockname()[1])
            found = self._ports[node] = _Port(address, self._spawn(self._serve(node, listener), f"relay-{node}"))
        return found.address

    def accept(self, connection: str, listen: str) -> None:
        """Join a connection that the coordinator told of to the port on which our data plane listens."""
        self._spawn(self._accept(connection, listen), "relay-accept")

    def call(self, peers: Mapping[str, str], listen: str) -> None:
        """Keep a call waiting at each of these nodes, by address, which cannot dial us; instead of all before."""
        for task in self._calls:
            task.cancel()
        self._calls = [
            self._spawn(self._keep_calling(node, address, listen), f"relay-call-{node}")
            for node, address in peers.items()
        ]

    async def _keep_calling(self, node: str, address: str, listen: str) -> None:
        """A call that the peer has taken is a connection, and goes on while the next one waits."""
        attempt = 0
        async with asyncio.TaskGroup() as connections:
            while True:
                taken = asyncio.Event()
                connection = connections.create_task(self._answer(node, address, listen, taken))
                waiting = asyncio.ensure_future(taken.wait())
                await asyncio.wait({connection, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if taken.is_set():
                    attempt = 0
                else:  # no worker there yet, or no more
                    await asyncio.sleep(_CALL_AGAIN_S + backoff_s(attempt, first_s=0.1, longest_s=1.0))
                    attempt += 1

    async def _answer(self, node: str, address: str, listen: str, taken: asyncio.Event) -> None:
        credentials = self._credentials()
        name = node_server_name(credentials.cluster, node)
        try:
            async with _calling(
                address, credentials, name, "Accept", relay_pb2.RelayFrame(connection=""), None
            ) as call:
                taken.set()
                reader, writer = await self._to_data_plane(listen)
                try:
                    await _join(call, reader, writer)
                finally:
                    writer.close()
        except (FusionError, OSError) as error:
            log.debug("a call at a peer ended", extra=fields(node=node, reason=error))

    async def close(self) -> None:
        """End all connections and listen no more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ports.clear()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, node: str, listener: socket.socket) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._spawn(self._connect(node, reader, writer), f"relay-connection-{node}")

        server = await asyncio.start_server(connected, sock=listener, limit=2 * PIECE_BYTES)
        async with server:
            await server.serve_forever()

    async def _connect(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = relay_pb2.RelayFrame(target=node)
        try:
            async with self._call("Connect", first) as call:
                self.last_words.pop(node, None)
                await _join(call, reader, writer)
        except FusionError as error:
            self.last_words[node] = str(error)
            log.info("a connection through the coordinator ended", extra=fields(node=node, reason=error))
        finally:
            writer.close()

    async def _accept(self, connection: str, listen: str) -> None:
        first = relay_pb2.RelayFrame(connection=connection)
        try:
            reader, writer = await self._to_data_plane(listen)
            try:
                async with self._call("Accept", first) as call:
                    await _join(call, reader, writer)
            finally:
                writer.close()
        except OSError:  # no worker yet, or no more: the other end learns it at once, and may try again
            with contextlib.suppress(FusionError):
                async with self._call("Accept", first):
                    pass
        except FusionError as error:
            log.info("a connection through the coordinator ended", extra=fields(reason=error))

    async def _to_data_plane(self, listen: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address("--listen", listen)
        host = ("::1" if ":" in host else "127.0.0.1") if is_wildcard(host) else host
        return await asyncio.open_connection(host, port, limit=2 * PIECE_BYTES)

    def _call(self, method: str, first: relay_pb2.RelayFrame) -> AbstractAsyncContextManager[Any]:
        """Call the coordinator on a connection of its own, so that bulk never delays a heartbeat."""
        credentials = self._credentials()
        name = coordinator_server_name(credentials.cluster)
        return _calling(credentials.coordinator, credentials, name, method, first, OPEN_S)


@asynccontextmanager
async def _calling(
    address: str, credentials: Credentials, name: str, method: str, first: relay_pb2.RelayFrame, limit_s: float | None
) -> AsyncIterator[Any]:
    """Call a relay and yield the call once it is open, for at most `limit_s`; errors are ours."""
    channel = open_aio_channel(address, credentials, name, CLIENT_OPTIONS)
    call = getattr(relay_pb2_grpc.RelayStub(channel), method)()  # type: ignore[no-untyped-call]
    try:
        async with asyncio.timeout(limit_s):
            await call.write(first)
            answer = await call.read()
        if answer is _END_OF_STREAM or answer.WhichOneof("body") != "opened":
            raise UnreachableError("the relay did not open the connection")
        yield call
    except TimeoutError:
        raise UnreachableError(f"the relay did not answer within {limit_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "the relay") from None
    except asyncio.InvalidStateError:  # what grpc.aio raises for a write to a call that has ended
        raise await _end_of(call) from None
    finally:
        call.cancel()
        await channel.close(None)


async def _end_of(call: Any) -> FusionError:
    code, details = await call.code(), await call.details()
    return UnreachableError(f"the relay ended the connection: {details or code}")


async def _join(call: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes both ways until either end closes. Errors of the call are the caller's; a broken socket is an end."""
    up = asyncio.ensure_future(_up(call, reader))
    down = asyncio.ensure_future(_down(call, writer))
    try:
        done, _ = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up in done and up.exception() is None:
            await down  # what the other end still sends, until it hears of our end
        for task in done:
            task.result()
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _up(call: Any, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            await call.write(relay_pb2.RelayFrame(data=data))
    await call.done_writing()


async def _down(call: Any, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while (frame := await call.read()) is not _END_OF_STREAM:
            writer.write(frame.data)
            await writer.drain()
