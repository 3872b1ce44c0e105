"""The transport between workers: a gRPC stream per directed pair, mutual TLS, every peer proven by its certificate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from fusion.base.errors import AuthError, ConfigError, FusionError, StateError, UnreachableError
from fusion.base.ids import Epoch, Incarnation, JobId, NodeId, StageIndex
from fusion.links.clocks import Offset
from fusion.protocol.messages import Session
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import Caller, node_server_name, server_credentials
from fusion.transport.assembler import Assembler, Limit, ReceiveCounters
from fusion.transport.base import Incoming, Outgoing, Receiver
from fusion.transport.channels import DATA_PLANE_CLIENT_OPTIONS, DATA_PLANE_SERVER_OPTIONS, Option, open_channel
from fusion.transport.dialling import RETURN_S, OutgoingStream, Route
from fusion.transport.frames import DEFAULT_WINDOW_BYTES, check_hello, frame, hello
from fusion.transport.outbox import Outbox, SendCounters
from fusion.transport.reverse import WAITING_CALLS, ReverseDoor
from fusion.transport.streams import Admission, IncomingStream, handlers
from fusion.transport.striping import MAX_STREAMS
from fusion.transport.window import Window
from fusion.wire.v1 import peer_pb2

__all__ = ["GrpcTransport", "PeerInfo"]

_DRAIN_S = 5.0
_DRAIN_LOOK_S = 0.02
_BETTER_WORDS_S = 0.5
_LATER_S = 3.0  #: the dialling side may notice so much later that its stream broke


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
    label: str
    info: PeerInfo
    outbox: Outbox
    outgoing: OutgoingStream
    incoming_session: Session
    assembler: Assembler
    incoming: IncomingStream | None = None
    outgoing_open: bool = False
    incoming_open: bool = False
    generation: int = 0  #: of the streams from it
    waiting: threading.Timer | None = None  #: until it must have dialled again
    ended: str = ""  #: "", "was lost" or "has left"
    reason: str = ""  #: of the end
    failure: FusionError | None = None  #: why it cannot be reached, while starting

    def __str__(self) -> str:
        return self.label

    def progressed(self) -> None:
        """Let the stream with the headers acknowledge what has come, and return credit."""
        stream = self.incoming
        if stream is not None:
            stream.notice()


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

    It listens at `listen` (host:port) and dials every peer; `routes` replaces addresses when dialling. `answering`
    are nodes that cannot be dialled and call us instead (see `reverse`).
    `limit(header)` returns how many bytes a message's payload, and its tensor in memory, may have at most.
    A peer may have `window_bytes` of payload under way; with `most_window_bytes` that grows up to so many, as the path
    asks (`fusion.transport.window`). `on_message` may be called before `start` returns. Never call `close` from a
    callback of the receiver.
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
        interceptors: Sequence[grpc.ServerInterceptor[Any, Any]] = (),
        routes: Mapping[str, str] | None = None,
        answering: Collection[str] = (),
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        most_window_bytes: int = 0,
        client_options: Sequence[Option] = DATA_PLANE_CLIENT_OPTIONS,
        server_options: Sequence[Option] = DATA_PLANE_SERVER_OPTIONS,
    ) -> None:
        self.job, self.epoch, self.stage = job, epoch, stage
        self._window_bytes = window_bytes, most_window_bytes
        self._incarnation, self._listen, self._credentials = incarnation, listen, credentials
        self._routes = {} if routes is None else routes
        self._door = ReverseDoor(answering) if answering else None
        self._client_options, self._server_options = tuple(client_options), list(server_options)
        self._server_tls = server_tls or server_credentials(credentials)
        self._interceptors = list(interceptors)
        self._sequence, self._sequence_lock = count(1), threading.Lock()
        self._changed = threading.Condition()
        self._receiver: Receiver | None = None
        self._server: grpc.Server | None = None
        self._port = 0
        self._serving = self._started = self._closing = False
        self._peers = {number: self._make_peer(number, info, limit) for number, info in peers.items()}

    def _make_peer(self, number: StageIndex, info: PeerInfo, limit: Limit) -> _Peer:
        out = Session(self.job, self.epoch, self.stage, number, self._incarnation, info.incarnation)
        back = Session(self.job, self.epoch, number, self.stage, info.incarnation, self._incarnation)
        label = f"stage {number} ({info.name} at {info.address})"

        outbox = Outbox(out, self._next_sequence)
        outgoing = OutgoingStream(self, label, out, outbox, lambda: self._route(info))
        assembler = Assembler(back, Window(*self._window_bytes), limit, lambda _count_bytes: peer.progressed())
        peer = _Peer(number, label, info, outbox, outgoing, back, assembler)
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
                handlers=[handlers(self._answer), *(() if self._door is None else (self._door.handlers(),))],
                interceptors=self._interceptors,
                options=self._server_options,
                maximum_concurrent_rpcs=(2 * MAX_STREAMS + 2 + WAITING_CALLS) * len(self._peers) + 8,
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
        with self._changed:  # a close from another thread comes before this or after
            if self._server is not None and not self._closing:
                self._server.start()
                self._serving = True
        for peer in self._peers.values():
            peer.outgoing.start()
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
        if self._closing:
            return StateError(f"stage {self.stage} was closed while it was connecting")
        for peer in self._peers.values():
            if peer.failure is not None:
                return peer.failure
            if peer.ended:
                return UnreachableError(f"{peer} {peer.ended} while connecting: {peer.reason}")
        return None

    def _lateness(self, timeout_s: float) -> FusionError:
        for peer in self._peers.values():
            if not peer.outgoing_open:
                return UnreachableError(f"{peer} does not answer within {timeout_s:g} s: {peer.outgoing.last_words}")
        late = next(peer for peer in self._peers.values() if not peer.incoming_open)
        return UnreachableError(
            f"{late} answers, but has not connected to {self._listen} within {timeout_s:g} s; is it open to it?"
        )

    def send(self, target: StageIndex, message: Outgoing) -> None:
        """Queue a message and return at once. After the peer is lost or has left, messages to it are dropped."""
        self._peers[target].outbox.put(message)

    def rates(self) -> dict[StageIndex, float]:
        """Return the goodput to each peer in bytes per second, as acknowledgements show it; those that are known."""
        found = {stage: peer.outbox.goodput.bytes_per_s for stage, peer in self._peers.items()}
        return {stage: rate for stage, rate in found.items() if rate > 0}

    def bytes_sent(self) -> dict[StageIndex, int]:
        """Return payload bytes sent to each peer so far."""
        return {stage: peer.outbox.counters.payload_bytes for stage, peer in self._peers.items()}

    def counters(self) -> dict[StageIndex, tuple[SendCounters, ReceiveCounters]]:
        """Return what went to and came from each peer so far."""
        return {stage: (peer.outbox.counters, peer.assembler.counters) for stage, peer in self._peers.items()}

    def windows(self) -> dict[StageIndex, int]:
        """Return the bytes that each peer may have under way to this stage now."""
        return {stage: peer.assembler.window_bytes for stage, peer in self._peers.items()}

    def clocks(self) -> dict[StageIndex, Offset]:
        """Return how far the clocks of the peers are ahead of ours, as far as that is known."""
        found = {stage: peer.outbox.clock.offset() for stage, peer in self._peers.items()}
        return {stage: offset for stage, offset in found.items() if offset is not None}

    def drain(self, patience_s: float, give_up: Callable[[], bool]) -> None:
        """Return once the peers have used everything that was sent, or have gone; or once `give_up()` says so.

        A slow link takes its time: it also ends when nothing has left or come back for `patience_s`.
        """
        moved_s, before = time.monotonic(), (0, 0)
        while not give_up() and not all(peer.outbox.drained for peer in self._peers.values()):
            counters = [peer.outbox.counters for peer in self._peers.values()]
            now = sum(one.wire_bytes for one in counters), sum(one.messages for one in counters)
            if now != before:
                moved_s, before = time.monotonic(), now
            if time.monotonic() - moved_s > patience_s:
                return
            time.sleep(_DRAIN_LOOK_S)

    def close(self, reason: str) -> None:
        """Send what is queued (for at most 5 s), say goodbye, stop every thread, close every channel and the server."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        end_s = time.monotonic() + (_DRAIN_S if self._started else 0.5)
        peers = list(self._peers.values())
        for peer in peers:
            peer.outbox.finish(reason)
            if peer.incoming is not None:
                peer.incoming.say_goodbye(reason)
            if not peer.outgoing_open:
                peer.outgoing.stop()
        for peer in peers:
            peer.outgoing.join(end_s - time.monotonic())
            peer.outbox.abort()
            peer.outgoing.stop()
        for peer in peers:
            peer.outgoing.join(5.0)
        for peer in peers:
            if peer.waiting is not None:
                peer.waiting.cancel()
        if self._door is not None:
            self._door.close()
        self._stop_server(max(0.5, end_s - time.monotonic()))
        for peer in peers:
            if peer.incoming is not None:
                peer.incoming.join(2.0)

    def _stop_server(self, grace_s: float) -> None:
        server, self._server = self._server, None
        if server is not None:
            if not self._serving:
                server.start()  # grpc gives a port back only when a server that runs is stopped
            server.stop(grace_s).wait(grace_s + 5.0)

    # --- the end of a link -------------------------------------------------------------------------------------

    def _end(self, peer: _Peer, how: str, words: str) -> bool:
        """Mark the link ended; whether the worker has to be told."""
        with self._changed:
            first = not peer.ended
            if first:
                peer.ended, peer.reason = how, words
            tell = first and self._started and not self._closing
            self._changed.notify_all()
        peer.outbox.abort()
        if peer.waiting is not None:
            peer.waiting.cancel()
        return tell

    def _lose(self, peer: _Peer, reason: str) -> None:
        """Nothing more goes to or comes from this peer; the worker is told, once."""
        tell = self._end(peer, "was lost", reason)
        peer.outgoing.stop()
        if peer.incoming is not None:
            peer.incoming.end(grpc.StatusCode.ABORTED, reason)
        peer.assembler.drop()
        if tell and self._receiver is not None:
            self._receiver.on_lost(peer.stage, reason)

    # --- streams that peers have opened ------------------------------------------------------------------------

    def _answer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return IncomingStream(self, requests, context).responses()

    def admit(self, stream: IncomingStream, greeting: peer_pb2.Hello, who: Caller) -> Admission:
        """Take a peer's stream as one of its link; the errors are what the peer is told."""
        cluster = self._credentials.cluster
        if who.cluster != cluster or who.role is not Role.NODE:
            raise AuthError(f"only nodes of cluster {cluster} exchange tensors, you are {who.role} of {who.cluster}")
        source = StageIndex(greeting.source_stage)
        peer = self._peers.get(source)
        session = Session(
            self.job, self.epoch, source, self.stage, Incarnation(greeting.incarnation), self._incarnation
        )
        check_hello(greeting, session if peer is None else peer.incoming_session, answer=False)
        if peer is None:
            raise StateError(f"stage {source} exchanges nothing with stage {self.stage} in epoch {self.epoch}")
        if who.identity != peer.info.node:
            raise AuthError(f"stage {source} is node {peer.info.node} by the plan, you are {who.identity}")
        with self._changed:
            if self._closing:
                raise UnreachableError(f"stage {self.stage} is closing")
            if peer.ended:
                raise StateError(f"stage {peer.stage} {peer.ended} before: {peer.reason}")
            return self._add_stripe(peer) if greeting.stripe else self._adopt(peer, stream)

    def _adopt(self, peer: _Peer, stream: IncomingStream) -> Admission:
        """Let a stream carry the link from now on, in the place of one that broke or was cut before it was answered."""
        old, peer.incoming, peer.incoming_open = peer.incoming, stream, True
        if peer.waiting is not None:
            peer.waiting.cancel()
            peer.waiting = None
        generation, standing = peer.assembler.attach()
        peer.generation = generation
        if old is not None:
            old.end(grpc.StatusCode.ABORTED, "replaced by a newer stream")
        self._changed.notify_all()
        session = peer.incoming_session
        window_bytes = peer.assembler.window_bytes
        answer = frame(hello=hello(session, answer=True, window_bytes=window_bytes, standing=standing))
        return Admission(peer.assembler, answer, generation, standing.credited_bytes, window_bytes)

    def _add_stripe(self, peer: _Peer) -> Admission:
        if peer.incoming is None:
            raise UnreachableError(f"stage {peer.stage} has no stream to stage {self.stage} that this one could join")
        peer.assembler.striped = True
        window_bytes = peer.assembler.window_bytes
        answer = frame(hello=hello(peer.incoming_session, answer=True, window_bytes=window_bytes))
        return Admission(peer.assembler, answer, peer.generation, 0, window_bytes)

    def receive(self, message: Incoming) -> None:
        """Hand a whole message to the worker."""
        if self._receiver is not None and not self._closing:
            self._receiver.on_message(message)

    def parted(self, stage: StageIndex, reason: str) -> None:
        """The peer has said goodbye: what is meant for it is dropped, and its streams' end is no loss."""
        self._end(self._peers[stage], "has left", reason)

    def progressed(self, stage: StageIndex) -> None:
        """A stripe has brought something, which the stream with the headers acknowledges."""
        self._peers[stage].progressed()

    def broken(self, stream: IncomingStream, stage: StageIndex, reason: str, *, final: bool) -> None:
        """A stream that had been admitted has ended without a goodbye.

        Unless that is final, the peer may dial again for a while; whether it lives our own stream to it may tell first.
        """
        peer = self._peers[stage]
        words = f"{peer}: {reason}"
        if final:
            with self._changed:
                if not stream.ended_here:  # our own stream to the peer ends too, and its status may tell why
                    self._changed.wait_for(lambda: peer.ended or self._closing, _BETTER_WORDS_S)
            if not self._closing:
                self._lose(peer, words)
            return
        with self._changed:
            if peer.incoming is not stream or peer.ended or self._closing:
                return  # while we close, peers that heard our goodbye end their streams
            peer.incoming, peer.incoming_open = None, False
            if self._started:
                peer.waiting = threading.Timer(RETURN_S + _LATER_S, lambda: self._not_returned(peer, words))
                peer.waiting.daemon = True
                peer.waiting.start()

    def _not_returned(self, peer: _Peer, words: str) -> None:
        if peer.incoming is None and not self._closing:
            self._lose(peer, f"{words}, and it did not connect again within {RETURN_S + _LATER_S:.0f} s")

    # --- our streams to peers ----------------------------------------------------------------------------------

    def _route(self, info: PeerInfo) -> Route:
        reverse = None if self._door is None else self._door.address(info.node)
        address = reverse or self._routes.get(info.address, info.address)
        name = node_server_name(self._credentials.cluster, info.node)
        return Route(address, lambda: open_channel(address, self._credentials, name, self._client_options))

    def opened(self, stage: StageIndex) -> None:
        """Our stream to a peer stands."""
        with self._changed:
            self._peers[stage].outgoing_open = True
            self._changed.notify_all()

    def unreachable(self, stage: StageIndex, error: FusionError) -> None:
        """A peer refuses for good."""
        with self._changed:
            self._peers[stage].failure = error
            self._changed.notify_all()

    def cut(self, stage: StageIndex, reason: str) -> None:
        """Our stream to a peer has ended."""
        peer = self._peers[stage]
        if not peer.ended and not self._closing:
            self._lose(peer, f"{peer}: {reason}")
