"""The in-memory twin of the gRPC transport: several stages in one process, with the same order, credit and losses.

Outbox and assembler are those of the real transport, so every frame is made, encoded, checked and put together again;
only the network and TLS are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import count

from fusion.base.errors import StateError, UnreachableError, WireError
from fusion.base.ids import Epoch, Incarnation, JobId, StageIndex
from fusion.protocol.messages import Session
from fusion.transport.assembler import Assembler, Limit, ReceiveCounters
from fusion.transport.base import Incoming, Outgoing, Receiver
from fusion.transport.frames import DEFAULT_WINDOW_BYTES, chunk_of, parse_frame
from fusion.transport.outbox import Outbox, SendCounters
from fusion.transport.window import Window

__all__ = ["MemoryNetwork", "MemoryTransport"]

_DRAIN_S = 5.0
_JOB, _EPOCH, _INCARNATION = JobId("job-in-memory"), Epoch(1), Incarnation(1)


def _no_limit(_header: object) -> int:
    return 2**62


class MemoryNetwork:
    """Connects the stages of one process. `links` are the directed pairs that talk; by default every pair does."""

    def __init__(
        self,
        stages: Iterable[StageIndex],
        *,
        links: Iterable[tuple[StageIndex, StageIndex]] | None = None,
        limit: Limit = _no_limit,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        most_window_bytes: int = 0,
    ) -> None:
        members = sorted(stages)
        pairs = {(a, b) for a in members for b in members if a != b} if links is None else set(links)
        pairs |= {(b, a) for a, b in pairs}
        self.changed = threading.Condition()
        self._transports = {stage: MemoryTransport(self, stage) for stage in members}
        for source, target in sorted(pairs):
            window = Window(window_bytes, most_window_bytes)
            link = _Link(self._transports[source], self._transports[target], limit, window)
            self._transports[source].outgoing[target] = link
            self._transports[target].incoming[source] = link

    def transport(self, stage: StageIndex) -> MemoryTransport:
        """Return the transport of one stage."""
        return self._transports[stage]

    def interrupt(self, source: StageIndex, target: StageIndex) -> None:
        """Break the stream from one stage to another, wherever it is; a new one goes on in its place."""
        self._transports[source].outgoing[target].interrupt()

    def kill(self, stage: StageIndex) -> None:
        """Let a stage vanish as a killed process does: its peers lose it, and it learns nothing."""
        victim = self._transports[stage]
        victim.vanish()
        for peer in list(victim.outgoing):
            self._transports[peer].lose(stage, f"stage {stage} was killed")


class _Link:
    """One directed pair: a thread that takes frames from the source's outbox to the target's assembler."""

    def __init__(self, source: MemoryTransport, target: MemoryTransport, limit: Limit, window: Window) -> None:
        session = Session(_JOB, _EPOCH, source.stage, target.stage, _INCARNATION, _INCARNATION)
        self.source, self.target = source, target
        self.outbox = Outbox(session, source.next_sequence)
        self.assembler = Assembler(session, window, limit, lambda _count: self._return_credit())
        self._credit_lock = threading.Lock()
        self._told_bytes = 0  # credit
        self._interrupted = False
        self._interrupt_lock = threading.Lock()  # else a new stream might begin between the flag and the suspension
        name = f"fusion-link-{source.stage}-{target.stage}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def interrupt(self) -> None:
        """Lose what is on its way, as a connection that is reset does."""
        with self._interrupt_lock:
            self._interrupted = True
            self.outbox.suspend()

    def _was_interrupted(self) -> bool:
        with self._interrupt_lock:
            was, self._interrupted = self._interrupted, False
        return was

    def _return_credit(self) -> None:
        with self._credit_lock:
            count = self.assembler.credited_bytes - self._told_bytes
            if count > 0:
                self._told_bytes += count
                self.outbox.credit(count, self.assembler.window_bytes)

    def _run(self) -> None:
        try:
            while self._stream():
                pass
        except Exception as error:  # noqa: BLE001 - the end of a link's thread: both ends learn what ended it
            words = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
            self.source.lose(self.target.stage, f"link to stage {self.target.stage} ended: {words}")
            self.target.lose(self.source.stage, f"link from stage {self.source.stage} ended: {words}")

    def _stream(self) -> bool:
        """Carry frames until the stream ends; whether another one is to go on."""
        with self._credit_lock:
            generation, standing = self.assembler.attach()
            self._told_bytes = standing.credited_bytes
            frames = self.outbox.frames(self.outbox.open(self.assembler.window_bytes, standing))
        for data in frames:
            if self._was_interrupted():
                return True
            self.assembler.counters.wire_bytes += len(data)
            self._deliver(data, generation)
        return self._was_interrupted()

    def _deliver(self, data: bytes, generation: int) -> None:
        chunk = chunk_of(data)
        if chunk is not None:
            self.assembler.chunk(chunk, generation, self.target.receive)
        else:
            message = parse_frame(data)
            if message.WhichOneof("body") == "goodbye":
                self.target.depart(self.source.stage)
                return
            self.assembler.header(message.header, generation, self.target.receive)
        self.outbox.acknowledge(*self.assembler.acknowledgement())


class MemoryTransport:
    """A `Transport` to the other stages of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, stage: StageIndex) -> None:
        self.stage = stage
        self.outgoing: dict[StageIndex, _Link] = {}
        self.incoming: dict[StageIndex, _Link] = {}
        self._network = network
        self._receiver: Receiver | None = None
        self._sequence = count(1)
        self._sequence_lock = threading.Lock()
        self._gone: set[StageIndex] = set()  # lost or departed
        self._begun = self._started = self._closing = self._closed = False

    def next_sequence(self) -> int:
        """Return the next number of this stage's messages."""
        with self._sequence_lock:
            return next(self._sequence)

    def start(self, receiver: Receiver, connect_timeout_s: float) -> None:
        """Wait until every peer has started too; UnreachableError names one that did not, or that vanished."""
        changed = self._network.changed
        with changed:
            self._receiver, self._begun = receiver, True
            changed.notify_all()
            changed.wait_for(lambda: self._closed or self._gone or not self._missing(), connect_timeout_s)
            absent = sorted(self._gone) or self._missing()
            self._started = not self._closed and not absent
        if not self._started:
            self.close("could not start")
            if absent:
                raise UnreachableError(f"stage {absent[0]} is not there after {connect_timeout_s:g} s")
            raise StateError(f"stage {self.stage} was closed while it was connecting")
        for link in self.outgoing.values():
            link.thread.start()

    def _missing(self) -> list[StageIndex]:
        return sorted(stage for stage, link in self.outgoing.items() if not link.target._begun)

    def send(self, target: StageIndex, message: Outgoing) -> None:
        """Queue a message and return at once; dropped once the peer is gone."""
        self.outgoing[target].outbox.put(message)

    def bytes_sent(self) -> dict[StageIndex, int]:
        """Return payload bytes sent to each peer so far."""
        return {stage: link.outbox.counters.payload_bytes for stage, link in self.outgoing.items()}

    def counters(self) -> dict[StageIndex, tuple[SendCounters, ReceiveCounters]]:
        """Return what went to and came from each peer so far."""
        return {
            stage: (link.outbox.counters, self.incoming[stage].assembler.counters)
            for stage, link in self.outgoing.items()
        }

    def receive(self, message: Incoming) -> None:
        """Hand a whole message to the worker."""
        if self._receiver is not None and not self._closed:
            self._receiver.on_message(message)

    def lose(self, peer: StageIndex, reason: str) -> None:
        """Nothing more goes to or comes from `peer`; the worker is told once, unless it has closed."""
        if self._end(peer) and self._started and not self._closed and self._receiver is not None:
            self._receiver.on_lost(peer, reason)

    def depart(self, peer: StageIndex) -> None:
        """`peer` has said goodbye: what is meant for it is dropped."""
        self._end(peer)

    def _end(self, peer: StageIndex) -> bool:
        with self._network.changed:
            first = peer not in self._gone
            self._gone.add(peer)
            self._network.changed.notify_all()
        self.outgoing[peer].outbox.abort()
        return first

    def vanish(self) -> None:
        """End without a word to anyone."""
        self._closed = True
        for link in self.outgoing.values():
            link.outbox.abort()

    def close(self, reason: str) -> None:
        """Send what is queued (for at most 5 s), say goodbye and stop the threads."""
        with self._network.changed:
            if self._closing:
                return
            self._closing = True
            self._closed = not self._started
            self._network.changed.notify_all()
        links = list(self.outgoing.values())
        for link in links:
            link.outbox.finish(reason)
        end_s = time.monotonic() + _DRAIN_S
        for link in links:
            _join(link.thread, end_s - time.monotonic())
            link.outbox.abort()
        for link in links:
            _join(link.thread, 1.0)
        self._closed = True
        for link in links:
            link.target.depart(self.stage)


def _join(thread: threading.Thread, timeout_s: float) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(max(0.0, timeout_s))
