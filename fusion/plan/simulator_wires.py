"""The network inside the simulator: links with queues, credit and delay, and pipes that several links share."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from fusion.base.units import KIB
from fusion.plan.simulation import Wire, WireUse
from fusion.plan.timeline import Kind, Span

CHUNK_BYTES = 512 * KIB  #: a control message overtakes bulk where a chunk of this size ends

Handler = Callable[[float, Any], None]


class Events:
    """What is going to happen, by time; of equal times in the order in which it was arranged."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._count = 0

    def at(self, time_s: float, handler: Handler, argument: Any) -> None:
        """Call `handler(time_s, argument)` when its time has come."""
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, handler, argument))

    def run(self) -> None:
        """Let everything happen."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            time_s, _, handler, argument = pop(heap)
            handler(time_s, argument)


class Taker(Protocol):
    """Where messages arrive."""

    def arrived(self, now_s: float, position: int) -> None:
        """One of the messages that instruction number `position` needs is here."""
        ...


class Message(NamedTuple):
    """A message on its way."""

    bytes: int
    taker: Taker
    position: int
    kind: Kind
    step: int
    micro_batch: int
    encode_s: float = 0.0
    decode_s: float = 0.0


class Line:
    """A wire at work: a queue, a thread that encodes and sends, and one that decodes, each one message at a time.

    Both threads work beside each other and beside all compute; a message is not encoded while another is being sent.
    A message starts once its bytes fit into the credit window, or once nothing else is outstanding; its credit returns
    one delay after the far stage has begun to use it. Control messages need no credit and overtake bulk at the next
    chunk.
    """

    def __init__(self, wire: Wire, back_delay_s: float, events: Events, spans: list[Span] | None) -> None:
        self.wire = wire
        self.rate = wire.rate_bytes_per_s  #: at present, where it goes through shared pipes
        self.remaining = 0.0  #: bytes of the message on the wire, at `since_s`
        self.since_s = 0.0
        self._window = wire.window_bytes
        self._delay_s, self._back_delay_s = wire.delay_s, back_delay_s
        self._events, self._spans = events, spans
        self._sharing: Sharing | None = None
        self._urgent: deque[Message] = deque()
        self._bulk: deque[Message] = deque()
        self._active: Message | None = None
        self._size = 0.0
        self._began_s = 0.0
        self._version = 0  #: of the arrangement for the end of the message on the wire; older ones are void
        self._encoding: Message | None = None
        self._encoded: Message | None = None  #: waits for control messages only
        self._decoder_free_s = self._urgent_free_s = 0.0
        self._outstanding = self._queued = self._buffered = 0
        self._blocked_since_s: float | None = None
        self._bytes, self._busy_s, self._blocked_s = 0, 0.0, 0.0
        self._queued_peak = self._buffered_peak = 0

    def join(self, sharing: Sharing) -> None:
        """Go through the wire's shared pipes."""
        self._sharing = sharing

    def send(self, now_s: float, message: Message) -> None:
        """Encode and send a bulk message after those before it."""
        self._queued += message.bytes
        self._queued_peak = max(self._queued_peak, self._queued)
        self._bulk.append(message)
        self._start(now_s)

    def send_control(self, now_s: float, message: Message) -> None:
        """Send a small message ahead of bulk."""
        if self._active is None or self.rate == inf:
            left = 0.0
        else:
            left = self.remaining - self.rate * (now_s - self.since_s)
        boundary = CHUNK_BYTES - (self._size - left) % CHUNK_BYTES
        if left <= boundary:  # between two messages
            self._urgent.append(message)
            self._start(now_s)
            return
        begin_s = max(now_s + boundary / self.rate, self._urgent_free_s)
        end_s = self._urgent_free_s = begin_s + message.bytes / self.rate
        self.settle(now_s)
        self.remaining += message.bytes
        self._size += message.bytes
        self.reschedule(now_s)
        self._leave(message, begin_s, end_s)

    def consume(self, now_s: float, count: int) -> None:
        """The far stage has begun to use a message of `count` bytes."""
        self._buffered -= count
        if self._window != inf:
            self._events.at(now_s + self._back_delay_s, self._credit, count)

    def settle(self, now_s: float) -> None:
        """Count what has left at the present rate."""
        self.remaining = max(0.0, self.remaining - self.rate * (now_s - self.since_s))
        self.since_s = now_s

    def reschedule(self, now_s: float) -> None:
        """Arrange the end of the message on the wire anew, after a change of rate or size."""
        self._version += 1
        self._events.at(now_s + self.remaining / self.rate, self._sent, self._version)

    def blocked(self) -> str | None:
        """Return, in words, why the line stands still although something waits; None if it does not."""
        if self._active is not None or self._encoding is not None or not self._bulk:
            return None
        return (
            f"link {self.wire.source} → {self.wire.target} has no credit for {self._bulk[0].bytes} bytes: "
            f"{self._outstanding} of its window of {self._window:.0f} are in use"
        )

    def use(self, total_s: float) -> WireUse:
        """Return what the line has carried within `total_s`."""
        return WireUse(
            source=self.wire.source,
            target=self.wire.target,
            bytes=self._bytes,
            busy_s=self._busy_s,
            share=self._busy_s / total_s if total_s else 0.0,
            blocked_s=self._blocked_s,
            queued_peak_bytes=self._queued_peak,
            buffered_peak_bytes=self._buffered_peak,
        )

    def _encode(self, now_s: float, message: Message) -> None:
        self._encoding = message
        end_s = now_s + message.encode_s
        self._note(message, now_s, end_s, Kind.ENCODE)
        self._events.at(end_s, self._end_encoding, message)

    def _end_encoding(self, now_s: float, message: Message) -> None:
        self._encoding, self._encoded = None, message
        self._start(now_s)

    def _credit(self, now_s: float, count: int) -> None:
        self._outstanding -= count
        if self._active is None:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        """Put the next message on the wire, if it is free and one may go."""
        if self._active is not None or self._encoding is not None:
            return
        if self._urgent:
            message = self._urgent.popleft()
        elif self._encoded is not None:
            message, self._encoded = self._encoded, None
        elif self._bulk:
            count = self._bulk[0].bytes
            if self._outstanding and self._outstanding + count > self._window:
                self._blocked_since_s = now_s if self._blocked_since_s is None else self._blocked_since_s
                return
            message = self._bulk.popleft()
            if self._window != inf:
                self._outstanding += count
            if self._blocked_since_s is not None:
                self._blocked_s += now_s - self._blocked_since_s
                self._blocked_since_s = None
            if message.encode_s:
                self._encode(now_s, message)
                return
        else:
            return
        self._active = message
        self._began_s = self.since_s = now_s
        self._size = self.remaining = message.bytes
        if self._sharing is not None:
            self._sharing.joined(now_s, self)
        else:
            self._version += 1
            self._events.at(now_s + message.bytes / self.rate, self._sent, self._version)

    def _sent(self, now_s: float, version: int) -> None:
        message = self._active
        if version != self._version or message is None:
            return
        self._active = None
        self._busy_s += now_s - self._began_s
        self._leave(message, self._began_s, now_s)
        if message.kind not in _CONTROL:
            self._queued -= message.bytes
        if self._sharing is not None:
            self._sharing.left(now_s, self)
        self._start(now_s)

    def _leave(self, message: Message, start_s: float, end_s: float) -> None:
        """The last byte leaves at `end_s`: from there on nothing but the delay and the decoder are in its way."""
        self._bytes += message.bytes
        self._note(message, start_s, end_s, message.kind)
        arrival_s = end_s + self._delay_s
        if message.kind in _CONTROL:
            self._events.at(arrival_s, self._deliver_control, message)
            return
        begin_s = max(arrival_s, self._decoder_free_s)
        self._decoder_free_s = ready_s = begin_s + message.decode_s
        if message.decode_s:
            self._note(message, begin_s, ready_s, Kind.DECODE)
        self._events.at(ready_s, self._deliver, message)

    def _deliver(self, now_s: float, message: Message) -> None:
        self._buffered += message.bytes
        self._buffered_peak = max(self._buffered_peak, self._buffered)
        message.taker.arrived(now_s, message.position)

    def _deliver_control(self, now_s: float, message: Message) -> None:
        message.taker.arrived(now_s, message.position)

    def _note(self, message: Message, start_s: float, end_s: float, kind: Kind) -> None:
        if self._spans is not None:
            wire = self.wire
            self._spans.append(Span(wire.source, wire.target, kind, message.step, message.micro_batch, start_s, end_s))


_CONTROL = (Kind.NORM, Kind.VERDICT)


class Sharing:
    """Pipes that several lines go through: each busy line gets its max-min fair share, as long-lived TCP flows do."""

    def __init__(self, rates_bytes_per_s: Sequence[float]) -> None:
        self._rates = rates_bytes_per_s
        # dictionaries for their order: sets of objects would make a run depend on addresses
        self._busy: list[dict[Line, None]] = [{} for _ in rates_bytes_per_s]

    def joined(self, now_s: float, line: Line) -> None:
        """A line has begun a message."""
        for pipe in line.wire.pipes:
            self._busy[pipe][line] = None
        line.rate = 0.0  # so that it counts as changed
        self._share(now_s, line.wire.pipes)

    def left(self, now_s: float, line: Line) -> None:
        """A line has ended a message."""
        for pipe in line.wire.pipes:
            del self._busy[pipe][line]
        self._share(now_s, line.wire.pipes)

    def _share(self, now_s: float, pipes: Iterable[int]) -> None:
        lines, touched = self._connected(pipes)
        for line, rate in self._fair_rates(lines, touched).items():
            if rate != line.rate:
                line.settle(now_s)
                line.rate = rate
                line.reschedule(now_s)

    def _connected(self, pipes: Iterable[int]) -> tuple[list[Line], list[int]]:
        """Return all busy lines, and all pipes, that a change in `pipes` may reach."""
        touched, lines = dict.fromkeys(pipes), dict[Line, None]()
        todo = list(touched)
        while todo:
            for line in self._busy[todo.pop()]:
                if line not in lines:
                    lines[line] = None
                    new = [pipe for pipe in line.wire.pipes if pipe not in touched]
                    touched.update(dict.fromkeys(new))
                    todo += new
        return list(lines), list(touched)

    def _fair_rates(self, lines: list[Line], pipes: list[int]) -> dict[Line, float]:
        """Raise all rates alike; whoever meets its own limit or that of a pipe stays there."""
        found: dict[Line, float] = {}
        left = {pipe: self._rates[pipe] for pipe in pipes}
        open_ = dict.fromkeys(lines)
        while open_:
            counts = {pipe: sum(line in open_ for line in self._busy[pipe]) for pipe in pipes}
            shares = {pipe: left[pipe] / count for pipe, count in counts.items() if count}
            limits = {
                line: min(line.wire.rate_bytes_per_s, *(shares[pipe] for pipe in line.wire.pipes)) for line in open_
            }
            level = min(limits.values())
            for line in [line for line, limit in limits.items() if limit <= level]:
                found[line] = level
                del open_[line]
                for pipe in line.wire.pipes:
                    left[pipe] = max(0.0, left[pipe] - level)
        return found
