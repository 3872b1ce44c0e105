"""The dialling side of a peer stream: try until the peer answers, send what its outbox holds, take back credit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from fusion.base.errors import AuthError, FusionError, StateError, WireError
from fusion.base.ids import StageIndex
from fusion.protocol.messages import Session
from fusion.transport.channels import TLS_MISMATCH, backoff_s
from fusion.transport.frames import check_hello, frame, hello, parse_frame
from fusion.transport.outbox import Outbox
from fusion.transport.streams import METHOD, RETRY_KEY
from fusion.wire.v1 import peer_pb2

__all__ = ["DialHost", "OutgoingStream"]

_OTHER_RUN_S = 10.0  #: how long a worker of an earlier run may still answer at the address of the one we want
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


class OutgoingStream:
    """The one stream to a peer. `start` begins to dial; `stop` ends it, whatever it is at."""

    def __init__(
        self,
        host: DialHost,
        label: str,
        session: Session,
        outbox: Outbox,
        open_channel: Callable[[], grpc.Channel],
    ) -> None:
        self.last_words = "no answer"  #: of the attempt that failed last
        self._host, self._label, self._session, self._outbox = host, label, session, outbox
        self._open_channel = open_channel
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
        channel = self._open_channel()
        # No serializers: frames are bytes to grpc. The stubs do not know that they may be left out.
        method: Callable[..., Any] = channel.stream_stream
        judge = _Judge(self._label)
        try:
            while not self._stopping.is_set():
                talk = _Talk()
                error = self._converse(talk, method(METHOD))
                if talk.answered:
                    self._host.cut(self._session.target, _words(error))
                    return
                self.last_words = _words(error)
                failure = judge.verdict(error)
                if failure is not None:
                    self._host.unreachable(self._session.target, failure)
                    return
                self._stopping.wait(judge.pause_s())
        finally:
            self._outbox.abort()
            channel.close()

    def _converse(self, talk: _Talk, method: Callable[[Iterator[bytes]], Any]) -> Exception | None:
        """Open a stream and read it to its end; returns what ended it, None for an orderly end."""
        call = method(self._requests(talk))
        self._call = call
        if self._stopping.is_set():
            call.cancel()
        try:
            for data in call:
                self._take(talk, parse_frame(data))
        except (grpc.RpcError, FusionError) as error:
            call.cancel()
            return error
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
            yield from self._outbox.frames()
        except Exception as error:  # noqa: BLE001 - of the worker's own encoder; grpc would only log it
            self._host.cut(self._session.target, f"a message cannot be sent: {type(error).__name__}: {error}")

    def _take(self, talk: _Talk, message: peer_pb2.PeerFrame) -> None:
        body = message.WhichOneof("body")
        if body == "hello" and not talk.answered:
            check_hello(message.hello, self._session, answer=True)
            self._outbox.open(message.hello.window_bytes)
            talk.answered = True
            talk.go.set()
            self._host.opened(self._session.target)
        elif body == "credit" and talk.answered:
            self._outbox.credit(message.credit.bytes)
        elif body == "goodbye":
            self._host.parted(self._session.target, message.goodbye.reason)
        else:
            raise WireError(f"{body} is not an answer that may come now")


class _Talk:
    """How far one attempt at a stream has come. `go` is set when it is answered, and when it is over."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.answered = False


class _Judge:
    """Decides after each failed attempt whether dialling a peer can still succeed."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._attempts = self._mismatches = 0
        self._other_run_since_s: float | None = None

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
