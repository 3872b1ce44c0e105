"""Can the other nodes reach this one? Asked once, before anybody relies on it: the coordinator tries.

While nothing trains, nothing listens on the data plane's port; so the daemon opens a plain listener there for the
moment, and the coordinator connects to the advertised address and reads a nonce from it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion.base.address import join_address, split_address
from fusion.base.errors import ConfigError, UnreachableError
from fusion.base.units import format_rate

if TYPE_CHECKING:
    from fusion.wire.v1 import node_pb2

DEFAULT_PORT = 7445
DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"
NONCE_BYTES = 32
Probe = Callable[[str, bytes], "Awaitable[node_pb2.ProbeResponse]"]


class NotReachableError(UnreachableError):
    """Other nodes cannot reach this one, and its owner wants to know rather than go on."""


@dataclass(frozen=True, slots=True)
class Reachability:
    """Where this node listens, what it tells the others, and whether that works."""

    listen: str
    address: str
    reachable: bool
    detail: str  #: one line: why not, and what to open


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from the same machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_advertised(address: str, coordinator: str) -> str:
    """Return `address` if other machines could use it; ConfigError says why not.

    A loopback address is right only when the coordinator is reached over loopback too, so that all is one machine.
    """
    host, port = split_address("--advertise", address)
    if not port:
        raise ConfigError(f"--advertise: {address} needs a port from 1 to 65535")
    if is_loopback(host) and not is_loopback(split_address("coordinator", coordinator)[0]):
        raise ConfigError(
            f"--advertise: {address} means the machine that dials it; state an address that other nodes reach"
        )
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return address
    if number.is_unspecified or number.is_link_local or number.is_multicast:
        raise ConfigError(f"--advertise: {address} is no address to dial; state one that other nodes reach")
    return address


@asynccontextmanager
async def nonce_listener(listen: str, nonce: bytes) -> AsyncIterator[int]:
    """Send `nonce` to whoever connects to `listen`, while inside; yields the port, which may have been 0.

    ConfigError if the port is taken or the host is not one of this machine's.
    """

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(nonce)
            await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    host, port = split_address("--listen", listen)
    try:
        server = await asyncio.start_server(answer, host, port, family=_family(host))
    except OSError as error:
        raise ConfigError(_listen_problem(listen, error)) from None
    async with server:
        yield int(server.sockets[0].getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_UNSPEC


def _listen_problem(listen: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--listen: port of {listen} is taken by another program; end that, or choose another port with --listen"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"--listen: {listen} is not an address of this machine; use 0.0.0.0:{DEFAULT_PORT} for all of them"
    if error.errno == errno.EACCES:
        return f"--listen: no permission to listen on {listen}; choose a port above 1023"
    return f"--listen: cannot listen on {listen}: {error.strerror or error}"


async def find_out(listen: str, advertise: str, coordinator: str, probe: Probe) -> Reachability:
    """Return where this node is reached, as far as the coordinator can tell.

    `advertise` is empty, a host, or host:port. Without it the host is the one that the node listens on, or else the
    one that the coordinator sees. Raises ConfigError, and whatever `probe` raises when the coordinator is away.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    listen_host, _ = split_address("--listen", listen, DEFAULT_PORT)
    listen = join_address(listen_host, split_address("--listen", listen, DEFAULT_PORT)[1])
    async with nonce_listener(listen, nonce) as port:
        if advertise:
            host, advertised_port = split_address("--advertise", advertise, port)
        elif is_wildcard(listen_host):
            host, advertised_port = (await probe("", b"")).seen_host, port
        else:
            host, advertised_port = listen_host, port
        address = check_advertised(join_address(host, advertised_port), coordinator)
        answer = await probe(address, nonce)
    detail = "" if answer.reachable else _what_to_open(address, port, answer)
    return Reachability(join_address(listen_host, port), address, answer.reachable, detail)


def _what_to_open(address: str, port: int, answer: node_pb2.ProbeResponse) -> str:
    host, advertised_port = split_address("address", address)
    detail = answer.detail.removeprefix(f"{address}: ")
    return (
        f"other nodes cannot reach this one at {address} ({detail or 'no connection'}): let TCP connections to "
        f"{host} port {advertised_port} through to port {port} of this machine (firewall, port forwarding of the "
        f"router), or state with --advertise HOST:PORT where it can be reached; {_until_then(answer.relay_bytes_per_s)}"
    )


def _until_then(relay_bytes_per_s: float) -> str:
    if not relay_bytes_per_s:
        return "until then it trains only with nodes that it can dial itself, as the coordinator relays nothing"
    rate = format_rate(relay_bytes_per_s)
    return (
        f"until then nodes that it cannot dial either reach it through the coordinator, at most {rate} for all together"
    )
