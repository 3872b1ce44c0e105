"""Joins two nodes of which one cannot reach the other. What passes is their own TLS, which nobody here can read.

The node that dials calls Connect; the other is told over its command stream and calls Accept; then bytes go both ways,
all connections together at most as fast as the setting allows. Who may be joined is asked before, and again while it
lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fusion.base.clock import Clock
from fusion.base.errors import AuthError, NotFoundError, StateError, UnreachableError, WireError
from fusion.base.ids import NodeId, random_id
from fusion.base.units import KIB
from fusion.observe.logs import fields

log = logging.getLogger("fusion.coordinator.relay")

MAX_DATA_BYTES = 128 * KIB  #: of a frame
MAX_CONNECTIONS = 256  #: at a time
MAX_CONNECTIONS_OF_A_PAIR = 24  #: in one direction: a link's own streams, and those that replace broken ones
ACCEPT_S = 10.0  #: so long the other end may take
LOOK_S = 5.0  #: between two looks whether the pair may still be joined
_WAITING_FRAMES = 4  #: that were read from one end and not yet taken by the other
_BURST_S = 0.005  #: of the rate, that may pass at once: a probe must not find the link faster than it is

Allowed = Callable[[NodeId, NodeId], bool]


class Budget:
    """Lets bytes pass at a rate, those who wait one after the other."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self.bytes_per_s, self._clock = bytes_per_s, clock
        self._free_s = 0.0  #: when all that was let pass so far has passed

    async def take(self, count: int) -> None:
        """Return when `count` more bytes may pass."""
        now_s = self._clock.monotonic_s()
        self._free_s = max(self._free_s, now_s - _BURST_S) + count / self.bytes_per_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


@dataclass(slots=True)
class Traffic:
    """What a relayed pair has come to; the pair is directed from the node that dials."""

    connections: int = 0  #: that stand now
    bytes: int = 0  #: both ways


class _Way:
    """One direction of a connection: frames from one end's call to the other's. None ends it."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING_FRAMES)

    async def put(self, data: bytes | None) -> None:
        await self._frames.put(data)

    async def get(self) -> bytes | None:
        return await self._frames.get()

    def cut(self) -> None:
        """End it at once, whatever waits."""
        while self._frames.full():
            self._frames.get_nowait()
        self._frames.put_nowait(None)


@dataclass(slots=True)
class Connection:
    """Two calls that are one connection, or will be."""

    name: str
    source: NodeId  #: that dials
    target: NodeId
    there: _Way = field(default_factory=_Way)
    back: _Way = field(default_factory=_Way)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def end(self) -> None:
        """Let both calls end; what is on its way to an end that left is lost."""
        if not self.over:
            self.over = True
            self.there.cut()
            self.back.cut()


class RelayHub:
    """All relayed connections of a coordinator. `bytes_per_s` for all together; 0: it relays nothing."""

    def __init__(self, bytes_per_s: float, clock: Clock, allowed: Allowed, call: Callable[[NodeId, str], None]) -> None:
        """`allowed(source, target)`: whether they may be joined now. `call` tells a node of a connection's name."""
        self.bytes_per_s = bytes_per_s
        self._budget, self._clock, self._allowed, self._call = Budget(bytes_per_s, clock), clock, allowed, call
        self._connections: dict[str, Connection] = {}
        self._traffic: dict[tuple[NodeId, NodeId], Traffic] = {}

    def standing(self) -> dict[tuple[NodeId, NodeId], Traffic]:
        """Return the pairs that are joined now; the first of each dials."""
        return {pair: traffic for pair, traffic in self._traffic.items() if traffic.connections}

    async def connect(self, source: NodeId, target: NodeId, data: AsyncIterator[bytes]) -> AsyncIterator[bytes | None]:
        """Yield None once the target is there, then what it sends; `data` goes to it.

        AuthError for a pair that may not be joined, StateError if nothing is relayed here, and
        UnreachableError if the target does not come, or if too many are joined already.
        """
        with self._opened(source, target) as connection:
            self._call(target, connection.name)
            try:
                async with asyncio.timeout(ACCEPT_S):
                    await connection.accepted.wait()
            except TimeoutError:
                raise UnreachableError(f"node {target} did not come to the relay within {ACCEPT_S:g} s") from None
            log.info("relays", extra=fields(source=source, target=target))
            async for item in self._carry(connection, data, connection.there, connection.back):
                yield item

    async def accept(self, node: NodeId, name: str, data: AsyncIterator[bytes]) -> AsyncIterator[bytes | None]:
        """The other end of `connect`. NotFoundError for a connection that does not wait for this node."""
        connection = self._connections.get(name)
        if connection is None or connection.target != node or connection.accepted.is_set():
            raise NotFoundError("no connection of that name waits for this node")
        connection.accepted.set()
        async for item in self._carry(connection, data, connection.back, connection.there):
            yield item

    @contextmanager
    def _opened(self, source: NodeId, target: NodeId) -> Iterator[Connection]:
        if not self.bytes_per_s:
            raise StateError("this coordinator relays nothing (--relay-rate 0); let one of the two nodes be reached")
        if source == target or not self._allowed(source, target):
            raise AuthError(f"node {target} is no peer of yours: only nodes of one job are joined")
        traffic = self._traffic.setdefault((source, target), Traffic())
        if traffic.connections >= MAX_CONNECTIONS_OF_A_PAIR or len(self._connections) >= MAX_CONNECTIONS:
            raise UnreachableError("too many relayed connections; try again later")
        connection = Connection(random_id("relay-", 20), source, target)
        self._connections[connection.name] = connection
        traffic.connections += 1
        try:
            yield connection
        finally:
            connection.end()
            traffic.connections -= 1
            del self._connections[connection.name]

    async def _carry(
        self, connection: Connection, data: AsyncIterator[bytes], out: _Way, back: _Way
    ) -> AsyncIterator[bytes | None]:
        feeding = asyncio.get_running_loop().create_task(self._feed(connection, data, out), name="relay")
        try:
            yield None
            while (item := await back.get()) is not None:
                yield item
            if feeding.done() and not feeding.cancelled() and (error := feeding.exception()) is not None:
                raise error
        finally:
            feeding.cancel()
            connection.end()

    async def _feed(self, connection: Connection, data: AsyncIterator[bytes], out: _Way) -> None:
        """Pass on what one end sends, at the relay's rate; when it closes, the connection ends behind its last byte."""
        traffic = self._traffic[connection.source, connection.target]
        looked_s = self._clock.monotonic_s()
        try:
            async for piece in data:
                if not 0 < len(piece) <= MAX_DATA_BYTES:
                    raise WireError(f"data must have 1..{MAX_DATA_BYTES} bytes, got {len(piece)}")
                if self._clock.monotonic_s() - looked_s > LOOK_S:
                    looked_s = self._clock.monotonic_s()
                    if not self._allowed(connection.source, connection.target):
                        raise AuthError("these nodes have no job in common any more")
                await self._budget.take(len(piece))
                traffic.bytes += len(piece)
                await out.put(piece)
            await out.put(None)
        except BaseException:
            connection.end()
            raise
