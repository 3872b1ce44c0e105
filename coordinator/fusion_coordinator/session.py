"""A node's Watch stream: commands wait here for the stream's handler to send them."""

from __future__ import annotations

import asyncio
from typing import Any

from fusion.base.errors import FusionError
from fusion.base.ids import NodeId
from fusion.wire.v1 import node_pb2

MAX_WAITING = 256  #: commands; a node that does not take them is as good as gone


class Session:
    """One Watch stream of one registration."""

    def __init__(self, node: NodeId, incarnation: int) -> None:
        self.node, self.incarnation = node, incarnation
        self._commands: asyncio.Queue[node_pb2.Command] = asyncio.Queue()
        self._ended: asyncio.Future[FusionError] = asyncio.get_running_loop().create_future()

    def push(self, command: node_pb2.Command) -> None:
        """Queue a command."""
        if self._commands.qsize() < MAX_WAITING:
            self._commands.put_nowait(command)

    def end(self, error: FusionError) -> None:
        """Let the stream end with `error`, after what is queued."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def next(self, timeout_s: float) -> node_pb2.Command | None:
        """Return the next command, or None after `timeout_s`; raise the error that ends the stream."""
        if not self._commands.empty():
            return self._commands.get_nowait()
        if self._ended.done():
            raise self._ended.result()
        command = asyncio.ensure_future(self._commands.get())
        either: list[asyncio.Future[Any]] = [command, self._ended]
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not command.done():
                command.cancel()
        if command.done() and not command.cancelled():
            return command.result()
        if self._ended.done():
            raise self._ended.result()
        return None
