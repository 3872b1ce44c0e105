"""Puts a guard around the handlers of a gRPC server, of all four kinds and of both APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import grpc

AioGuard = Callable[[Any], AbstractAsyncContextManager[None]]  #: entered with the call's context around the handler
Guard = Callable[[Any], AbstractContextManager[None]]


def guard_aio(handler: Any, guard: AioGuard) -> Any:
    """Return `handler`, of a `grpc.aio` server, such that it runs inside `guard(context)`."""

    async def single(request: Any, context: Any) -> Any:
        async with guard(context):
            return await inner(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async with guard(context):
            async for response in inner(request, context):
                yield response

    inner = _inner(handler)
    return _rebuild(handler, stream if handler.response_streaming else single)


def decode_inside(handler: Any) -> Any:
    """Return `handler`, of a `grpc.aio` server, such that it parses its requests itself.

    gRPC parses outside the handler, where nothing of ours sees what fails; inside a guard it is one more error.
    """

    async def each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            yield decode(request)

    def behaviour(request: Any, context: Any) -> Any:
        return inner(each(request) if handler.request_streaming else decode(request), context)

    inner, decode = _inner(handler), handler.request_deserializer
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(behaviour, None, handler.response_serializer)


def guard_sync(handler: Any, guard: Guard) -> Any:
    """Return `handler`, of a threaded server, such that it runs inside `guard(context)`."""

    def single(request: Any, context: Any) -> Any:
        with guard(context):
            return inner(request, context)

    def stream(request: Any, context: Any) -> Iterator[Any]:
        with guard(context):
            yield from inner(request, context)

    inner = _inner(handler)
    return _rebuild(handler, stream if handler.response_streaming else single)


def _kind(handler: Any) -> str:
    return "_".join("stream" if flag else "unary" for flag in (handler.request_streaming, handler.response_streaming))


def _inner(handler: Any) -> Callable[[Any, Any], Any]:
    inner: Callable[[Any, Any], Any] = getattr(handler, _kind(handler))
    return inner


def _rebuild(handler: Any, behaviour: Callable[[Any, Any], Any]) -> Any:
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
