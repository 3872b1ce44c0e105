"""The answering side of a peer stream: greet, take frames, return credits and acknowledgements, and say why it ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from fusion.base.errors import AuthError, FusionError, StateError, UnreachableError, WireError
from fusion.base.ids import StageIndex
from fusion.security.tls import Caller, caller
from fusion.transport.assembler import Assembler, CreditError, SupersededError
from fusion.transport.base import Incoming
from fusion.transport.frames import OtherRunError, chunk_of, frame, parse_frame
from fusion.wire.v1 import peer_pb2

__all__ = ["METHOD", "RETRY_KEY", "SAID_KEY", "Admission", "Host", "IncomingStream", "handlers"]

METHOD = "/fusion.wire.v1.Peer/Exchange"
RETRY_KEY = "fusion-retry"  #: trailing metadata of a refusal that may soon be over
SAID_KEY = "fusion-said"  #: trailing metadata of every end that a transport has decided on, rather than the network
_HELLO_S = 10.0
_ACK_EVERY_S = 0.01
_ANNOUNCED_S = 30.0

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


@dataclass(frozen=True, slots=True)
class Admission:
    """What a stream that is let in works with."""

    assembler: Assembler
    answer: bytes
    generation: int  #: of the link's streams
    credited_bytes: int  #: what the answer says of the credit
    window_bytes: int


class Host(Protocol):
    """What a stream needs from its transport."""

    def admit(self, stream: IncomingStream, greeting: peer_pb2.Hello, who: Caller) -> Admission:
        """Return where the stream's messages go, and the answer; raise what the peer is to be told instead."""
        ...

    def receive(self, message: Incoming) -> None:
        """Take a whole message."""
        ...

    def parted(self, stage: StageIndex, reason: str) -> None:
        """The peer has said goodbye."""
        ...

    def progressed(self, stage: StageIndex) -> None:
        """A stripe has brought something."""
        ...

    def broken(self, stream: IncomingStream, stage: StageIndex, reason: str, *, final: bool) -> None:
        """The stream, once admitted, has ended in any other way; `final`: no other may go on in its place."""
        ...


class IncomingStream:
    """One stream that a peer has opened: a thread reads its frames, grpc's own takes our answers."""

    def __init__(self, host: Host, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self._host, self._requests, self._context = host, requests, context
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._dirty = False  # something is to be acknowledged or credited
        self._told_bytes = 0  # credit
        self._told_window_bytes = 0
        self._acked_bytes = 0
        self._last_ack_s = 0.0
        self._status: tuple[grpc.StatusCode, str, bool] | None = None  # code, details, whether to try again
        self._finished = False
        self._terminated = False
        self._stage: StageIndex | None = None
        self._admission: Admission | None = None
        self._stripe = 0
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
            self._context.set_trailing_metadata(((SAID_KEY, "1"), (RETRY_KEY, "1")) if again else ((SAID_KEY, "1"),))
            self._context.abort(code, details)

    def _next_answer(self, hello_deadline_s: float) -> bytes | None:
        while True:
            with self._changed:
                if not self._await_answer(hello_deadline_s):
                    return None
                if self._frames:
                    return self._frames.popleft()
                self._dirty = False
            answer = self._acknowledgement()
            if answer is not None:
                return answer

    def _await_answer(self, hello_deadline_s: float) -> bool:
        """Wait until there is something to say; False at the end. Called with the lock held."""
        while not self._terminated:
            now_s = time.monotonic()
            if self._frames or (self._dirty and now_s >= self._last_ack_s + _ACK_EVERY_S):
                return True
            if self._finished or self._status is not None:
                return False
            left_s = None if self._admission is not None else hello_deadline_s - now_s
            if left_s is not None and left_s <= 0:
                self._status = (grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {_HELLO_S:.0f} s", False)
                return False
            self._changed.wait(self._last_ack_s + _ACK_EVERY_S - now_s if self._dirty else left_s)
        return False

    def _acknowledgement(self) -> bytes | None:
        """Return what is to be credited, or else acknowledged, as of now."""
        assert self._admission is not None  # nothing can be dirty before
        assembler = self._admission.assembler
        credit = assembler.credited_bytes - self._told_bytes
        window, told = assembler.window_bytes, self._told_window_bytes
        if credit > 0 or window > told:
            self._told_bytes, self._told_window_bytes = self._told_bytes + credit, window
            self.notice()  # acknowledgements come next
            return frame(credit=credit, window_bytes=window if window > told else 0)
        self._last_ack_s = time.monotonic()
        count, whole = assembler.acknowledgement()
        if (count, whole) == (self._acked_bytes, []):
            return None
        self._acked_bytes = count
        return frame(ack=peer_pb2.Ack(bytes=count, whole=whole, clock_s=self._last_ack_s))

    def _on_terminated(self) -> None:
        with self._changed:
            self._terminated = True
            self._changed.notify_all()

    def _post(self, data: bytes) -> None:
        with self._changed:
            self._frames.append(data)
            self._changed.notify_all()

    def notice(self) -> None:
        """Tell the peer soon what has come and how much more it may send."""
        if self._stripe == 0 and not self._dirty:  # while it is, the answering thread looks by itself
            with self._changed:
                self._dirty = True
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
        except SupersededError as error:
            self.end(grpc.StatusCode.ABORTED, str(error))
        except FusionError as error:
            self.end(_status(error), str(error), isinstance(error, OtherRunError))
            self._broken(f"broke the protocol: {error}", final=True)
        except grpc.RpcError:
            self._broken("the connection broke", final=False)
        except Exception as error:  # noqa: BLE001 - the worker's own on_message; the thread ends here
            self.end(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            self._broken(f"its message could not be taken: {type(error).__name__}: {error}", final=True)
        else:
            self._half_closed()

    def _half_closed(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        if not self._parted:
            self._broken("ended its stream without a goodbye", final=False)

    def _broken(self, reason: str, *, final: bool) -> None:
        if self._stage is not None and not self._parted:
            self._host.broken(self, self._stage, reason, final=final)

    def _take(self, data: bytes) -> None:
        admission = self._admission
        chunk = chunk_of(data) if admission is not None else None
        if admission is None or chunk is None:
            self._take_other(data)
            return
        if self._parted:
            raise WireError("chunk is not a frame that may come now")
        assembler = admission.assembler
        assembler.counters.wire_bytes += len(data)
        if self._stripe:
            assembler.await_message(chunk.message, admission.generation, _ANNOUNCED_S)
        assembler.chunk(chunk, admission.generation, self._host.receive, gaps=assembler.striped)
        self._notice_main()

    def _take_other(self, data: bytes) -> None:
        message = parse_frame(data)
        body = message.WhichOneof("body")
        if self._admission is None:
            self._greet(message)
            return
        if self._parted or body not in ("header", "chunk", "goodbye") or (self._stripe and body != "chunk"):
            raise WireError(f"{body} is not a frame that may come now")
        assembler = self._admission.assembler
        if body == "chunk":  # not as we would encode it; what is wrong with it the assembler says
            assembler.chunk(message.chunk, self._admission.generation, self._host.receive, gaps=assembler.striped)
            self._notice_main()
            return
        assembler.counters.wire_bytes += len(data)
        if body == "goodbye":
            self._part(message.goodbye.reason)
            return
        assembler.header(message.header, self._admission.generation, self._host.receive)
        if not message.header.payload_bytes:
            self._notice_main()

    def _notice_main(self) -> None:
        """Something has come that the stream with the headers is to acknowledge."""
        if self._stripe == 0:
            self.notice()
        elif self._stage is not None:
            self._host.progressed(self._stage)

    def _greet(self, message: peer_pb2.PeerFrame) -> None:
        if message.WhichOneof("body") != "hello":
            raise WireError("the first frame must be a hello")
        self._stripe = message.hello.stripe
        admission = self._host.admit(self, message.hello, caller(self._context))
        self._stage = StageIndex(message.hello.source_stage)
        self._told_bytes = admission.credited_bytes
        self._told_window_bytes = admission.window_bytes
        self._post(admission.answer)
        with self._changed:
            self._admission = admission
            self._changed.notify_all()

    def _part(self, reason: str) -> None:
        assert self._admission is not None and self._stage is not None  # noqa: PT018 - after the greeting
        if self._admission.assembler.busy:
            raise WireError("goodbye in the middle of a message")
        self._parted = True
        self._host.parted(self._stage, reason)
