"""Emulated WAN links in user space: a TCP relay on loopback that gives every link its rate and its delay.

`python -m fusion.cli.wan CONFIG.json` prints {"routes": {dialler: {"host:port": "127.0.0.1:port"}}} as one line: where
each machine has to dial instead of another's address. A line "report" on its standard input, and its end, make it print
{"bytes": {source: {target: bytes}}}; a line such as {"fault": "stall", "ways": [["a", "b"]]} makes a link fail, see
`fusion.cli.wanfaults`. It ends on SIGTERM and when its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fusion.base.errors import ConfigError
from fusion.base.units import KIB, format_duration, format_rate
from fusion.cli.wanfaults import Connection, Fault, Faults, Way

__all__ = ["Machine", "Topology", "WanConfig", "WanLink", "WanRelay", "default_topology", "main"]

_QUEUE_BYTES = 256 * KIB  #: that may wait for a link, beside what is on its way
_UNSHAPED_BYTES = 4096 * KIB  #: on its way where the rate is not limited
_SEGMENT_BYTES = 1448  #: of TCP, as over Ethernet
_SOCKET_BYTES = 128 * KIB  #: of kernel buffer on the relay's own sockets, which no link would have


class WanLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction between two places, shared by all connections that cross it."""

    source: str  #: place
    target: str  #: place
    rate_bytes_per_s: float  #: 0: not limited
    delay_s: float  #: one way
    pipes: tuple[str, ...] = ()  #: names of shared pipes that it goes through, such as a site's uplink
    connects: bool = True  #: False: connections between these places are refused


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine that dials and is dialled."""

    name: str
    place: str
    address: str  #: host:port where it really listens, and by which the others know it


class WanConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the relay's process reads."""

    links: tuple[WanLink, ...]
    machines: tuple[Machine, ...]
    pipes: dict[str, float] = {}  #: bytes per second of each shared pipe, by name


@dataclass(frozen=True, slots=True)
class Topology:
    """Which machine is where, and the links between the places (both directions, and inside each place)."""

    place_of: dict[str, str]
    links: tuple[WanLink, ...]

    def link(self, source: str, target: str) -> WanLink:
        """Return the link from one machine to another."""
        places = (self.place_of[source], self.place_of[target])
        return next(link for link in self.links if (link.source, link.target) == places)

    def describe(self) -> list[str]:
        """Return a line for each pair of places: "Amsterdam - Toronto: 200 Mbit/s, 20 ms round trip"."""
        used = set(self.place_of.values())
        return [
            f"{link.source} - {link.target}: {format_rate(link.rate_bytes_per_s)}, "
            f"{format_duration(2 * link.delay_s)} round trip"
            for link in self.links
            if link.source < link.target and {link.source, link.target} <= used
        ]


_PLACES = ("Amsterdam", "Toronto", "Singapore")
_MBIT = 125_000.0  #: bytes
#: Rate in Mbit/s and round trip in ms.
_BETWEEN = {
    ("Amsterdam", "Toronto"): (200.0, 20.0),
    ("Singapore", "Toronto"): (50.0, 60.0),
    ("Amsterdam", "Singapore"): (20.0, 80.0),
}
_INSIDE = (1000.0, 0.5)


def default_topology(machines: Sequence[str]) -> Topology:
    """Spread machines over three places in groups of neighbours: 20 to 200 Mbit/s and 20 to 80 ms between them.

    Inside a place it is 1 Gbit/s and 0.5 ms. The same machines always get the same places.
    """
    place_of = {name: _PLACES[number * len(_PLACES) // len(machines)] for number, name in enumerate(machines)}
    if len(machines) < len(_PLACES):
        place_of = dict(zip(machines, _PLACES, strict=False))
    settings = {(place, place): _INSIDE for place in _PLACES}
    for (one, other), figures in _BETWEEN.items():
        settings[one, other] = settings[other, one] = figures
    links = tuple(
        WanLink(source, target, megabits * _MBIT, round_trip_ms / 2000)
        for (source, target), (megabits, round_trip_ms) in sorted(settings.items())
    )
    return Topology(place_of, links)


class _Shaper:
    """The departure times of one directed link, or shared pipe: bytes leave one after the other, at its rate."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self.rate = rate_bytes_per_s  #: 0: not limited
        self._free_at_s = 0.0

    def departure_s(self, count: int, now_s: float) -> float:
        """Take `count` bytes; returns when the last of them has left."""
        if not self.rate:
            return now_s
        self._free_at_s = max(self._free_at_s, now_s) + count / self.rate
        return self._free_at_s

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait until no more than the queue's bytes wait for departure."""
        return max(0.0, self._free_at_s - now_s - _QUEUE_BYTES / self.rate) if self.rate else 0.0


class _Path:
    """A directed link with the shared pipes that it goes through. Bytes are through when the slowest is done."""

    def __init__(self, delay_s: float, shapers: Sequence[_Shaper]) -> None:
        self._delay_s, self._shapers = delay_s, shapers
        rate = min((shaper.rate for shaper in shapers if shaper.rate), default=0.0)
        self.piece_bytes = 64 * KIB if not rate else int(min(64 * KIB, max(4 * KIB, rate * 0.002)))
        self.window_bytes = _QUEUE_BYTES + (int(rate * delay_s) if rate else _UNSHAPED_BYTES)

    def arrival_s(self, count: int, now_s: float) -> float:
        """Take `count` bytes onto the link; returns when the last of them comes out at the far end."""
        return max(shaper.departure_s(count, now_s) for shaper in self._shapers) + self._delay_s

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait until no more than the queue's bytes wait for departure."""
        return max(shaper.wait_s(now_s) for shaper in self._shapers)


class _Pipe:
    """One direction of one connection: reads no more than the link holds, writes when the bytes arrive."""

    def __init__(
        self,
        path: _Path,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        carried: Callable[[int], None],
    ) -> None:
        self._carried = carried
        self._way = way
        self._path, self._reader, self._writer = path, reader, writer
        self._under_way: deque[tuple[float, bytes]] = deque()  # arrival time and bytes; none: the end
        self._held_bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Carry everything to the end of the stream. Errors of either socket end it."""
        take = asyncio.create_task(self._take())
        try:
            await self._deliver()
            await take
        finally:
            take.cancel()
            await asyncio.gather(take, return_exceptions=True)

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        try:
            while data:
                await asyncio.sleep(self._wait_s(loop.time()))
                while self._held_bytes >= self._path.window_bytes:
                    self._room.clear()
                    await self._room.wait()
                data = await self._reader.read(self._path.piece_bytes)
                self._held_bytes += len(data)
                link = self._way if self._way.shaped else self._path
                self._under_way.append((link.arrival_s(len(data), loop.time()), data))
                self._changed.set()
        except OSError:
            self._under_way.append((math.inf, b""))
            self._changed.set()
            raise

    def _wait_s(self, now_s: float) -> float:
        return self._way.wait_s(now_s, _QUEUE_BYTES) if self._way.shaped else self._path.wait_s(now_s)

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._under_way:
                self._changed.clear()
                await self._changed.wait()
            arrival_s, data = self._under_way.popleft()
            if arrival_s == math.inf:
                return
            while (early_s := arrival_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            await self._way.open.wait()
            if not data:
                self._writer.write_eof()
                return
            self._writer.write(data)
            await self._writer.drain()
            self._carried(len(data))
            self._held_bytes -= len(data)
            self._room.set()


class WanRelay:
    """Relays between machines. `start` opens a listener on loopback for every pair of them, `close` ends all."""

    def __init__(
        self, links: Sequence[WanLink], machines: Sequence[Machine], pipes: Mapping[str, float] | None = None
    ) -> None:
        pipes = pipes or {}
        _check(links, machines, pipes)
        self._machines = {machine.name: machine for machine in machines}
        self._faults = Faults(self._machines)
        shared = {name: _Shaper(rate) for name, rate in pipes.items()}
        self._shapers = {(link.source, link.target): _Shaper(link.rate_bytes_per_s) for link in links}
        self._paths = {
            (link.source, link.target): _Path(
                link.delay_s, [self._shapers[link.source, link.target], *(shared[name] for name in link.pipes)]
            )
            for link in links
        }
        self._cut = {(link.source, link.target) for link in links if not link.connects}
        self._refusing: list[socket.socket] = []
        self._carried: dict[tuple[str, str], int] = dict.fromkeys(self._pairs(), 0)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = False

    def _pairs(self) -> Iterator[tuple[str, str]]:
        return ((a, b) for a in self._machines for b in self._machines if a != b)

    async def start(self) -> dict[str, dict[str, str]]:
        """Listen, and return for each dialling machine what to dial instead of each other machine's address."""
        routes: dict[str, dict[str, str]] = {name: {} for name in self._machines}
        for dialler, target in self._pairs():
            places = self._machines[dialler].place, self._machines[target].place
            port = self._refuse() if places in self._cut else await self._listen(dialler, target)
            routes[dialler][self._machines[target].address] = f"127.0.0.1:{port}"
        return routes

    def _refuse(self) -> int:
        """Return a port that refuses connections as long as the relay runs: it is bound, and nobody listens."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("127.0.0.1", 0))
        self._refusing.append(sock)
        return int(sock.getsockname()[1])

    async def _listen(self, dialler: str, target: str) -> int:
        listener = _socket(socket.AF_INET)
        listener.bind(("127.0.0.1", 0))

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._relay(dialler, target, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        server = await asyncio.start_server(connected, sock=listener, limit=_SOCKET_BYTES // 2)
        self._servers.append(server)
        return int(listener.getsockname()[1])

    async def _relay(
        self, dialler: str, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection: connect to the target and carry both directions until both have ended."""
        faults, connection = self._faults, Connection(writer)
        faults.opened(dialler, target, connection)
        try:
            if faults.refuses(dialler, target):
                connection.reset()
                return
            await faults.may_close(dialler, target)
            host, port = self._machines[target].address.rsplit(":", 1)
            far_reader, connection.far = await asyncio.open_connection(
                host.strip("[]"), int(port), limit=_SOCKET_BYTES // 2
            )
            for each in (writer, connection.far):
                _tune(each)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pipe(dialler, target, reader, connection.far).run())
                both.create_task(self._pipe(target, dialler, far_reader, writer).run())
        except* OSError:
            pass  # either end went away: so does the other, as soon as it can hear of it
        finally:
            await self._end(dialler, target, connection)

    async def _end(self, dialler: str, target: str, connection: Connection) -> None:
        try:
            if connection.far is not None and not self._closing:
                await self._faults.may_close(dialler, target)
                connection.far.transport.abort()
            if not self._closing:
                await self._faults.may_close(target, dialler)
        finally:
            self._faults.closed(dialler, target, connection)
            for writer in filter(None, (connection.near, connection.far)):
                writer.transport.abort()

    def _pipe(self, source: str, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Pipe:
        def carried(count: int) -> None:
            self._carried[source, target] += count

        path = self._paths[self._machines[source].place, self._machines[target].place]
        return _Pipe(path, self._faults.way(source, target), reader, writer, carried)

    def apply(self, fault: Fault) -> None:
        """Make links fail, or whole again; ConfigError for machines that there are not."""
        self._faults.apply(fault)

    def report(self) -> dict[str, dict[str, int]]:
        """Return the bytes carried so far from each machine to each other."""
        report: dict[str, dict[str, int]] = {name: {} for name in self._machines}
        for (source, target), count in self._carried.items():
            report[source][target] = count
        return report

    async def close(self) -> None:
        """End every connection and stop listening."""
        self._closing = True
        for server in self._servers:
            server.close()
        for sock in self._refusing:
            sock.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()


def _socket(family: int) -> socket.socket:
    """Return a socket whose other end holds back what the link cannot take, as over a real network.

    Loopback's segments are so large that a kernel would buffer megabytes, and urgent messages would wait behind them.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    return sock


async def _connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    family, _, _, _, where = (await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))[0]
    sock = _socket(family)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(writer: asyncio.StreamWriter) -> None:
    """Send small pieces at once, and keep what the kernel holds small: a link has no such buffer."""
    writer.transport.set_write_buffer_limits(high=_SOCKET_BYTES // 2)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)


def _check(links: Sequence[WanLink], machines: Sequence[Machine], pipes: Mapping[str, float]) -> None:
    for name, rate in pipes.items():
        if not 0 < rate < math.inf:
            raise ConfigError(f"shared pipe {name}: rate {rate!r} bytes/s; allowed: a rate above 0")
    for link in links:
        for name in link.pipes:
            if name not in pipes:
                raise ConfigError(f"link {link.source} -> {link.target}: there is no shared pipe {name!r}")
    pairs = {(link.source, link.target) for link in links}
    for link in links:
        if not (0 <= link.rate_bytes_per_s < math.inf and 0 <= link.delay_s <= 60):
            raise ConfigError(
                f"link {link.source} -> {link.target}: rate {link.rate_bytes_per_s!r} bytes/s and delay "
                f"{link.delay_s!r} s; allowed: a rate from 0 (no limit) and a delay of 0..60 s"
            )
    if len({machine.name for machine in machines}) < len(machines):
        raise ConfigError("two machines have the same name; every machine needs its own")
    for machine in machines:
        host, _, port = machine.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"address of {machine.name}: {machine.address!r} is not host:port")
    for one in machines:
        for other in machines:
            if one is not other and (one.place, other.place) not in pairs:
                raise ConfigError(f"there is no link {one.place} -> {other.place}, which {one.name} needs")


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def _serve(config: WanConfig) -> None:
    relay = WanRelay(config.links, config.machines, config.pipes)
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)

    def report() -> None:
        _say({"bytes": relay.report()})

    def apply(line: str) -> None:
        try:
            relay.apply(msgspec.json.decode(line, type=Fault))
        except (ConfigError, msgspec.MsgspecError) as error:
            print(f"wan: {error}", file=sys.stderr, flush=True)

    def listen_to_parent() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            for line in sys.stdin:
                if line.strip() == "report":
                    loop.call_soon_threadsafe(report)
                elif line.startswith("{"):
                    loop.call_soon_threadsafe(apply, line)
            loop.call_soon_threadsafe(over.set)

    _say({"routes": await relay.start()})
    threading.Thread(target=listen_to_parent, daemon=True).start()
    await over.wait()
    await relay.close()
    report()


def main(arguments: Sequence[str]) -> int:
    """Run the relay that a file describes; returns the exit code."""
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: python -m fusion.cli.wan CONFIG.json")
        config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=WanConfig)
        asyncio.run(_serve(config))
    except (ConfigError, OSError, msgspec.MsgspecError) as error:
        print(f"wan: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
