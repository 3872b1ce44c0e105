"""What waits to be sent to one peer: three classes of urgency, credits in bytes, and the frames in their order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fusion.base.errors import WireError
from fusion.protocol.header import header_to_proto
from fusion.protocol.messages import MessageHeader, Session
from fusion.transport.base import Outgoing
from fusion.transport.frames import CHUNK_BYTES, FREE_BYTES, chunk_frame, frame

__all__ = ["Outbox", "SendCounters"]


@dataclass(slots=True)
class SendCounters:
    """What one directed link has sent so far."""

    messages: int = 0
    payload_bytes: int = 0  #: without background messages, which are not part of a step's traffic
    wire_bytes: int = 0  #: frames, before TLS
    sending_s: float = 0.0  #: the link was busy with a frame
    blocked_s: float = 0.0  #: a message waited for credit and nothing else could go


@dataclass(slots=True)
class _Prepared:
    """The message of a lane whose turn has come."""

    outgoing: Outgoing
    header: MessageHeader
    payload: memoryview
    number: int = 0  #: on this stream, once it has started
    offset: int = 0
    wire_bytes: int = 0

    @property
    def cost(self) -> int:
        """Bytes of credit that it needs."""
        free = self.outgoing.urgent and len(self.payload) <= FREE_BYTES
        return 0 if free else len(self.payload)


@dataclass(slots=True)
class _Lane:
    queue: deque[Outgoing] = field(default_factory=deque)
    current: _Prepared | None = None


class Outbox:
    """Queue and sender of one directed link. `frames` runs on the link's own thread; all else may be called anywhere.

    Urgent messages go first, also between two chunks of a bulk message. Background messages begin only while no bulk
    waits, not even for credit, and take a quarter of the window at most; the two never interleave, as the receiver
    takes one of them at a time. A message starts once its payload fits into
    the window beside what has not been credited back, or once nothing else is outstanding, so that a payload larger
    than the whole window passes too.
    """

    def __init__(self, session: Session, next_sequence: Callable[[], int]) -> None:
        self.counters = SendCounters()
        self._session, self._next_sequence = session, next_sequence
        self._changed = threading.Condition()
        self._urgent, self._bulk, self._background = _Lane(), _Lane(), _Lane()
        self._window_bytes: int | None = None  # unknown until the other side has answered
        self._outstanding = 0
        self._goodbye: str | None = None
        self._aborted = False
        self._preparing = False
        self._number = 0

    @property
    def drained(self) -> bool:
        """Whether everything has been sent and used by the other side, or never will be; background may wait."""
        with self._changed:
            waiting = self._preparing or any(lane.queue or lane.current for lane in (self._urgent, self._bulk))
            return self._aborted or not (waiting or self._outstanding)

    def put(self, message: Outgoing) -> None:
        """Queue a message; after `finish` or `abort` it is dropped."""
        with self._changed:
            if self._aborted or self._goodbye is not None:
                return
            lane = self._urgent if message.urgent else self._background if message.background else self._bulk
            lane.queue.append(message)
            self._changed.notify_all()

    def open(self, window_bytes: int) -> None:
        """Let messages go: the other side has answered and states its window."""
        with self._changed:
            self._window_bytes = window_bytes
            self._changed.notify_all()

    def credit(self, count: int) -> None:
        """Take back `count` bytes that the receiver no longer holds; WireError if it never had that many."""
        with self._changed:
            if count > self._outstanding:
                raise WireError(f"credit for {count} bytes, but only {self._outstanding} are outstanding")
            self._outstanding -= count
            self._changed.notify_all()

    def finish(self, reason: str) -> None:
        """Send what is queued, background left out, then a goodbye, and end."""
        with self._changed:
            self._background.queue.clear()
            if self._background.current is not None and not self._background.current.number:
                self._background.current = None
            if self._goodbye is None:
                self._goodbye = reason
            self._changed.notify_all()

    def abort(self) -> None:
        """Drop everything and end without a word."""
        with self._changed:
            self._aborted = True
            for lane in self._lanes:
                lane.queue.clear()
                lane.current = None
            self._changed.notify_all()

    def frames(self) -> Iterator[bytes]:
        """Yield frames as they may go; blocks in between. A frame has left when the next one is asked for."""
        while (lane := self._next_lane()) is not None:
            current = lane.current
            if current is None:
                self._prepare(lane)
                continue
            yield from self._timed(self._next_frame(current))
            self._settle(lane, current)
        with self._changed:
            goodbye = None if self._aborted else self._goodbye
        if goodbye is not None:
            yield from self._timed(frame(goodbye=goodbye))

    def _timed(self, data: bytes | None) -> Iterator[bytes]:
        if data is None:
            return
        began_s = time.monotonic()
        yield data
        self.counters.sending_s += time.monotonic() - began_s
        self.counters.wire_bytes += len(data)

    def _next_lane(self) -> _Lane | None:
        """Wait until a lane has something to prepare or to send; None when there will be nothing more."""
        with self._changed:
            while not self._aborted:
                for lane in self._in_turn():
                    if self._may_go(lane):
                        return lane
                blocked = any(lane.current is not None for lane in (self._urgent, self._bulk))
                waiting = blocked or self._urgent.queue or self._bulk.queue or self._background.current
                if self._goodbye is not None and not waiting:
                    return None
                began_s = time.monotonic()
                self._changed.wait()
                if blocked:
                    self.counters.blocked_s += time.monotonic() - began_s
            return None

    @property
    def _lanes(self) -> tuple[_Lane, ...]:
        return self._urgent, self._bulk, self._background

    def _in_turn(self) -> tuple[_Lane, ...]:
        """Return the lanes from which the next frame may come, the first one first."""
        begun = self._background.current
        if begun is not None and begun.number:
            return self._urgent, self._background
        if self._bulk.current is not None or self._bulk.queue:
            return self._urgent, self._bulk
        return self._lanes

    def _may_go(self, lane: _Lane) -> bool:
        if self._window_bytes is None:
            return False
        current = lane.current
        if current is None:
            return bool(lane.queue)
        if current.number or current.cost == 0 or self._outstanding == 0:
            return True
        share = self._window_bytes // 4 if current.outgoing.background else self._window_bytes
        return self._outstanding + current.cost <= share

    def _prepare(self, lane: _Lane) -> None:
        with self._changed:
            if not lane.queue:  # aborted in the meantime
                return
            outgoing = lane.queue.popleft()
            self._preparing = True
        header, payload = outgoing.prepare()
        prepared = _Prepared(outgoing, header, memoryview(payload).cast("B") if len(payload) else memoryview(b""))
        with self._changed:
            self._preparing = False
            if not self._aborted:
                lane.current = prepared

    def _next_frame(self, current: _Prepared) -> bytes | None:
        if not current.number:
            with self._changed:
                if self._aborted:
                    return None
                self._outstanding += current.cost
            return self._header_frame(current)
        part = current.payload[current.offset : current.offset + CHUNK_BYTES]
        data = chunk_frame(current.number, current.offset, part)
        current.offset += len(part)
        current.wire_bytes += len(data)
        return data

    def _header_frame(self, current: _Prepared) -> bytes:
        self._number += 1
        current.number = self._number
        data = frame(
            header=header_to_proto(
                self._session,
                current.header,
                message=current.number,
                sequence=self._next_sequence(),
                payload_bytes=len(current.payload),
                urgent=current.outgoing.urgent,
            )
        )
        current.wire_bytes = len(data)
        return data

    def _settle(self, lane: _Lane, current: _Prepared) -> None:
        """After a frame has left: a message that is through makes room for the next of its lane."""
        if current.offset < len(current.payload):
            return
        with self._changed:
            if self._aborted:
                return
            lane.current = None
        self.counters.messages += 1
        if not current.outgoing.background:
            self.counters.payload_bytes += len(current.payload)
        current.outgoing.sent(current.wire_bytes)
