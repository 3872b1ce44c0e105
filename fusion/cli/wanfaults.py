"""Faults of emulated links, to be switched on and off while connections go over them.

A *way* is one direction between two machines. What is held up is not lost: as TCP does after a partition, it arrives
once the way is open again, and until then not even the end of a connection gets through.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fusion.base.errors import ConfigError

__all__ = ["Connection", "Fault", "Faults", "Way"]

Kind = Literal["stall", "half-open", "reset", "refuse", "shape", "heal"]

_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_JITTER = random.Random()  # noqa: S311 - emulation


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do to some ways; as JSON on the relay's standard input.

    stall: nothing is carried on these ways, connections stay (both directions of a pair: a partition; one: one-way).
    half-open: the target's ends of the pair's connections are reset, the dialler's stay, and nothing is carried.
    reset: the pair's connections are reset at both ends; new ones work.
    refuse: the same, and new ones are reset as well.
    shape: another rate, delay and jitter from now on.
    heal: all of that is over.
    """

    fault: Kind
    ways: tuple[tuple[str, str], ...]  #: (source, target); for half-open, reset and refuse: (dialler, dialled)
    rate_bytes_per_s: float = 0.0  #: of shape; 0: not limited
    delay_s: float = 0.0
    jitter_s: float = 0.0  #: up to so much is added to the delay


@dataclass(slots=True)
class Way:
    """One direction between two machines. Bytes pass while it is open."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    rate: float | None = None  #: bytes/s in place of the link's own
    delay_s: float | None = None
    jitter_s: float = 0.0
    _free_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.open.set()

    @property
    def shaped(self) -> bool:
        """Whether rate and delay are not the link's own."""
        return self.rate is not None

    def arrival_s(self, count: int, now_s: float) -> float:
        """Return when the last of `count` bytes comes out, of a way that is shaped."""
        self._free_at_s = max(self._free_at_s, now_s) + (count / self.rate if self.rate else 0.0)
        jitter_s = _JITTER.uniform(0, self.jitter_s) if self.jitter_s else 0.0
        return self._free_at_s + (self.delay_s or 0.0) + jitter_s

    def wait_s(self, now_s: float, queue_bytes: int) -> float:
        """Return how long to wait until no more than `queue_bytes` wait for departure."""
        return max(0.0, self._free_at_s - now_s - queue_bytes / self.rate) if self.rate else 0.0


@dataclass(eq=False, slots=True)
class Connection:
    """A connection that is being relayed: the dialler's end, and the target's once it is there."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None

    def reset(self, *, near: bool = True) -> None:
        """Reset the target's end, and with `near` the dialler's too."""
        for writer in (self.near if near else None, self.far):
            if writer is not None:
                _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
    writer.transport.abort()


class Faults:
    """All ways between some machines, and the connections on them. Use it in the relay's event loop."""

    def __init__(self, machines: Iterable[str]) -> None:
        names = list(machines)
        self._ways = {(one, other): Way() for one in names for other in names if one != other}
        self._connections: dict[tuple[str, str], set[Connection]] = {pair: set() for pair in self._ways}
        self._refused: set[tuple[str, str]] = set()

    def way(self, source: str, target: str) -> Way:
        """Return the way from one machine to another."""
        return self._ways[source, target]

    def refuses(self, dialler: str, target: str) -> bool:
        """Whether new connections are reset at once."""
        return (dialler, target) in self._refused

    def opened(self, dialler: str, target: str, connection: Connection) -> None:
        """Note a connection."""
        self._connections[dialler, target].add(connection)

    def closed(self, dialler: str, target: str, connection: Connection) -> None:
        """Forget a connection."""
        self._connections[dialler, target].discard(connection)

    async def may_close(self, source: str, target: str) -> None:
        """Wait until what happened at `source` may be seen at `target`."""
        await self._ways[source, target].open.wait()

    def apply(self, fault: Fault) -> None:
        """Switch a fault on, or all of them off. ConfigError for ways that there are not."""
        unknown = [way for way in fault.ways if way not in self._ways]
        if unknown:
            raise ConfigError(
                f"there is no way {' -> '.join(unknown[0])}; machines: {sorted({a for a, _ in self._ways})}"
            )
        for source, target in fault.ways:
            self._apply(fault, source, target)

    def _apply(self, fault: Fault, source: str, target: str) -> None:
        way, back = self._ways[source, target], self._ways[target, source]
        connections = list(self._connections[source, target])
        match fault.fault:
            case "stall":
                way.open.clear()
            case "half-open":
                way.open.clear()
                back.open.clear()
                for connection in connections:
                    connection.reset(near=False)
            case "reset" | "refuse":
                if fault.fault == "refuse":
                    self._refused.add((source, target))
                for connection in connections:
                    connection.reset()
            case "shape":
                way.rate, way.delay_s, way.jitter_s = fault.rate_bytes_per_s, fault.delay_s, fault.jitter_s
            case "heal":
                way.rate, way.delay_s, way.jitter_s = None, None, 0.0
                self._refused.discard((source, target))
                way.open.set()
