"""Puts a peer's frames together again, and trusts none of them: identity, bounds, order, credit and duplicates."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fusion.base.errors import WireError
from fusion.base.ids import StageIndex
from fusion.base.units import KIB
from fusion.graph.dag import DTYPE_BYTES
from fusion.observe import failpoints, history
from fusion.protocol.header import describe, elements, header_from_proto, span_bytes
from fusion.protocol.messages import MessageHeader, MessageKind, Session
from fusion.transport.base import Incoming
from fusion.transport.buffers import BufferPool
from fusion.transport.frames import FREE_BYTES, MAX_CHUNK_BYTES, Chunk, Standing
from fusion.transport.window import Window
from fusion.wire.v1 import peer_pb2

__all__ = ["Assembler", "CreditError", "Limit", "ReceiveCounters", "SupersededError"]

Limit = Callable[[MessageHeader], int]  #: most bytes of payload and of tensor memory; may raise WireError itself

_WITHOUT_STEP = (
    MessageKind.REPLICA,
    MessageKind.REPLICA_ACK,
    MessageKind.CONTACT,
)  #: their numbers on the stream are enough
_STEPS_REMEMBERED = 4  #: stages are at most one step apart; older messages cannot be meant
_MAX_MESSAGES_PER_STEP = 2**20
_TIMED_BYTES, _RECORD_BYTES = 32 * KIB, 16 * KIB  #: a header shares its TLS record with the payload's beginning
_MAX_OPEN = 64  #: messages under way at once: one of each class, and a few on stripes
_BUFFERS = BufferPool()  #: of all links of this process
_MAX_FREE_OUTSTANDING = 1024  #: urgent messages without credit that may be held at once


class CreditError(WireError):
    """A peer that sends more than it has credit for."""


class SupersededError(WireError):
    """A stream whose place another one has taken."""


@dataclass(slots=True)
class ReceiveCounters:
    """What one directed link has brought so far."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0  #: frames, before TLS
    timed_messages: int = 0  #: large enough to time
    timed_bytes: int = 0  #: of those, without what arrives together with their header
    busy_s: float = 0.0  #: from each such message's header to its last byte


@dataclass(slots=True, eq=False)
class _Open:
    """A message of which chunks are still to come, or that waits for an earlier one of its class."""

    number: int
    about: str
    header: MessageHeader
    payload: memoryview
    urgent: bool
    background: bool
    cost: int  #: bytes of credit
    began_s: float
    checksum: int | None = None  #: crc32 of the payload, from a sender that states it
    filled: int = 0  #: bytes that are here without a gap
    ahead: dict[int, int] = field(default_factory=dict)  #: beyond the first gap: end by beginning

    @property
    def whole(self) -> bool:
        return self.filled == len(self.payload)


class Assembler:
    """The receiving end of one directed link. `release` of its messages may be called from any thread.

    The streams that carry the link feed it, each with the number that `attach` gave to their generation; what a
    stream of an earlier generation brings is refused with SupersededError. Messages of one class come out in the order
    in which they were announced. `returned(n)` is called, outside of locks, when n bytes of credit are to go back to
    the sender.
    """

    def __init__(self, session: Session, window: Window | int, limit: Limit, returned: Callable[[int], None]) -> None:
        self.counters = ReceiveCounters()
        self._session, self._limit, self._returned = session, limit, returned
        self._window = Window(window) if isinstance(window, int) else window
        self._lock = threading.Lock()  # of the credit
        self._outstanding = 0  # bytes under credit that were announced and not released
        self._free_outstanding = 0  # messages without credit that were not released
        self._credited = 0  # bytes released since the beginning
        self._feeding = threading.Condition()  # one stream at a time
        self._generation = 0
        self.striped = False  #: several streams carry the link
        self._open: dict[int, _Open] = {}  # by number
        self._order: dict[tuple[bool, bool], deque[_Open]] = {}  # by class
        self._number = 0
        self._sequence = 0
        self._bytes = 0  # of payload, since the present streams began
        self._whole: list[int] = []  # not acknowledged yet
        self._seen: dict[int, set[tuple[int, int, int]]] = {}  # by step
        self._oldest_step = 0

    @property
    def busy(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._open)

    @property
    def window_bytes(self) -> int:
        """Payload bytes that may be outstanding now."""
        with self._lock:
            return self._window.bytes

    @property
    def outstanding_bytes(self) -> int:
        """Payload bytes under credit that have been announced and not released yet."""
        with self._lock:
            return self._outstanding

    @property
    def credited_bytes(self) -> int:
        """Payload bytes under credit that have been released since the beginning."""
        with self._lock:
            return self._credited

    def attach(self) -> tuple[int, Standing]:
        """Begin a new generation of streams; returns its number, and where its messages have to go on."""
        with self._feeding:
            self._generation += 1
            self.striped = False
            self._feeding.notify_all()
            for opened in self._open.values():
                opened.ahead.clear()
            self._bytes, self._whole = 0, []
            partial = {number: opened.filled for number, opened in self._open.items() if not opened.whole}
            return self._generation, Standing(self._number + 1, partial, self.credited_bytes)

    def acknowledgement(self) -> tuple[int, list[int]]:
        """Return the bytes that have come since the present streams began, and the messages that have become whole."""
        with self._feeding:
            whole, self._whole = self._whole, []
            return self._bytes, whole

    def await_message(self, number: int, generation: int, timeout_s: float) -> None:
        """Return once message `number` has been announced; for stripes, which may be faster than the headers."""
        with self._feeding:
            if not self._feeding.wait_for(lambda: self._number >= number or self._stale(generation), timeout_s):
                raise WireError(f"chunk of message {number}, which was not announced within {timeout_s:.0f} s")

    def _stale(self, generation: int | None) -> bool:
        return generation is not None and generation != self._generation

    def _check_generation(self, generation: int | None) -> None:
        if self._stale(generation):
            raise SupersededError("a newer stream has taken over")

    def header(
        self, message: peer_pb2.Header, generation: int | None = None, deliver: Callable[[Incoming], None] | None = None
    ) -> list[Incoming]:
        """Take the announcement of a message; returns the messages that are whole by that.

        With `deliver` they are given to it instead, in order, before another stream's go on. WireError (CreditError, or
        StateError for another epoch) if it must not be; nothing is allocated then.
        """
        with self._feeding:
            self._check_generation(generation)
            header = header_from_proto(message, self._session)
            about = describe(header.kind, header.step, header.micro_batch, header.edge)
            size = message.payload_bytes
            self._check_numbers(message, about)
            self._check_size(header, size, about)
            cost = 0 if message.urgent and size <= FREE_BYTES else size
            self._charge(cost, size, about)
            with self._lock:
                self._window.follow(message.path_bytes)
            self._remember(header, about)
            now_s = time.monotonic()
            checksum = message.checksum if message.HasField("checksum") else None
            opened = _Open(
                message.message,
                about,
                header,
                _BUFFERS.take(size),
                message.urgent,
                message.background,
                cost,
                now_s,
                checksum,
            )
            self._number, self._sequence = message.message, message.sequence
            self._open[opened.number] = opened
            self._order.setdefault((opened.urgent, opened.background), deque()).append(opened)
            self._feeding.notify_all()
            return self._given(opened, deliver) if size == 0 else []

    def chunk(
        self,
        message: Chunk | peer_pb2.Chunk,
        generation: int | None = None,
        deliver: Callable[[Incoming], None] | None = None,
        *,
        gaps: bool = False,
    ) -> list[Incoming]:
        """Take a part of a payload; returns the messages that are whole by that, see `header`.

        WireError on an overlap or a surplus, and on a gap unless `gaps` says that several streams carry the link.
        """
        with self._feeding:
            self._check_generation(generation)
            opened = self._open.get(message.message)
            if opened is None or opened.whole:
                raise WireError(f"chunk of message {message.message}, which is not under way")
            size, offset = len(message.data), message.offset
            if not 0 < size <= MAX_CHUNK_BYTES:
                raise WireError(f"{opened.about}: chunk of {size} bytes; allowed: 1..{MAX_CHUNK_BYTES}")
            fits = offset == opened.filled or (gaps and _free(opened, offset, offset + size))
            if not fits or offset + size > len(opened.payload):
                raise WireError(
                    f"{opened.about}: chunk of {size} bytes at offset {offset}, "
                    f"but {opened.filled} of {len(opened.payload)} have arrived"
                )
            opened.payload[offset : offset + size] = message.data
            self._bytes += size
            if offset == opened.filled:
                opened.filled += size
                while (end := opened.ahead.pop(opened.filled, None)) is not None:
                    opened.filled = end
            else:
                opened.ahead[offset] = offset + size
            return self._given(opened, deliver) if opened.whole else []

    def drop(self) -> None:
        """Free the buffers of messages that will never be whole."""
        with self._feeding:
            self._open.clear()
            self._order.clear()

    def _given(self, opened: _Open, deliver: Callable[[Incoming], None] | None) -> list[Incoming]:
        """Return what can leave now that a message is whole: it, and later ones of its class that waited for it."""
        self._whole.append(opened.number)
        queue = self._order[opened.urgent, opened.background]
        arrived = []
        while queue and queue[0].whole:
            first = queue.popleft()
            del self._open[first.number]
            arrived.append(self._arrived(first))
        if deliver is None:
            return arrived
        for message in arrived:
            deliver(message)
        return []

    def _check_numbers(self, message: peer_pb2.Header, about: str) -> None:
        if message.message != self._number + 1:
            raise WireError(f"{about}: message number {message.message} follows {self._number}")
        if message.sequence <= self._sequence:
            raise WireError(f"{about}: sequence {message.sequence} follows {self._sequence}")
        if not self.striped:
            for opened in self._order.get((message.urgent, message.background), ()):
                if not opened.whole:
                    raise WireError(f"{about}: begins before {opened.about} has ended")
        if len(self._open) >= _MAX_OPEN:
            raise WireError(f"{about}: begins while {_MAX_OPEN} others have not ended")

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
            if self._outstanding and self._outstanding + cost > self._window.bytes:
                raise CreditError(
                    f"{about}: {cost} bytes without credit; {self._outstanding} of {self._window.bytes} are outstanding"
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

    def _check_content(self, opened: _Open) -> None:
        """What TLS cannot see is damage before it and after it."""
        if opened.payload and failpoints.reach("wire.arrived", step=opened.header.step, kind=opened.header.kind.name):
            opened.payload[len(opened.payload) // 2] ^= 1
        if opened.checksum is not None and zlib.crc32(opened.payload) != opened.checksum:
            raise WireError(f"{opened.about}: checksum mismatch, its bytes are not those that were sent")

    def _arrived(self, opened: _Open) -> Incoming:
        self._check_content(opened)
        if history.active():
            header = opened.header
            history.note(
                "message", kind=header.kind.name, step=header.step, micro_batch=header.micro_batch, edge=header.edge,
                source=self._session.source, message_epoch=self._session.epoch, message_job=self._session.job,
            )  # fmt: skip
        self.counters.messages += 1
        self.counters.payload_bytes += len(opened.payload)
        if not opened.urgent and len(opened.payload) >= _TIMED_BYTES:
            self.counters.timed_messages += 1
            self.counters.timed_bytes += len(opened.payload) - _RECORD_BYTES
            self.counters.busy_s += time.monotonic() - opened.began_s
        return Incoming(
            source=StageIndex(self._session.source),
            header=opened.header,
            payload=opened.payload,
            release=self._release_once(opened.cost, len(opened.payload)),
            began_s=opened.began_s,
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
                    self._credited += cost
            if cost:
                self._returned(cost)

        return release


def _free(opened: _Open, begin: int, end: int) -> bool:
    """Whether nothing between these offsets has arrived."""
    if begin < opened.filled:
        return False
    return all(end <= start or begin >= stop for start, stop in opened.ahead.items())
