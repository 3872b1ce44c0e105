"""gRPC channels and servers with the settings that hold over a WAN, and when a call may be tried again.

Every setting was tried against the fault it is for. The spellings matter: grpc ignores a name that it does not know.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from fusion.base.errors import AuthError, UnreachableError
from fusion.base.units import MIB
from fusion.protocol.status import from_rpc_error
from fusion.security.credentials import Credentials
from fusion.security.tls import channel_credentials
from fusion.transport import rpcchaos

__all__ = [
    "CLIENT_OPTIONS",
    "DATA_PLANE_CLIENT_OPTIONS",
    "DATA_PLANE_SERVER_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "Option",
    "RETRYABLE",
    "SERVER_OPTIONS",
    "TLS_MISMATCH",
    "backoff_s",
    "check_server",
    "open_aio_channel",
    "open_channel",
    "with_retries",
]

T = TypeVar("T")
Option = tuple[str, int | str]
_JITTER = random.Random()  # noqa: S311 - spreads load, no secret; the random numbers of the user's program are his

MAX_MESSAGE_BYTES = 4 * MIB  #: of any one gRPC message; bulk goes in chunks of at most 1 MiB

_BOTH: tuple[Option, ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it a frozen peer is noticed only a minute after the ping, whatever keepalive_timeout says.
    ("grpc.http2.ping_timeout_ms", 10_000),
)

CLIENT_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 1_000),
    # What grpc calls the minimum backoff is the time that one attempt may take: several round trips for TLS.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 15_000),
    # Channels of different identities in one process must never share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)

_SERVER: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.keepalive_time_ms", 30_000),
    # The `min_recv_ping_interval` spelling is ignored, and clients would be cut with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Else a second server binds the same port without a word.
    ("grpc.so_reuseport", 0),
)

SERVER_OPTIONS: tuple[Option, ...] = (
    *_SERVER,
    ("grpc.max_connection_idle_ms", 600_000),
    # Clients come back with a fresh handshake, so that an expired certificate is noticed.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 600_000),
)

#: Streams between workers live as long as their epoch; ageing would cut them after an hour.
DATA_PLANE_SERVER_OPTIONS: tuple[Option, ...] = _SERVER

#: For dialling workers, which may come up later than we do: try again soon.
DATA_PLANE_CLIENT_OPTIONS: tuple[Option, ...] = (
    *_BOTH,
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)

#: Only these say that the call may succeed when it is simply made again.
RETRYABLE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
)

#: What grpc's words hold when a server's certificate has another CA or another name. Where they change, a call only
#: takes longer to fail.
TLS_MISMATCH = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "is not in peer certificate")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 15.0
_ATTEMPT_S = 10.0


def _with_name(options: tuple[Option, ...], server_name: str) -> list[Option]:
    """The certificate must carry `server_name`, whatever the address is: names are ours, addresses change."""
    return [*options, ("grpc.ssl_target_name_override", server_name), ("grpc.default_authority", server_name)]


def open_channel(
    address: str, credentials: Credentials, server_name: str, options: tuple[Option, ...] = CLIENT_OPTIONS
) -> grpc.Channel:
    """Return a channel to `address` (host:port) with mutual TLS. Close it: grpc never does by itself."""
    channel = grpc.secure_channel(address, channel_credentials(credentials), options=_with_name(options, server_name))
    part = rpcchaos.share()
    return grpc.intercept_channel(channel, rpcchaos.RpcChaos(part)) if part else channel


def open_aio_channel(
    address: str, credentials: Credentials, server_name: str, options: tuple[Option, ...] = CLIENT_OPTIONS
) -> grpc.aio.Channel:
    """As `open_channel`, for asyncio; call it inside the running loop."""
    part = rpcchaos.share()
    chaos: Any = [rpcchaos.AioRpcChaos(part)] if part else None
    return grpc.aio.secure_channel(
        address,
        channel_credentials(credentials),
        options=_with_name(options, server_name),
        interceptors=chaos,
    )


def backoff_s(attempt: int, first_s: float = _FIRST_BACKOFF_S, longest_s: float = _LONGEST_BACKOFF_S) -> float:
    """Return how long to wait after failed attempt number `attempt` (from 0): exponential, with full jitter."""
    return _JITTER.uniform(0, min(longest_s, first_s * 2 ** min(attempt, 20)))


def check_server(error: grpc.RpcError, what: str) -> None:
    """Raise AuthError if a call failed because the server is not the one that our credentials are for."""
    details = str(error.details() if hasattr(error, "details") else error)
    if any(mark in details for mark in TLS_MISMATCH):
        raise AuthError(
            f"{what}: the server has a certificate of another cluster; check the address and the credentials, "
            "or join again if the coordinator was set up anew"
        ) from error


def with_retries(
    call: Callable[[float], T],
    deadline_s: float,
    what: str,
    attempt_s: float = _ATTEMPT_S,
    *,
    until_refused: bool = False,
) -> T:
    """Make an idempotent call until it succeeds, fails for good, or `deadline_s` seconds are over.

    `call` gets the seconds that this attempt may take, to pass on as `timeout=`. Only UNAVAILABLE, RESOURCE_EXHAUSTED
    and DEADLINE_EXCEEDED are tried again, and they too only where they are not the answer of a server that states an
    error of ours. Whatever ends it is raised as an error of our tree; `what` tells what was tried. A server of another
    cluster ends it at once, with AuthError; and with `until_refused` so does a machine on which nothing listens.
    """
    end_s = time.monotonic() + deadline_s
    attempt = 0
    while True:
        try:
            return call(max(0.001, min(attempt_s, end_s - time.monotonic())))
        except grpc.RpcError as error:
            check_server(error, what)
            if until_refused and _nothing_listens(error):
                raise UnreachableError(
                    f"{what}: nothing listens there (connection refused); start it with 'fusion-coordinator serve', or "
                    "state where it is with --coordinator HOST:PORT"
                ) from error
            ours = from_rpc_error(error, what)
            pause_s = backoff_s(attempt)
            if not isinstance(ours, UnreachableError) or time.monotonic() + pause_s >= end_s:
                raise ours from error
        attempt += 1
        time.sleep(pause_s)


def _nothing_listens(error: grpc.RpcError) -> bool:
    """Whether the machine answered that the port is closed; while a coordinator starts again it says so, too."""
    details = str(error.details() if hasattr(error, "details") else error)
    return "connection refused" in details.lower()
