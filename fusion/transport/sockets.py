"""The kernel's send buffer on a gRPC connection: how much may wait there, behind which an urgent message would stand.

gRPC has no setting for it, so the connection's socket is looked up among this process's own file descriptors. Where
that is not possible nothing happens: urgent messages then wait behind up to some megabytes on a slow link.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from fusion.base.address import split_address
from fusion.base.errors import ConfigError

__all__ = ["UnsentLimit"]

_DIRECTORY = Path("/dev/fd")  #: one entry for each of this process's open files, on Linux and macOS
_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", None)


class UnsentLimit:
    """Bounds the bytes that the kernel holds unsent on our connections to one address."""

    def __init__(self, address: str) -> None:
        """Look the connections up; `address` is host:port."""
        self._sockets = [] if _OPTION is None else _connected_to(address)
        self._bytes = 0

    def set(self, count: int) -> None:
        """Allow about `count` bytes; small changes are left out."""
        if not self._sockets or 0.75 * self._bytes <= count <= 1.5 * self._bytes:
            return
        self._bytes = count
        assert _OPTION is not None
        for item in self._sockets:
            with suppress(OSError):  # it has been closed
                item.setsockopt(socket.IPPROTO_TCP, _OPTION, count)

    def close(self) -> None:
        """Let go of the connections; they stay open."""
        for item in self._sockets:
            item.close()
        self._sockets = []


def _connected_to(address: str) -> list[socket.socket]:
    """Return second handles of our sockets that are connected to `address`."""
    try:
        host, port = split_address("address", address)
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        names = [entry.name for entry in _DIRECTORY.iterdir()]
    except (ConfigError, OSError):
        return []
    found = []
    for name in names:
        with suppress(OSError, ValueError):
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            item = socket.socket(fileno=os.dup(number))
            if _leads_to(item, wanted, port):
                found.append(item)
            else:
                item.close()
    return found


def _leads_to(item: socket.socket, hosts: set[str], port: int) -> bool:
    with suppress(OSError):
        peer = item.getpeername()
        if item.family in (socket.AF_INET, socket.AF_INET6) and peer[1] == port:
            return str(peer[0]).removeprefix("::ffff:") in hosts
    return False
