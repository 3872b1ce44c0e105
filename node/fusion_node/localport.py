"""A Unix socket by which commands on the same machine talk to a running daemon: one JSON line there, one back.

It lies in the node's home, which only its owner may enter, so there is nothing to authenticate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from fusion.base.errors import ConfigError, StateError, UnreachableError
from fusion_node.hardware import MAX_FLOPS
from fusion_node.ipc import one_line

SOCKET = "local.sock"
TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 4096
_LONGEST_PATH = 100  #: bytes; the system's own limit is a little more


class EmulateSpeed(msgspec.Struct, frozen=True, tag="emulate-speed", forbid_unknown_fields=True):
    """Stand for a device of another speed from now on."""

    flops: Annotated[float, msgspec.Meta(gt=0.0, le=MAX_FLOPS)]


class Answer(msgspec.Struct, frozen=True):
    """What became of it."""

    done: str = ""  #: in words
    refused: str = ""  #: why it was not done


@asynccontextmanager
async def listening(home: Path, handle: Callable[[EmulateSpeed], str]) -> AsyncIterator[None]:
    """Answer requests at `home` until the block ends; `handle` says what it did, or raises StateError."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(TIMEOUT_S):
                    writer.write(msgspec.json.encode(_answer(await _line(reader), handle)) + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    path = home / SOCKET
    path.unlink(missing_ok=True)  # of a daemon that was killed: the caller holds the home's lock
    with _reachable(path) as short:
        server = await asyncio.start_unix_server(serve, short, limit=_MAX_LINE_BYTES)
    path.chmod(0o600)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()
        path.unlink(missing_ok=True)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:  # too long
        return b""


def _answer(line: bytes, handle: Callable[[EmulateSpeed], str]) -> Answer:
    try:
        return Answer(done=handle(msgspec.json.decode(line, type=EmulateSpeed)))
    except msgspec.DecodeError as error:
        return Answer(refused=one_line(f"request not understood: {error}", 300))
    except StateError as error:
        return Answer(refused=str(error))


def ask(home: Path, request: EmulateSpeed) -> str:
    """Send a request to the daemon that runs with `home`; return what it did.

    UnreachableError if none listens there; StateError if it refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _reachable(home / SOCKET) as short:
            connection.settimeout(TIMEOUT_S)
            connection.connect(short)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline(_MAX_LINE_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreachableError(
            f"no fusion-node that emulates a device runs with {home} ({reason}); start it with --emulate-speed"
        ) from None
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except msgspec.DecodeError:
        raise UnreachableError(f"the fusion-node of {home} did not answer in order; see its log") from None
    if answer.refused:
        raise StateError(answer.refused)
    return answer.done


@contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Give a short name for a socket, whose address may have no more than about a hundred bytes."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise ConfigError(f"--home: {path.parent} is too long for a socket; at most {_LONGEST_PATH} characters")
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
