"""Whether any stage of a job is in contact with the coordinator. Told over the data plane, when there is doubt.

A node that the coordinator does not answer any more ends its work before its stage is given to another. If *no* stage
has an answer, it is the coordinator that is away, and nobody needs to end anything. So a stage that has had none for a
while says so to its peers, with what it has heard of others; one that says nothing counts as being in contact.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fusion.base.clock import SystemClock
from fusion.base.errors import WireError
from fusion.base.ids import EdgeId, StageIndex
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.transport.base import Incoming, Outgoing

_VERSION = 1
_HEAD, _WORD = struct.Struct("<B3xI"), struct.Struct("<I4xdd")

QUIET_SHARE = 1 / 4  #: of the time to the fence: after that without an answer a stage begins to tell its peers
FRESH_SHARE = 1 / 3  #: of it: what a stage said counts for so long
TELL_SHARE = 1 / 12  #: of it: between two messages to the same peer
SOON_S = 0.1  #: what is new is passed on after that
IDLE_S = 1.0  #: between looks while there is no doubt


def contact_bytes(stages: int) -> int:
    """Return the size of the largest message of a job of so many stages."""
    return _HEAD.size + stages * _WORD.size


@dataclass(frozen=True, slots=True)
class _Word:
    """What a stage said of itself, by this process's clock."""

    contact_s: float  #: when it sent the last heartbeat that was answered
    said_s: float


@dataclass(slots=True)
class ContactBook:
    """What one stage knows of all: times go in, no I/O. Not for several threads at once.

    Ages travel, not times: no two machines' clocks are compared. What a message takes to arrive makes a stage's last
    contact look younger than it is, which errs on the safe side.
    """

    stage: int
    stages: int
    contact_s: float = 0.0  #: when this node sent the last heartbeat that was answered
    fence_s: float = 0.0  #: how long after that its lease ends by itself; 0: not known yet
    _words: dict[int, _Word] = field(default_factory=dict)

    def is_quiet(self, now_s: float) -> bool:
        """Whether this node has had no answer for so long that its peers should know."""
        return self.fence_s > 0 and now_s - self.contact_s >= QUIET_SHARE * self.fence_s

    def message(self, now_s: float) -> bytes:
        """Return what peers are to be told: the ages of each known stage's last contact, and of its word."""
        words = {stage: word for stage, word in self._words.items() if self._is_fresh(word, now_s)}
        words[self.stage] = _Word(self.contact_s, now_s)
        packed = [
            _WORD.pack(stage, now_s - word.contact_s, now_s - word.said_s) for stage, word in sorted(words.items())
        ]
        return _HEAD.pack(_VERSION, len(packed)) + b"".join(packed)

    def take(self, data: bytes, now_s: float) -> bool:
        """Take a peer's message; whether something in it is new enough to be passed on. WireError if it is none."""
        if len(data) < _HEAD.size or data[0] != _VERSION:
            raise WireError(f"contact: {len(data)} bytes of version {data[0] if data else '-'} are not understood")
        if len(data) != _HEAD.size + _HEAD.unpack_from(data)[1] * _WORD.size:
            raise WireError(f"contact: {len(data)} bytes are not what their head says")
        new = False
        for stage, contact_age_s, said_age_s in _WORD.iter_unpack(data[_HEAD.size :]):
            if stage >= self.stages or not 0 <= said_age_s <= contact_age_s < float("inf"):
                raise WireError(f"contact: stage {stage} with ages {contact_age_s} and {said_age_s} makes no sense")
            word, known = _Word(now_s - contact_age_s, now_s - said_age_s), self._words.get(stage)
            if stage == self.stage or (known is not None and word.said_s <= known.said_s):
                continue
            self._words[stage] = word
            new = new or known is None or word.said_s - known.said_s >= TELL_SHARE * self.fence_s / 2
        return new

    def quiet_s(self, now_s: float) -> float | None:
        """Return how long ago any stage last had an answer; None while some stage may have one."""
        if not self.is_quiet(now_s):
            return None
        newest_s = self.contact_s
        for stage in range(self.stages):
            if stage != self.stage:
                word = self._words.get(stage)
                if word is None or not self._is_fresh(word, now_s):
                    return None
                newest_s = max(newest_s, word.contact_s)
        return now_s - newest_s

    def _is_fresh(self, word: _Word, now_s: float) -> bool:
        return now_s - word.said_s <= FRESH_SHARE * self.fence_s


class ContactTalk:
    """A thread that tells peers what the book has while there is doubt. `take` and `leased` come from other threads."""

    def __init__(
        self,
        stage: StageIndex,
        stages: int,
        on_unheard: Callable[[float], None],
        send: Callable[[StageIndex, Outgoing], None],
        peers: Collection[StageIndex],
    ) -> None:
        """`on_unheard(quiet_s)` is called again and again while no stage has contact, with the book's `quiet_s`."""
        self._book, self._lock = ContactBook(stage, stages), threading.Lock()
        self._on_unheard, self._send, self._peers = on_unheard, send, tuple(peers)
        self._clock = SystemClock()
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="contact", daemon=True)

    def leased(self, contact_s: float, fence_s: float) -> None:
        """The node's lease was renewed by the answer to a heartbeat that was sent at `contact_s`."""
        with self._lock:
            self._book.contact_s, self._book.fence_s = contact_s, fence_s

    def take(self, message: Incoming) -> None:
        """Take a peer's message; WireError if it makes no sense."""
        with self._lock:
            new = self._book.take(bytes(message.payload), self._clock.monotonic_s())
        message.release()
        if new:
            self._news.set()

    def start(self) -> None:
        """Begin, now that messages can be sent."""
        self._thread.start()

    def close(self) -> None:
        """Say no more."""
        self._over.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            now_s = self._clock.monotonic_s()
            with self._lock:
                quiet, unheard_s = self._book.is_quiet(now_s), self._book.quiet_s(now_s)
                words = self._book.message(now_s) if quiet else b""
                pause_s = min(IDLE_S, TELL_SHARE * self._book.fence_s) if quiet else IDLE_S
            if quiet:
                self._tell(words)
            if unheard_s is not None:
                self._on_unheard(unheard_s)
            self._news.clear()
            if self._news.wait(pause_s):
                self._over.wait(SOON_S)

    def _tell(self, words: bytes) -> None:
        header = MessageHeader(MessageKind.CONTACT, 1, 0, EdgeId(0))
        for peer in self._peers:
            self._send(peer, Outgoing(lambda: (header, words), urgent=True))
