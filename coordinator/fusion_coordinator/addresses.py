"""Which addresses a node may state, and whether it can be reached there (P1, P22, T15)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import urllib.parse
from dataclasses import dataclass

from fusion.base.address import split_address
from fusion.base.errors import ConfigError

CONNECT_TIMEOUT_S = 3.0
MIN_NONCE_BYTES, MAX_NONCE_BYTES = 16, 64
#: Link-local addresses of clouds' metadata services are refused with all link-local ones; these are not link-local.
_METADATA = {
    ipaddress.ip_address(text) for text in ("100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254")
}

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def host_of_peer(peer: str) -> str:
    """Return the IP address in gRPC's name of a caller, such as "ipv4:10.0.0.1:55000"; "" if there is none."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return str(_unmapped(ipaddress.ip_address(host)))
    except ValueError:
        return ""


def _unmapped(address: IpAddress) -> IpAddress:
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address


def check_ip(field: str, address: IpAddress, caller_host: str) -> None:
    """Raise ConfigError for an address at which no peer of the caller could reach a node."""
    address = _unmapped(address)
    if address.is_unspecified or address.is_multicast or (address.is_reserved and address.version == 4):
        raise ConfigError(f"{field}: {address} is not the address of a machine; state one that peers can reach")
    if address.is_link_local or address in _METADATA:
        raise ConfigError(f"{field}: {address} is link-local or a metadata service; state one that peers can reach")
    if address.is_loopback and not _is_loopback(caller_host):
        raise ConfigError(
            f"{field}: {address} is reachable only on the node itself, which calls from {caller_host}; "
            "state its address with --advertise"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_stated(field: str, text: str, caller_host: str) -> tuple[str, int]:
    """Return host and port of an address that a node states; ConfigError if peers could not use it.

    A host name is accepted as it is: what it means is up to the peers that resolve it.
    """
    host, port = split_address(field, text)
    if port == 0:
        raise ConfigError(f"{field}: {text[:80]!r} must have a port 1..65535")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if host.lower().rstrip(".").endswith("localhost") and not _is_loopback(caller_host):
            raise ConfigError(f"{field}: {host} is reachable only on the node itself") from None
        return host, port
    check_ip(field, address, caller_host)
    return host, port


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether a nonce was read where it was expected; else why not."""

    reachable: bool
    detail: str


async def probe(text: str, nonce: bytes, caller_host: str) -> Reachability:
    """Connect to a stated address and compare what it sends with `nonce`.

    The name is resolved once and every address checked, so that it cannot turn into another one. About hosts other
    than the caller's own nothing is told but yes or no. ConfigError for addresses and nonces that are not usable.
    """
    if not MIN_NONCE_BYTES <= len(nonce) <= MAX_NONCE_BYTES:
        raise ConfigError(f"nonce must have {MIN_NONCE_BYTES}..{MAX_NONCE_BYTES} bytes, got {len(nonce)}")
    host, port = check_stated("address", text, caller_host)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return Reachability(False, f"the coordinator cannot resolve {host}")
    details = []
    for _, _, _, _, sockaddr in found[:4]:
        number = str(sockaddr[0])
        check_ip("address", ipaddress.ip_address(number.partition("%")[0]), caller_host)
        detail = await _read_nonce(number, port, nonce)
        if not detail:
            return Reachability(True, "")
        details.append(detail if number == caller_host else "no connection, or not this node")
    return Reachability(False, f"{text}: {details[0] if details else 'no address'}")


async def _read_nonce(host: str, port: int, nonce: bytes) -> str:
    """Return "" if the nonce came, else one line that says why not."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=2 * MAX_NONCE_BYTES)
            try:
                received = await reader.readexactly(len(nonce))
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s; a firewall or a router drops the connection"
    except ConnectionRefusedError:
        return "connection refused; nothing listens there, or the port is not forwarded"
    except asyncio.IncompleteReadError:
        return "something else listens there"
    except OSError as error:
        return error.strerror or "no connection"
    return "" if hmac.compare_digest(received, nonce) else "something else listens there"
