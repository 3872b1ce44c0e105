"""What waits to be sent to one peer: three classes of urgency, credits in bytes, and the frames in their order.

A message is kept until the receiver has acknowledged it. When the stream breaks, the frames of the next one go on where
the receiver says that it stands: no message is lost, and none is sent twice.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fusion.base.errors import WireError
from fusion.links.clocks import ClockBook
from fusion.protocol.header import header_to_proto
from fusion.protocol.messages import MessageHeader, Session
from fusion.transport.base import Outgoing
from fusion.transport.frames import CHUNK_BYTES, FREE_BYTES, Standing, chunk_frame, frame
from fusion.transport.goodput import Goodput
from fusion.transport.striping import StreamCount

__all__ = ["Outbox", "SendCounters"]


@dataclass(slots=True)
class SendCounters:
    """What one directed link has sent so far."""

    messages: int = 0
    payload_bytes: int = 0  #: without background messages, which are not part of a step's traffic
    wire_bytes: int = 0  #: frames, before TLS
    sending_s: float = 0.0  #: the link was busy with a frame
    blocked_s: float = 0.0  #: a message waited for credit and nothing else could go


@dataclass(slots=True, eq=False)
class _Prepared:
    """A message that is ready to go, or has gone and is not acknowledged."""

    outgoing: Outgoing
    header: MessageHeader
    payload: memoryview
    lane: _Lane
    number: int = 0  #: on the wire, once it has been announced
    offset: int = 0  #: of the next chunk
    wire_bytes: int = 0
    left_s: float = 0.0  #: when it was announced
    counted: bool = False  #: it has left whole once

    @property
    def cost(self) -> int:
        """Bytes of credit that it needs."""
        free = self.outgoing.urgent and len(self.payload) <= FREE_BYTES
        return 0 if free else len(self.payload)


@dataclass(slots=True, eq=False)
class _Lane:
    queue: deque[Outgoing] = field(default_factory=deque)
    ready: deque[_Prepared] = field(default_factory=deque)  #: the first one is under way or about to be

    @property
    def current(self) -> _Prepared | None:
        return self.ready[0] if self.ready else None

    @property
    def hungry(self) -> bool:
        """Whether the next message may be prepared: while the one before is under way, not while it waits."""
        return bool(self.queue) and (not self.ready or (len(self.ready) == 1 and self.ready[0].number > 0))

    def __bool__(self) -> bool:
        return bool(self.queue or self.ready)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one frame carries: a message's announcement, or a part of it."""

    message: _Prepared
    part: memoryview | None
    offset: int
    last: bool


class Outbox:
    """Queue and sender of one directed link. `frames` runs on a stream's own thread; all else may be called anywhere.

    Urgent messages go first, also between two chunks of another. Background messages begin only while no bulk
    waits, not even for credit, and take a quarter of the window at most; bulk passes them between two chunks. A message
    starts once its payload fits into the window beside what has not been credited back, or once nothing else is
    outstanding, so that a payload larger than the whole window passes too.

    Bulk is prepared on a thread of its own, one message ahead, so that the link is busy while the next one is encoded.
    """

    def __init__(self, session: Session, next_sequence: Callable[[], int]) -> None:
        self.counters = SendCounters()
        self.goodput = Goodput()
        self.clock = ClockBook()  #: the receiver's
        self.streams = StreamCount()  #: how many connections the link should use
        self._session, self._next_sequence = session, next_sequence
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who send
        self._room = threading.Condition(self._lock)  # for the encoder
        self._urgent, self._bulk, self._background = _Lane(), _Lane(), _Lane()
        self._window_bytes: int | None = None  # unknown until the other side has answered
        self._charged = self._credited = 0  # bytes of credit since the beginning
        self._kept: dict[int, _Prepared] = {}  # announced and not acknowledged, by number
        self._sent_bytes = self._acked_bytes = 0  # of payload, since the present streams began
        self._goodbye: str | None = None
        self._aborted = self._suspended = False
        self._generation = 0  # of streams
        self._preparing: _Lane | None = None
        self._encoder: threading.Thread | None = None
        self._failure: Exception | None = None
        self._number = 0

    @property
    def drained(self) -> bool:
        """Whether everything has been sent and used by the other side, or never will be; background may wait."""
        with self._changed:
            kept = any(not message.outgoing.background for message in self._kept.values())
            waiting = bool(self._urgent or self._bulk or kept or self._preparing is self._bulk)
            return self._aborted or not (waiting or self._outstanding)

    @property
    def _outstanding(self) -> int:
        return self._charged - self._credited

    # --- the worker's side and the receiver's answers ----------------------------------------------------------

    def put(self, message: Outgoing) -> None:
        """Queue a message; after `finish` or `abort` it is dropped."""
        with self._changed:
            if self._aborted or self._goodbye is not None:
                return
            lane = self._urgent if message.urgent else self._background if message.background else self._bulk
            lane.queue.append(message)
            (self._changed if message.urgent else self._room).notify_all()

    def open(self, window_bytes: int, standing: Standing | None = None) -> int:
        """Let messages go: the other side has answered, states its window, and what it has of earlier streams.

        Returns the number by which `frames` knows that its stream is still the present one. WireError if the other side
        cannot stand where it says.
        """
        arrived: list[_Prepared] = []
        with self._changed:
            if standing is not None:
                arrived = self._go_back_to(standing)
            self._window_bytes = window_bytes
            self._suspended = False
            self._generation += 1
            self._sent_bytes = self._acked_bytes = 0
            self.goodput.restart()
            self.streams.restart()
            if self._encoder is None and not self._aborted:
                name = f"fusion-encode-{self._session.source}-{self._session.target}"
                self._encoder = threading.Thread(target=self._encode, name=name, daemon=True)
                self._encoder.start()
            self._changed.notify_all()
            generation = self._generation
        self._report(arrived)
        return generation

    def suspend(self) -> None:
        """Let nothing go until `open` is called again: the stream has broken."""
        with self._changed:
            self._suspended = True
            self._generation += 1
            self._changed.notify_all()

    def _go_back_to(self, standing: Standing) -> list[_Prepared]:
        """Take up messages where the other side has them; return those that it has whole."""
        if not 1 <= standing.next_message <= self._number + 1 or standing.credited_bytes > self._charged:
            raise WireError(f"it expects message {standing.next_message}, but {self._number} were sent")
        again: list[_Prepared] = []
        arrived: list[_Prepared] = []
        for number, message in list(self._kept.items()):
            if number >= standing.next_message:
                self._charged -= message.cost
                message.number = message.offset = 0
                del self._kept[number]
            elif number in standing.partial:
                message.offset = standing.partial[number]
                if message.offset > len(message.payload):
                    raise WireError(f"it has {message.offset} of {len(message.payload)} bytes of message {number}")
            else:
                del self._kept[number]
                _remove(message)
                arrived.append(message)
                continue
            again.append(message)
        for message in again:
            _remove(message)
        for message in reversed(again):
            message.lane.ready.appendleft(message)
        if standing.credited_bytes > self._charged:
            raise WireError(f"credit for {standing.credited_bytes} bytes, but only {self._charged} were sent")
        self._credited = standing.credited_bytes
        self._number = standing.next_message - 1
        return arrived

    def credit(self, count: int, window_bytes: int = 0) -> None:
        """Take back `count` bytes that the receiver no longer holds; WireError if it never had that many.

        window_bytes: the receiver's window has grown to that; 0: it is as it was.
        """
        with self._changed:
            if count > self._outstanding:
                raise WireError(f"credit for {count} bytes, but only {self._outstanding} are outstanding")
            self._credited += count
            if self._window_bytes is not None:
                self._window_bytes = max(self._window_bytes, window_bytes)
            self._changed.notify_all()

    def acknowledge(self, total_bytes: int, whole: Iterable[int], clock_s: float = 0.0) -> None:
        """Learn what has arrived: bytes since the present streams began, and messages that need not be kept.

        clock_s: the receiver's clock when it wrote that; 0: not stated. WireError if that cannot be.
        """
        arrived: list[_Prepared] = []
        with self._changed:
            if not self._acked_bytes <= total_bytes <= self._sent_bytes:
                raise WireError(f"acknowledges {total_bytes} bytes, but {self._sent_bytes} were sent")
            self._acked_bytes = total_bytes
            now_s = time.monotonic()
            window = self.goodput.acknowledged(total_bytes, self._sent_bytes - total_bytes, now_s)
            if window is not None:
                self.streams.sample(*window, now_s, self.goodput.trip_s)
            for number in whole:
                message = self._kept.get(number)
                if message is None or message.offset < len(message.payload):
                    raise WireError(f"acknowledges message {number}, which was not sent")
                del self._kept[number]
                arrived.append(message)
                self.goodput.travelled(len(message.payload), now_s - message.left_s)
                if clock_s:
                    self.clock.pair(message.left_s, clock_s, now_s)
            if self._goodbye is not None:
                self._changed.notify_all()
        self._report(arrived)

    def finish(self, reason: str) -> None:
        """Send what is queued, background left out, then a goodbye, and end."""
        with self._changed:
            self._background.queue.clear()
            for message in list(self._background.ready):
                if not message.number:
                    self._background.ready.remove(message)
            if self._goodbye is None:
                self._goodbye = reason
            self._changed.notify_all()
            self._room.notify_all()

    def abort(self) -> None:
        """Drop everything and end without a word."""
        with self._changed:
            self._aborted = True
            for lane in self._lanes:
                lane.queue.clear()
                lane.ready.clear()
            self._kept.clear()
            self._changed.notify_all()
            self._room.notify_all()

    # --- encoding ----------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        """Prepare bulk and background messages, one ahead; runs on the encoder's thread until the end."""
        while (lane := self._next_to_encode()) is not None:
            try:
                self._prepare(lane)
            except Exception as error:  # noqa: BLE001 - of the worker's own encoder: `frames` raises it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return

    def _next_to_encode(self) -> _Lane | None:
        with self._changed:
            while not self._aborted:
                for lane in (self._bulk, self._background):
                    if lane.hungry and not (lane is self._background and self._bulk):
                        self._preparing = lane
                        return lane
                if self._goodbye is not None and not (self._bulk.queue or self._background.queue):
                    return None
                self._room.wait()
            return None

    def _prepare(self, lane: _Lane) -> None:
        with self._changed:
            if not lane.queue:  # aborted in the meantime
                self._preparing = None
                return
            outgoing = lane.queue.popleft()
        prepared = None
        try:
            header, payload = outgoing.prepare()
            view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
            prepared = _Prepared(outgoing, header, view, lane)
        finally:
            with self._changed:  # in one: in between it would seem that nothing waits any more, and a goodbye might go
                if lane is self._preparing:
                    self._preparing = None
                ended = lane is self._background and self._goodbye is not None
                if prepared is not None and not self._aborted and not ended:
                    lane.ready.append(prepared)
                self._changed.notify_all()

    # --- frames ------------------------------------------------------------------------------------------------

    def frames(self, generation: int | None = None, stripe: int = 0) -> Iterator[bytes]:
        """Yield frames as they may go; blocks in between. A frame has left when the next one is asked for.

        It ends with the stream of this generation (None: the present one). Stripes, from 1, carry chunks only, beside
        the stream that has the headers; they end when so many streams are not wanted any more.
        """
        if generation is None:
            generation = self._generation
        while (step := self._next_step(generation, stripe)) is not None:
            if isinstance(step, _Lane):
                self._prepare(step)
                continue
            data = self._frame_of(step)
            yield from self._timed(data)
            self._left(step)
        with self._changed:
            over = self._aborted or stripe > 0 or generation != self._generation
            goodbye = None if over else self._goodbye
        if goodbye is not None:
            yield from self._timed(frame(goodbye=goodbye))

    def _timed(self, data: bytes) -> Iterator[bytes]:
        began_s = time.monotonic()
        yield data
        self.counters.sending_s += time.monotonic() - began_s
        self.counters.wire_bytes += len(data)

    def _next_step(self, generation: int, stripe: int) -> _Step | _Lane | None:
        """Wait for a frame to send, or an urgent message to prepare; None when there will be nothing more."""
        with self._changed:
            while not self._aborted and generation == self._generation and stripe < self.streams.streams:
                if self._failure is not None:
                    raise self._failure
                if not self._suspended:
                    if not stripe and self._urgent.hungry:
                        return self._urgent
                    for lane in self._in_turn():
                        if self._may_go(lane, stripe):
                            return self._take(lane)
                if self._goodbye is not None and not self._waiting():
                    return None
                began_s = time.monotonic()
                blocked = not stripe and any(lane.ready for lane in (self._urgent, self._bulk))
                self._changed.wait()
                if blocked:
                    self.counters.blocked_s += time.monotonic() - began_s
            return None

    def _waiting(self) -> bool:
        """Whether a goodbye has to wait: for bulk in the queue, or for something that was begun."""
        begun = bool(self._background.ready or self._kept) or self._preparing is not None
        return bool(self._urgent or self._bulk) or begun

    @property
    def _lanes(self) -> tuple[_Lane, ...]:
        return self._urgent, self._bulk, self._background

    def _in_turn(self) -> tuple[_Lane, ...]:
        """Return the lanes from which the next frame may come, the first one first."""
        begun = self._background.current is not None and self._background.current.number > 0
        return self._lanes if begun or not self._bulk else (self._urgent, self._bulk)

    def _may_go(self, lane: _Lane, stripe: int) -> bool:
        current = lane.current
        if self._window_bytes is None or current is None:
            return False
        if stripe:
            return lane is not self._urgent and current.number > 0 and current.offset < len(current.payload)
        if current.number or current.cost == 0 or self._outstanding == 0:
            return True
        share = self._window_bytes // 4 if current.outgoing.background else self._window_bytes
        return self._outstanding + current.cost <= share

    def _take(self, lane: _Lane) -> _Step:
        """Return the next frame's content of a lane, and move on. Called with the lock held."""
        message = lane.ready[0]
        part, offset = None, message.offset
        if message.number:
            size = self.goodput.chunk_bytes(CHUNK_BYTES)
            part = message.payload[offset : offset + size]
            message.offset += len(part)
            self._sent_bytes += len(part)
        else:
            self._number += 1
            message.number = self._number
            message.left_s = time.monotonic()
            self._charged += message.cost
            self._kept[message.number] = message
            self._room.notify_all()  # the next one may be prepared
        last = message.offset >= len(message.payload)
        if last:
            lane.ready.popleft()
            self._room.notify_all()
            if self._goodbye is not None:
                self._changed.notify_all()
        return _Step(message, part, offset, last)

    def _frame_of(self, step: _Step) -> bytes:
        message = step.message
        if step.part is not None:
            data = chunk_frame(message.number, step.offset, step.part)
        else:
            data = frame(
                header=header_to_proto(
                    self._session,
                    message.header,
                    message=message.number,
                    sequence=self._next_sequence(),
                    payload_bytes=len(message.payload),
                    urgent=message.outgoing.urgent,
                    background=message.outgoing.background,
                    checksum=zlib.crc32(message.payload),
                    path_bytes=self.goodput.path_bytes,
                )
            )
        message.wire_bytes += len(data)
        return data

    def _left(self, step: _Step) -> None:
        """A frame has been handed to the network."""
        if step.last:
            self._report([step.message])

    def _report(self, through: Iterable[_Prepared]) -> None:
        """Count messages that are through, and tell who sent them, once.

        That they have arrived says it too: a stream that breaks under a last frame never comes back for the next one.
        """
        with self._changed:
            fresh = [message for message in through if not (message.counted or self._aborted)]
            for message in fresh:
                message.counted = True
        for message in fresh:
            self.counters.messages += 1
            if not message.outgoing.background:
                self.counters.payload_bytes += len(message.payload)
            message.outgoing.sent(message.wire_bytes)


def _remove(message: _Prepared) -> None:
    if message in message.lane.ready:
        message.lane.ready.remove(message)
