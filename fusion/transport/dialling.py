"""The dialling side of a link: try until the peer answers, send what its outbox holds, and come back when it breaks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from fusion.base.errors import AuthError, FusionError, StateError, WireError
from fusion.base.ids import StageIndex
from fusion.protocol.messages import Session
from fusion.transport.channels import TLS_MISMATCH, backoff_s
from fusion.transport.frames import check_hello, frame, hello, parse_frame, standing_of
from fusion.transport.outbox import Outbox
from fusion.transport.sockets import UnsentLimit
from fusion.transport.streams import METHOD, RETRY_KEY, SAID_KEY
from fusion.wire.v1 import peer_pb2

__all__ = ["RETURN_S", "DialHost", "OutgoingStream", "Route"]

log = logging.getLogger("fusion.transport")

_OTHER_RUN_S = 10.0  #: how long a worker of an earlier run may still answer at the address of the one we want
RETURN_S = 10.0  #: within which a stream that broke must be replaced
_RETURN_SILENT_S = 3.0  #: the same where the peer had been silent for long already
_REFUSED_S = 0.3  #: so long nobody may listen at the address of a worker that lives
_REFUSED = "Connection refused"
_SILENCE = ("ping timeout", "keepalive")  #: in grpc's words for a connection on which nothing came back
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}
)
_TLS_MISMATCHES = 3  #: so many answers in a row with a wrong certificate are no accident
#: UNIMPLEMENTED is none of them: so answers a daemon that holds the port until its worker begins.
_FINAL: dict[grpc.StatusCode, type[FusionError]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthError,
    grpc.StatusCode.PERMISSION_DENIED: AuthError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.INVALID_ARGUMENT: WireError,
}


class DialHost(Protocol):
    """What an outgoing stream needs from its transport. Called on the stream's threads."""

    def opened(self, stage: StageIndex) -> None:
        """The peer has answered: messages flow."""
        ...

    def unreachable(self, stage: StageIndex, error: FusionError) -> None:
        """The peer refuses for good; nothing was sent to it."""
        ...

    def parted(self, stage: StageIndex, reason: str) -> None:
        """The peer has said goodbye."""
        ...

    def cut(self, stage: StageIndex, reason: str) -> None:
        """The stream stood and has ended, with or without a goodbye before."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a peer."""

    address: str  #: host:port to dial
    open_channel: Callable[[], grpc.Channel]


class OutgoingStream:
    """The link to a peer. `start` begins to dial; `stop` ends it, whatever it is at.

    A stream that breaks is replaced by a new one while the peer's process seems to live, and goes on where the peer
    says that it stands. One that the peer itself ends is over.
    """

    def __init__(
        self, host: DialHost, label: str, session: Session, outbox: Outbox, route: Callable[[], Route]
    ) -> None:
        self.last_words = "no answer"  #: of the attempt that failed last
        self._host, self._label, self._session, self._outbox, self._route = host, label, session, outbox, route
        self._stopping = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(
            target=self._dial, name=f"fusion-dial-{session.source}-{session.target}", daemon=True
        )

    def start(self) -> None:
        """Dial on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Dial no more and cut the stream if it stands."""
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()

    def join(self, timeout_s: float) -> None:
        """Wait until the stream has ended by itself; at most that long."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, timeout_s))

    def _dial(self) -> None:
        judge: _Judge | _Return = _Judge(self._label)
        try:
            while not self._stopping.is_set():
                talk = _Talk()
                error = self._attempt(talk, judge.patience_s())
                if talk.answered:
                    if not _may_return(error):
                        self._host.cut(self._session.target, _words(error))
                        return
                    self._outbox.suspend()
                    log.warning("the stream to %s broke and is replaced: %s", self._label, _words(error))
                    judge = _Return(error)
                    continue
                self.last_words = _words(error)
                failure = judge.verdict(error)
                if isinstance(failure, FusionError):
                    self._host.unreachable(self._session.target, failure)
                    return
                if failure is not None:
                    self._host.cut(self._session.target, failure)
                    return
                self._stopping.wait(judge.pause_s())
        finally:
            self._outbox.abort()

    def _attempt(self, talk: _Talk, patience_s: float | None) -> Exception | None:
        """Open a stream over a new connection and read it to its end; returns what ended it, None for an orderly end.

        Without an answer within `patience_s` it is given up.
        """
        route = self._route()
        channel = route.open_channel()
        timer = None if patience_s is None else threading.Timer(patience_s, self._give_up, (talk,))
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            return self._converse(talk, channel, route)
        finally:
            if timer is not None:
                timer.cancel()
            talk.end()
            channel.close()

    def _give_up(self, talk: _Talk) -> None:
        if not talk.answered:
            self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _converse(self, talk: _Talk, channel: grpc.Channel, route: Route) -> Exception | None:
        # No serializers: frames are bytes to grpc. The stubs do not know that they may be left out.
        method: Callable[..., Any] = channel.stream_stream
        call = method(METHOD)(self._requests(talk))
        self._call = call
        if self._stopping.is_set():
            call.cancel()
        try:
            for data in call:
                self._take(talk, parse_frame(data), route)
        except (grpc.RpcError, FusionError) as error:
            call.cancel()
            return talk.stripe_error or error
        finally:
            talk.go.set()
        return None

    def _requests(self, talk: _Talk) -> Iterator[bytes]:
        """Runs on grpc's sending thread: nothing but the hello goes before the peer has answered."""
        yield frame(hello=hello(self._session, answer=False))
        talk.go.wait()
        if not talk.answered:
            return
        try:
            yield from self._outbox.frames(talk.generation)
        except Exception as error:  # noqa: BLE001 - of the worker's own encoder; grpc would only log it
            self._host.cut(self._session.target, f"a message cannot be sent: {type(error).__name__}: {error}")

    def _take(self, talk: _Talk, message: peer_pb2.PeerFrame, route: Route) -> None:
        body = message.WhichOneof("body")
        if body == "hello" and not talk.answered:
            check_hello(message.hello, self._session, answer=True)
            talk.generation = self._outbox.open(message.hello.window_bytes, standing_of(message.hello))
            talk.unsent = UnsentLimit(route.address)
            talk.answered = True
            talk.go.set()
            self._host.opened(self._session.target)
        elif body == "credit" and talk.answered:
            self._outbox.credit(message.credit.bytes, message.credit.window_bytes)
        elif body == "ack" and talk.answered:
            self._outbox.acknowledge(message.ack.bytes, message.ack.whole, message.ack.clock_s)
            self._adapt(talk, route)
        elif body == "goodbye":
            self._host.parted(self._session.target, message.goodbye.reason)
        else:
            raise WireError(f"{body} is not an answer that may come now")

    def _adapt(self, talk: _Talk, route: Route) -> None:
        """Follow the link's rate: bytes in the kernel's buffer, and the number of streams."""
        if talk.unsent is not None:
            talk.unsent.set(self._outbox.goodput.unsent_bytes())
        wanted = self._outbox.streams.streams - 1
        talk.stripes = [stripe for stripe in talk.stripes[:wanted] if stripe.alive]
        for number in range(len(talk.stripes) + 1, wanted + 1):
            stripe = _Stripe(number, self._session, self._outbox, talk.generation, route, self._stripe_broke(talk))
            talk.stripes.append(stripe)

    def _stripe_broke(self, talk: _Talk) -> Callable[[Exception], None]:
        def broke(error: Exception) -> None:
            """What was on that stream may be lost: all streams of the link begin anew."""
            talk.stripe_error = error
            self._cancel()

        return broke


class _Talk:
    """How far one attempt at a stream has come. `go` is set when it is answered, and when it is over."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.answered = False
        self.generation = 0
        self.unsent: UnsentLimit | None = None
        self.stripes: list[_Stripe] = []
        self.stripe_error: Exception | None = None

    def end(self) -> None:
        """Let go of what belongs to the stream."""
        if self.unsent is not None:
            self.unsent.close()
        for stripe in self.stripes:
            stripe.stop()


class _Stripe:
    """One more stream of a link, over a connection of its own: it carries chunks beside the one with the headers."""

    def __init__(
        self,
        number: int,
        session: Session,
        outbox: Outbox,
        generation: int,
        route: Route,
        broke: Callable[[Exception], None],
    ) -> None:
        self._number, self._session, self._outbox, self._generation = number, session, outbox, generation
        self._broke, self._go = broke, threading.Event()
        self._answered = self._stopped = False
        self._channel = route.open_channel()
        method: Callable[..., Any] = self._channel.stream_stream
        self._call = method(METHOD)(self._requests())
        name = f"fusion-stripe-{session.source}-{session.target}-{number}"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it at once; what is on its way may be lost."""
        self._stopped = True
        self._call.cancel()

    def _requests(self) -> Iterator[bytes]:
        yield frame(hello=hello(self._session, answer=False, stripe=self._number))
        self._go.wait()
        if self._answered:
            yield from self._outbox.frames(self._generation, self._number)

    def _read(self) -> None:
        try:
            for data in self._call:
                check_hello(parse_frame(data).hello, self._session, answer=True)
                self._answered = True
                self._go.set()
        except (grpc.RpcError, FusionError) as error:
            if self._answered and not self._stopped:
                self._broke(error)
        finally:
            self._go.set()
            self._call.cancel()
            self._channel.close()


class _Judge:
    """Decides after each failed attempt whether dialling a peer can still succeed."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._attempts = self._mismatches = 0
        self._other_run_since_s: float | None = None

    def patience_s(self) -> float | None:
        """Return how long an attempt may take; None: as long as it likes."""
        return None

    def pause_s(self) -> float:
        """Return how long to wait before the next attempt; short, so that a late peer is met soon."""
        return 0.05 + backoff_s(self._attempts, first_s=0.2, longest_s=2.0)

    def verdict(self, error: Exception | None) -> FusionError | None:
        """Return the error to give up with, or None to try again."""
        self._attempts += 1
        if isinstance(error, FusionError):
            return type(error)(f"{self._label}: {error}")
        if not isinstance(error, grpc.RpcError):
            return None
        words = _words(error)
        if any(item[0] == RETRY_KEY for item in _trailing_metadata(error)):
            return self._other_run(words)
        self._mismatches = self._mismatches + 1 if any(mark in words for mark in TLS_MISMATCH) else 0
        if self._mismatches >= _TLS_MISMATCHES:
            return AuthError(f"{self._label} is another machine than the plan names: {words}")
        family = _FINAL.get(error.code())
        return None if family is None else family(f"{self._label} refused: {words}")

    def _other_run(self, words: str) -> FusionError | None:
        now_s = time.monotonic()
        if self._other_run_since_s is None:
            self._other_run_since_s = now_s
        if now_s - self._other_run_since_s < _OTHER_RUN_S:
            return None
        return StateError(f"{self._label} refused for {_OTHER_RUN_S:.0f} s: {words}")


class _Return:
    """Decides after each failed attempt to replace a stream that broke whether the peer can still be there."""

    def __init__(self, cause: Exception | None) -> None:
        self._cause = _words(cause)
        silent = any(mark in self._cause for mark in _SILENCE)
        self._end_s = time.monotonic() + (_RETURN_SILENT_S if silent else RETURN_S)
        self._refused_since_s: float | None = None

    def patience_s(self) -> float:
        """Return how long an attempt may take."""
        return max(0.05, self._end_s - time.monotonic())

    def pause_s(self) -> float:
        """Return how long to wait before the next attempt."""
        return 0.1

    def verdict(self, error: Exception | None) -> str | None:
        """Return why the peer is given up, or None to try again."""
        words, now_s = _words(error), time.monotonic()
        if isinstance(error, FusionError) or not isinstance(error, grpc.RpcError) or _said(error):
            return f"{self._cause}; then it said: {words}"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # the daemon has the port: the worker is gone
            return f"{self._cause}; its worker has ended"
        if _REFUSED in words:  # a worker that lives listens
            if self._refused_since_s is None:
                self._refused_since_s = now_s
            if now_s - self._refused_since_s >= _REFUSED_S:
                return f"{self._cause}; nobody listens there any more"
        else:
            self._refused_since_s = None
        return f"{self._cause}; no new one within its time: {words}" if now_s >= self._end_s else None


def _may_return(error: Exception | None) -> bool:
    """Whether a stream that stood was broken by the network, so that another one may go on in its place."""
    return isinstance(error, grpc.RpcError) and not _said(error) and error.code() in _BROKEN


def _said(error: Any) -> bool:
    return any(item[0] == SAID_KEY for item in _trailing_metadata(error))


def _trailing_metadata(error: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(error.trailing_metadata() or ())


def _words(error: Exception | None) -> str:
    """Return one line on what ended a stream."""
    if error is None:
        return "it ended its stream without a goodbye"
    if isinstance(error, grpc.RpcError):
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"the connection broke or was refused ({error.details()})"
        return str(error.details())
    return str(error)
