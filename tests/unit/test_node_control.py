"""The daemon's stream of commands: it must end when it is cancelled, in whatever moment that is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from fusion_node.control import Control


class WatchCall:
    """A Watch stream whose read fails when the test says so."""

    def __init__(self) -> None:
        self.failing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self) -> None:
        await self.failing

    def cancel(self) -> None:
        pass


def test_f31_a_stream_that_breaks_in_the_moment_of_its_cancellation_is_cancelled_all_the_same():
    """Coordinator and node are told to end at once: the node must not take the broken stream for a reason to go on."""

    async def scenario() -> None:
        call = WatchCall()
        control = Control.__new__(Control)  # without its channels
        control.address = "127.0.0.1:1"
        control._calls = SimpleNamespace(Watch=lambda _request: call)

        async def watch() -> None:
            async for _ in control.watch(1):
                pass

        task = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
        nothing = grpc.aio.Metadata()
        call.failing.set_exception(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "it stops"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
