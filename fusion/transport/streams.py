"""The answering side of a peer stream: greet, take frames, return credits, and say exactly why when it must end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from fusion.base.errors import AuthError, FusionError, StateError, UnreachableError, WireError
from fusion.base.ids import StageIndex
from fusion.security.tls import Caller, caller
from fusion.transport.assembler import Assembler, CreditError
from fusion.transport.base import Incoming
from fusion.transport.frames import OtherRunError, frame, parse_frame
from fusion.wire.v1 import peer_pb2

__all__ = ["METHOD", "RETRY_KEY", "Host", "IncomingStream", "handlers"]

METHOD = "/fusion.wire.v1.Peer/Exchange"
RETRY_KEY = "fusion-retry"  #: trailing metadata of a refusal that may soon be over
_HELLO_S = 10.0

Answer = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


def handlers(answer: Answer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the Peer service. Frames pass as bytes, so that malformed ones get our answer and not grpc's."""
    _, service, method = METHOD.split("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(answer)})


def _status(error: FusionError) -> grpc.StatusCode:
    if isinstance(error, CreditError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, StateError):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, AuthError):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, UnreachableError):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INVALID_ARGUMENT


class Host(Protocol):
    """What a stream needs from its transport."""

    def admit(self, stream: IncomingStream, greeting: peer_pb2.Hello, who: Caller) -> tuple[Assembler, bytes]:
        """Return where the stream's messages go, and the answer; raise what the peer is to be told instead."""
        ...

    def receive(self, message: Incoming) -> None:
        """Take a whole message."""
        ...

    def parted(self, stage: StageIndex, reason: str) -> None:
        """The peer has said goodbye."""
        ...

    def broken(self, stream: IncomingStream, stage: StageIndex, reason: str) -> None:
        """The stream, once admitted, has ended in any other way."""
        ...


class IncomingStream:
    """One stream that a peer has opened: a thread reads its frames, grpc's own takes our answers."""

    def __init__(self, host: Host, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self.untouched = True  #: no message has been announced
        self._host, self._requests, self._context = host, requests, context
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._credit = 0
        self._status: tuple[grpc.StatusCode, str, bool] | None = None  # code, details, whether to try again
        self._finished = False
        self._terminated = False
        self._stage: StageIndex | None = None
        self._assembler: Assembler | None = None
        self._parted = False
        self._reader = threading.Thread(target=self._read, name="fusion-read-stream", daemon=True)

    # --- answers -----------------------------------------------------------------------------------------------

    def responses(self) -> Iterator[bytes]:
        """Yield answers until the stream ends; the status says how."""
        if not self._context.add_callback(self._on_terminated):
            return
        self._reader.start()
        deadline_s = time.monotonic() + _HELLO_S
        while (answer := self._next_answer(deadline_s)) is not None:
            yield answer
        if self._status is not None and not self._terminated:
            code, details, again = self._status
            if again:
                self._context.set_trailing_metadata(((RETRY_KEY, "1"),))
            self._context.abort(code, details)

    def _next_answer(self, hello_deadline_s: float) -> bytes | None:
        with self._changed:
            while not self._terminated:
                if self._frames:
                    return self._frames.popleft()
                if self._credit:
                    credit, self._credit = self._credit, 0
                    return frame(credit=credit)
                if self._finished or self._status is not None:
                    return None
                left_s = None if self._assembler is not None else hello_deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._status = (grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_S:.0f} s", False)
                    return None
                self._changed.wait(left_s)
            return None

    def _on_terminated(self) -> None:
        with self._changed:
            self._terminated = True
            self._changed.notify_all()

    def _post(self, data: bytes) -> None:
        with self._changed:
            self._frames.append(data)
            self._changed.notify_all()

    def give_credit(self, count: int) -> None:
        """Let the peer send `count` bytes more."""
        with self._changed:
            self._credit += count
            self._changed.notify_all()

    def say_goodbye(self, reason: str) -> None:
        """Tell the peer that nothing more is wanted of it."""
        self._post(frame(goodbye=reason))

    def end(self, code: grpc.StatusCode, details: str, again: bool = False) -> None:
        """End the stream with a status; the first one counts."""
        with self._changed:
            if self._status is None and not self._finished:
                self._status = (code, details[:1000], again)
            self._changed.notify_all()

    @property
    def ended_here(self) -> bool:
        """Whether it was us who ended it with a status."""
        return self._status is not None

    def join(self, timeout_s: float) -> None:
        """Wait for the reading thread, which ends with the stream."""
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(timeout_s)

    # --- frames ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for data in self._requests:
                self._take(data)
        except FusionError as error:
            self.end(_status(error), str(error), isinstance(error, OtherRunError))
            self._broken(f"broke the protocol: {error}")
        except grpc.RpcError:
            self._broken("the connection broke")
        except Exception as error:  # noqa: BLE001 - the worker's own on_message; the thread ends here
            self.end(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            self._broken(f"its message could not be taken: {type(error).__name__}: {error}")
        else:
            self._half_closed()
        finally:
            if self._assembler is not None:
                self._assembler.drop()

    def _half_closed(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        if not self._parted:
            self._broken("ended its stream without a goodbye")

    def _broken(self, reason: str) -> None:
        if self._stage is not None and not self._parted:
            self._host.broken(self, self._stage, reason)

    def _take(self, data: bytes) -> None:
        message = parse_frame(data)
        body = message.WhichOneof("body")
        if self._assembler is None:
            self._greet(message)
            return
        if self._parted or body not in ("header", "chunk", "goodbye"):
            raise WireError(f"{body} is not a frame that may come now")
        self._assembler.counters.wire_bytes += len(data)
        if body == "goodbye":
            self._part(message.goodbye.reason)
            return
        self.untouched = False
        arrived = self._assembler.header(message.header) if body == "header" else self._assembler.chunk(message.chunk)
        if arrived is not None:
            self._host.receive(arrived)

    def _greet(self, message: peer_pb2.PeerFrame) -> None:
        if message.WhichOneof("body") != "hello":
            raise WireError("the first frame must be a hello")
        assembler, answer = self._host.admit(self, message.hello, caller(self._context))
        self._stage = StageIndex(message.hello.source_stage)
        self._post(answer)
        with self._changed:
            self._assembler = assembler
            self._changed.notify_all()

    def _part(self, reason: str) -> None:
        assert self._assembler is not None and self._stage is not None  # noqa: PT018 - after the greeting
        if self._assembler.busy:
            raise WireError("goodbye in the middle of a message")
        self._parted = True
        self._host.parted(self._stage, reason)
