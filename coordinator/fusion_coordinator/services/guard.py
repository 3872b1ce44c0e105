"""Turns our errors into statuses, for every handler and in one place; and what handlers ask of their context."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from fusion.base.errors import FusionError, WireError
from fusion.observe.logs import fields
from fusion.protocol.status import error_metadata, status_of
from fusion.security.handlers import decode_inside, guard_aio
from fusion.security.tls import Caller, caller
from fusion_coordinator.addresses import host_of_peer

log = logging.getLogger("fusion.coordinator.rpc")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """What a handler raises leaves as a status with one line; what is not ours leaves without its content."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)

        @asynccontextmanager
        async def guard(context: Any) -> AsyncIterator[None]:
            try:
                yield
            except grpc.aio.AbortError:
                raise
            except DecodeError:
                error = WireError(f"the request of {method} cannot be parsed")
                await context.abort(*status_of(error), error_metadata(error))
            except FusionError as error:
                code, line = status_of(error)
                log.info("call refused", extra=fields(method=method, code=code.name, peer=context.peer(), why=line))
                await context.abort(code, line, error_metadata(error))
            except Exception as error:  # the end of an RPC is where every error ends
                log.exception("call failed", extra=fields(method=method, peer=context.peer()))
                await context.abort(*status_of(error))

        return guard_aio(decode_inside(handler), guard)


def who(context: Any) -> Caller:
    """Return the caller, whom the authorizer has let through."""
    return caller(context)


def host_of(context: Any) -> str:
    """Return the IP address that the call comes from."""
    return host_of_peer(context.peer())
