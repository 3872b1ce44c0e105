"""Calls that get lost: for tests only, with FUSION_TEST=1 and FUSION_RPC_CHAOS=SHARE.

Of all calls with one request and one answer, SHARE lose their request (it is never made), SHARE their answer (the
server has done it), and SHARE fail while they are under way (the server does it some time, perhaps after the retry).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import grpc
import grpc.aio

from fusion.base.fortests import setting_for_tests
from fusion.observe import history

__all__ = ["AioRpcChaos", "RpcChaos", "share"]

LATE_S = 0.3  #: within which a call that has failed under way is made all the same
_CHAOS = random.Random()  # noqa: S311 - no secret; the random numbers of the program under test are its own

_Fate = Literal["", "request", "answer", "under way"]


def share() -> float:
    """Return how many calls meet each of the three fates; 0 outside of tests."""
    text = setting_for_tests("FUSION_RPC_CHAOS")
    return 0.0 if text is None else float(text)


def _draw(part: float, method: Any) -> _Fate:
    drawn = _CHAOS.random()
    fate: _Fate = "request" if drawn < part else "answer" if drawn < 2 * part else "under way"
    if drawn >= 3 * part:
        return ""
    history.note("rpc_chaos", fate=fate, method=method.decode() if isinstance(method, bytes) else str(method))
    return fate


class _LostError(grpc.RpcError):
    """What the caller of a lost call gets."""

    def __init__(self, fate: str) -> None:
        super().__init__(fate)
        self._details = f"chaos: {fate} lost"

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()


class RpcChaos(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """For channels of threads."""

    def __init__(self, part: float) -> None:
        self._part = part

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        """Make the call, or not, or not yet."""
        fate = _draw(self._part, details.method)
        if fate == "under way":
            timer = threading.Timer(_CHAOS.uniform(0, LATE_S), lambda: continuation(details, request))
            timer.daemon = True
            timer.start()
        elif fate != "request":
            call = continuation(details, request)
            if not fate:
                return call
            call.exception()  # waits for its end
        raise _LostError(fate)


class AioRpcChaos(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """The same for asyncio's."""

    def __init__(self, part: float) -> None:
        self._part = part
        self._late: set[asyncio.Task[None]] = set()

    async def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any
    ) -> Any:
        """Make the call, or not, or not yet."""
        fate = _draw(self._part, details.method)
        if not fate:
            return await continuation(details, request)
        if fate == "answer":
            await _made(continuation, details, request)
        elif fate == "under way":
            task = asyncio.get_running_loop().create_task(self._make_late(continuation, details, request))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        lost = _LostError(fate)
        empty = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(lost.code(), empty, empty, lost.details(), None)

    async def _make_late(self, continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any) -> None:
        await asyncio.sleep(_CHAOS.uniform(0, LATE_S))
        await _made(continuation, details, request)


async def _made(continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any) -> None:
    try:
        await (await continuation(details, request))
    except grpc.RpcError:
        return
