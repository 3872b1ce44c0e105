"""Puts a peer's frames together again, and trusts none of them: identity, bounds, order, credit and duplicates."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fusion.base.errors import WireError
from fusion.base.ids import StageIndex
from fusion.base.units import KIB, MIB
from fusion.graph.dag import DTYPE_BYTES
from fusion.observe import history
from fusion.protocol.header import describe, elements, header_from_proto, span_bytes
from fusion.protocol.messages import MessageHeader, MessageKind, Session
from fusion.transport.base import Incoming
from fusion.transport.frames import FREE_BYTES, MAX_CHUNK_BYTES
from fusion.wire.v1 import peer_pb2

__all__ = ["Assembler", "CreditError", "Limit", "ReceiveCounters"]

Limit = Callable[[MessageHeader], int]  #: most bytes of payload and of tensor memory; may raise WireError itself

_WITHOUT_STEP = (MessageKind.REPLICA, MessageKind.REPLICA_ACK)  #: their numbers on the stream are enough
_STEPS_REMEMBERED = 4  #: stages are at most one step apart; older messages cannot be meant
_MAX_MESSAGES_PER_STEP = 2**20
_TIMED_BYTES, _RECORD_BYTES = 64 * KIB, 16 * KIB  #: a header shares its TLS record with the payload's beginning
_MAX_FREE_OUTSTANDING = 1024  #: urgent messages without credit that may be held at once


class CreditError(WireError):
    """A peer that sends more than it has credit for."""


@dataclass(slots=True)
class ReceiveCounters:
    """What one directed link has brought so far."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0  #: frames, before TLS
    timed_bytes: int = 0  #: of messages large enough to time, without what arrives together with their header
    busy_s: float = 0.0  #: from each such message's header to its last byte


@dataclass(slots=True)
class _Open:
    """A message of which chunks are still to come."""

    number: int
    about: str
    header: MessageHeader
    payload: memoryview
    urgent: bool
    cost: int  #: bytes of credit
    began_s: float
    filled: int = 0


def _buffer(size: int) -> memoryview:
    """Return writable memory. Large buffers come from the kernel, page by page as they fill, 64-byte aligned.

    A bytearray would be zeroed first: seconds for a few gigabytes, in which no other Python thread runs.
    """
    return memoryview(bytearray(size) if size < MIB else mmap.mmap(-1, size))


class Assembler:
    """The receiving end of one directed link. One thread feeds it; `release` of its messages may come from any.

    `returned(n)` is called, outside of locks, when n bytes of credit are to go back to the sender.
    """

    def __init__(self, session: Session, window_bytes: int, limit: Limit, returned: Callable[[int], None]) -> None:
        self.counters = ReceiveCounters()
        self._session, self._window_bytes, self._limit, self._returned = session, window_bytes, limit, returned
        self._lock = threading.Lock()
        self._outstanding = 0  # bytes under credit that were announced and not released
        self._free_outstanding = 0  # messages without credit that were not released
        self._open: dict[bool, _Open] = {}  # by urgency: at most one message of each class is under way
        self._number = 0
        self._sequence = 0
        self._seen: dict[int, set[tuple[int, int, int]]] = {}  # by step
        self._oldest_step = 0

    @property
    def busy(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._open)

    @property
    def outstanding_bytes(self) -> int:
        """Payload bytes under credit that have been announced and not released yet."""
        with self._lock:
            return self._outstanding

    def header(self, message: peer_pb2.Header) -> Incoming | None:
        """Take the announcement of a message; returns the message if it has no payload.

        WireError (CreditError, or StateError for another epoch) if it must not be; nothing is allocated then.
        """
        header = header_from_proto(message, self._session)
        about = describe(header.kind, header.step, header.micro_batch, header.edge)
        size = message.payload_bytes
        self._check_numbers(message, about)
        self._check_size(header, size, about)
        cost = 0 if message.urgent and size <= FREE_BYTES else size
        self._charge(cost, size, about)
        self._remember(header, about)
        opened = _Open(message.message, about, header, _buffer(size), message.urgent, cost, time.monotonic())
        if size == 0:
            return self._arrived(opened)
        self._open[message.urgent] = opened
        return None

    def chunk(self, message: peer_pb2.Chunk) -> Incoming | None:
        """Take a part of a payload; returns the message when it is whole. WireError on a gap, overlap or surplus."""
        opened = next((each for each in self._open.values() if each.number == message.message), None)
        if opened is None:
            raise WireError(f"chunk of message {message.message}, which is not under way")
        size = len(message.data)
        if not 0 < size <= MAX_CHUNK_BYTES:
            raise WireError(f"{opened.about}: chunk of {size} bytes; allowed: 1..{MAX_CHUNK_BYTES}")
        if message.offset != opened.filled or opened.filled + size > len(opened.payload):
            raise WireError(
                f"{opened.about}: chunk of {size} bytes at offset {message.offset}, "
                f"but {opened.filled} of {len(opened.payload)} have arrived"
            )
        opened.payload[opened.filled : opened.filled + size] = message.data
        opened.filled += size
        if opened.filled < len(opened.payload):
            return None
        del self._open[opened.urgent]
        return self._arrived(opened)

    def drop(self) -> None:
        """Free the buffers of messages that will never be whole."""
        self._open.clear()

    def _check_numbers(self, message: peer_pb2.Header, about: str) -> None:
        if message.message != self._number + 1:
            raise WireError(f"{about}: message number {message.message} follows {self._number}")
        if message.sequence <= self._sequence:
            raise WireError(f"{about}: sequence {message.sequence} follows {self._sequence}")
        if message.urgent in self._open:
            raise WireError(f"{about}: begins before {self._open[message.urgent].about} has ended")
        self._number, self._sequence = message.message, message.sequence

    def _check_size(self, header: MessageHeader, size: int, about: str) -> None:
        try:
            limit = self._limit(header)
        except WireError as error:
            raise WireError(f"{about}: {error}") from None
        if size > limit:
            raise WireError(f"{about}: payload of {size} bytes, allowed: {limit}")
        if header.layout is None:
            return
        needed = max(span_bytes(header.layout), elements(header.layout) * DTYPE_BYTES[header.layout.dtype])
        if needed > limit:
            raise WireError(f"{about}: layout spans {needed} bytes, allowed: {limit}")

    def _charge(self, cost: int, size: int, about: str) -> None:
        if size == 0:
            return
        with self._lock:
            if cost == 0:
                if self._free_outstanding >= _MAX_FREE_OUTSTANDING:
                    raise CreditError(f"{about}: more than {_MAX_FREE_OUTSTANDING} messages wait without credit")
                self._free_outstanding += 1
                return
            if self._outstanding and self._outstanding + cost > self._window_bytes:
                raise CreditError(
                    f"{about}: {cost} bytes without credit; {self._outstanding} of {self._window_bytes} are outstanding"
                )
            self._outstanding += cost

    def _remember(self, header: MessageHeader, about: str) -> None:
        """Refuse a message that has come before, or whose step is long over; copies of kept states may take long."""
        if header.kind in _WITHOUT_STEP:
            return
        if header.step < self._oldest_step:
            raise WireError(f"{about}: came too late, step {self._oldest_step} is the oldest expected")
        seen = self._seen.setdefault(header.step, set())
        key = (header.kind, header.micro_batch, header.edge)
        if key in seen:
            raise WireError(f"{about}: came twice")
        if len(seen) >= _MAX_MESSAGES_PER_STEP:
            raise WireError(f"{about}: more than {_MAX_MESSAGES_PER_STEP} messages in one step")
        seen.add(key)
        oldest = header.step - _STEPS_REMEMBERED
        if oldest > self._oldest_step:
            self._oldest_step = oldest
            for step in [step for step in self._seen if step < oldest]:
                del self._seen[step]

    def _arrived(self, opened: _Open) -> Incoming:
        if history.active():
            header = opened.header
            history.note(
                "message", kind=header.kind.name, step=header.step, micro_batch=header.micro_batch, edge=header.edge,
                source=self._session.source, message_epoch=self._session.epoch, message_job=self._session.job,
            )  # fmt: skip
        self.counters.messages += 1
        self.counters.payload_bytes += len(opened.payload)
        if not opened.urgent and len(opened.payload) >= _TIMED_BYTES:
            self.counters.timed_bytes += len(opened.payload) - _RECORD_BYTES
            self.counters.busy_s += time.monotonic() - opened.began_s
        return Incoming(
            source=StageIndex(self._session.source),
            header=opened.header,
            payload=opened.payload,
            release=self._release_once(opened.cost, len(opened.payload)),
        )

    def _release_once(self, cost: int, size: int) -> Callable[[], None]:
        done = size == 0

        def release() -> None:
            nonlocal done
            with self._lock:
                if done:
                    return
                done = True
                if cost == 0:
                    self._free_outstanding -= 1
                else:
                    self._outstanding -= cost
            if cost:
                self._returned(cost)

        return release
