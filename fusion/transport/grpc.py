"""The transport between workers: one gRPC stream per directed pair, mutual TLS, every peer proven by its certificate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from fusion.base.errors import AuthError, ConfigError, FusionError, StateError, UnreachableError, WireError
from fusion.base.ids import Epoch, Incarnation, JobId, NodeId, StageIndex
from fusion.protocol.messages import Session
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import Caller, node_server_name, server_credentials
from fusion.transport.assembler import Assembler, Limit, ReceiveCounters
from fusion.transport.base import Incoming, Outgoing, Receiver
from fusion.transport.channels import (
    DATA_PLANE_CLIENT_OPTIONS,
    DATA_PLANE_SERVER_OPTIONS,
    Option,
    backoff_s,
    open_channel,
)
from fusion.transport.frames import DEFAULT_WINDOW_BYTES, check_hello, frame, hello, parse_frame
from fusion.transport.outbox import Outbox, SendCounters
from fusion.transport.streams import METHOD, RETRY_KEY, IncomingStream, handlers

__all__ = ["GrpcTransport", "PeerInfo"]

_DRAIN_S = 5.0
_REPLACED_S = 10.0  #: how long a worker of an earlier run may still answer at the address of the one we want
_TLS_MISMATCH = ("CERTIFICATE_VERIFY_FAILED", "is not in peer certificate")
_TLS_MISMATCHES = 3  #: so many answers in a row with a wrong certificate are no accident
_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED: AuthError,
    grpc.StatusCode.PERMISSION_DENIED: AuthError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.ALREADY_EXISTS: StateError,
    grpc.StatusCode.INVALID_ARGUMENT: WireError,
    grpc.StatusCode.UNIMPLEMENTED: WireError,
}


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A stage that messages are exchanged with, as the plan names it."""

    node: NodeId
    name: str  #: of the node, for people
    address: str  #: host:port of its data plane
    incarnation: Incarnation


@dataclass
class _Peer:
    """Everything about the link to one peer, both ways. `ended`, once set, stays."""

    stage: StageIndex
    info: PeerInfo
    outbox: Outbox
    assembler: Assembler
    outgoing_session: Session
    incoming_session: Session
    incoming: IncomingStream | None = None
    outgoing_open: bool = False
    incoming_open: bool = False
    ended: str = ""  #: "", "lost" or "departed"
    failure: FusionError | None = None  #: why it cannot be reached, while starting
    last_words: str = "no answer"  #: of the last attempt that failed
    call: Any = None
    thread: threading.Thread | None = None

    def __str__(self) -> str:
        return f"stage {self.stage} ({self.info.name} at {self.info.address})"


class _ThreadPerStream(futures.Executor):
    """Gives every stream a daemon thread of its own, so that a forgotten stream never keeps a process alive."""

    def __init__(self) -> None:
        self._number = count(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks the future
                future.set_exception(error)

        threading.Thread(target=run, name=f"fusion-answer-{next(self._number)}", daemon=True).start()
        return future


class GrpcTransport:
    """A `Transport` for one stage of one epoch of a job.

    It listens at `listen` (host:port) and dials every peer; `routes` replaces addresses when dialling, for the lab.
    `limit(header)` returns how many bytes a message's payload, and its tensor in memory, may have at most.
    `on_message` may be called before `start` returns. Never call `close` from a callback of the receiver.
    """

    def __init__(
        self,
        *,
        job: JobId,
        epoch: Epoch,
        stage: StageIndex,
        incarnation: Incarnation,
        peers: Mapping[StageIndex, PeerInfo],
        listen: str,
        credentials: Credentials,
        limit: Limit,
        server_tls: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
        routes: Mapping[str, str] | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        client_options: Sequence[Option] = DATA_PLANE_CLIENT_OPTIONS,
        server_options: Sequence[Option] = DATA_PLANE_SERVER_OPTIONS,
    ) -> None:
        self.job, self.epoch, self.stage, self.window_bytes = job, epoch, stage, window_bytes
        self._incarnation, self._listen, self._credentials = incarnation, listen, credentials
        self._routes = {} if routes is None else routes
        self._client_options, self._server_options = tuple(client_options), list(server_options)
        self._server_tls = server_tls or server_credentials(credentials)
        self._interceptors = list(interceptors)
        self._sequence, self._sequence_lock = count(1), threading.Lock()
        self._changed = threading.Condition()
        self._receiver: Receiver | None = None
        self._server: grpc.Server | None = None
        self._port = 0
        self._started = self._closing = False
        self._stop_dialling = threading.Event()
        self._peers = {number: self._make_peer(number, info, limit) for number, info in peers.items()}

    def _make_peer(self, number: StageIndex, info: PeerInfo, limit: Limit) -> _Peer:
        out = Session(self.job, self.epoch, self.stage, number, self._incarnation, info.incarnation)
        back = Session(self.job, self.epoch, number, self.stage, info.incarnation, self._incarnation)

        def returned(count_bytes: int) -> None:
            stream = peer.incoming
            if stream is not None:
                stream.give_credit(count_bytes)

        outbox = Outbox(out, self._next_sequence)
        peer = _Peer(number, info, outbox, Assembler(back, self.window_bytes, limit, returned), out, back)
        return peer

    def _next_sequence(self) -> int:
        with self._sequence_lock:
            return next(self._sequence)

    # --- the worker's side -------------------------------------------------------------------------------------

    def listen(self) -> int:
        """Bind the address and return its port; ConfigError if it cannot be bound. `start` does it if nobody did."""
        if self._server is None:
            server = grpc.server(
                _ThreadPerStream(),  # type: ignore[arg-type]
                handlers=[handlers(self._answer)],
                interceptors=self._interceptors,
                options=self._server_options,
                maximum_concurrent_rpcs=2 * len(self._peers) + 8,
            )
            try:
                self._port = server.add_secure_port(self._listen, self._server_tls)
            except RuntimeError:
                self._port = 0
            if self._port == 0:
                raise ConfigError(f"cannot listen on {self._listen}: the port is taken or the address is not ours")
            self._server = server
        return self._port

    def start(self, receiver: Receiver, connect_timeout_s: float) -> None:
        """Connect to every peer, and let every peer connect; return when all streams stand.

        UnreachableError names a peer that does not answer or does not connect; StateError, AuthError and WireError
        pass on a peer's refusal. After an error the transport is closed.
        """
        self._receiver = receiver
        self.listen()
        assert self._server is not None  # noqa: S101 - listen has just made it
        self._server.start()
        for peer in self._peers.values():
            peer.thread = threading.Thread(
                target=self._dial, args=(peer,), name=f"fusion-dial-{self.stage}-{peer.stage}", daemon=True
            )
            peer.thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._problem() is not None or self._complete(), connect_timeout_s)
            problem = self._problem()
            if problem is None and not self._complete():
                problem = self._lateness(connect_timeout_s)
            self._started = problem is None
        if problem is not None:
            self.close(f"stage {self.stage} could not start")
            raise problem

    def _complete(self) -> bool:
        return all(peer.outgoing_open and peer.incoming_open for peer in self._peers.values())

    def _problem(self) -> FusionError | None:
        for peer in self._peers.values():
            if peer.failure is not None:
                return peer.failure
            if peer.ended:
                return UnreachableError(f"{peer} {peer.ended} while connecting: {peer.last_words}")
        return None

    def _lateness(self, timeout_s: float) -> FusionError:
        for peer in self._peers.values():
            if not peer.outgoing_open:
                return UnreachableError(f"{peer} does not answer within {timeout_s:g} s: {peer.last_words}")
        late = next(peer for peer in self._peers.values() if not peer.incoming_open)
        return UnreachableError(
            f"{late} answers, but has not connected to {self._listen} within {timeout_s:g} s; is it open to it?"
        )

    def send(self, target: StageIndex, message: Outgoing) -> None:
        """Queue a message and return at once. After the peer is lost or has left, messages to it are dropped."""
        self._peers[target].outbox.put(message)

    def bytes_sent(self) -> dict[StageIndex, int]:
        """Return payload bytes sent to each peer so far."""
        return {stage: peer.outbox.counters.payload_bytes for stage, peer in self._peers.items()}

    def counters(self) -> dict[StageIndex, tuple[SendCounters, ReceiveCounters]]:
        """Return what went to and came from each peer so far."""
        return {stage: (peer.outbox.counters, peer.assembler.counters) for stage, peer in self._peers.items()}

    def close(self, reason: str) -> None:
        """Send what is queued (for at most 5 s), say goodbye, stop every thread, close every channel and the server."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._stop_dialling.set()
        end_s = time.monotonic() + (_DRAIN_S if self._started else 0.5)
        peers = list(self._peers.values())
        for peer in peers:
            peer.outbox.finish(reason)
            if peer.incoming is not None:
                peer.incoming.say_goodbye(reason)
            if not peer.outgoing_open:
                self._cancel(peer)
        for peer in peers:
            _join(peer.thread, end_s - time.monotonic())
            peer.outbox.abort()
            self._cancel(peer)
        for peer in peers:
            _join(peer.thread, 5.0)
        if self._server is not None:
            self._server.stop(grace=max(0.5, end_s - time.monotonic())).wait(10.0)
        for peer in peers:
            if peer.incoming is not None:
                peer.incoming.join(2.0)
            peer.assembler.drop()

    @staticmethod
    def _cancel(peer: _Peer) -> None:
        call = peer.call
        if call is not None:
            call.cancel()

    # --- the end of a link -------------------------------------------------------------------------------------

    def _end(self, peer: _Peer, how: str, words: str) -> bool:
        """Mark the link ended; whether the worker has to be told."""
        with self._changed:
            first = not peer.ended
            if first:
                peer.ended, peer.last_words = how, words
            tell = first and self._started and not self._closing
            self._changed.notify_all()
        peer.outbox.abort()
        return tell

    def lose(self, peer_stage: StageIndex, reason: str) -> None:
        """Nothing more goes to or comes from this peer; the worker is told, once."""
        peer = self._peers[peer_stage]
        tell = self._end(peer, "lost", reason)
        self._cancel(peer)
        if peer.incoming is not None:
            peer.incoming.end(grpc.StatusCode.ABORTED, reason)
        if tell and self._receiver is not None:
            self._receiver.on_lost(peer_stage, reason)

    def depart(self, peer_stage: StageIndex, reason: str) -> None:
        """The peer has said goodbye: what is meant for it is dropped, and its stream's end is no loss."""
        self._end(self._peers[peer_stage], "departed", reason)
