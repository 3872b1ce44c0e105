"""Copies of kept states at another stage's worker: the messages, the sending end and the holding end.

A replica travels in background messages of the data plane: an announcement with size and digest, then the file in
parts. The holder writes them to its own keeping, checks the digest, and answers with a small urgent message.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Literal

from fusion.base.digest import BlobHasher
from fusion.base.errors import WireError
from fusion.base.ids import EdgeId, StageIndex
from fusion.base.units import KIB
from fusion.observe import failpoints
from fusion.protocol.job import BlobRef
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.transport.base import Incoming, Outgoing
from fusion_node.statefiles import Kept, StateFiles

PART_BYTES = 64 * KIB  #: of a replica in one message: values and gradients pass between two, and wait for no more
LINK_SHARE = 0.1  #: of the time that replicas may be under way: they fill a slow link, and steps take longer meanwhile
_ANNOUNCEMENT = struct.Struct("<BxxxIQ32s")
_ANSWER = struct.Struct("<BB6x32s")
_VERSION = 1
ANSWER_BYTES = _ANSWER.size
_TRIES = 3  #: to send a replica that arrives damaged

Send = Callable[[StageIndex, Outgoing], None]
Log = Callable[[Literal["info", "warning"], str], None]


class Answer(IntEnum):
    """What a holder says of a replica."""

    HELD = 1
    DAMAGED = 2  #: its digest is another one
    NO_ROOM = 3


def _header(kind: MessageKind, step: int, number: int) -> MessageHeader:
    return MessageHeader(kind, step, number, EdgeId(0))


class ReplicaSender:
    """Sends a stage's states to its holder. `send` and `settled` belong to one thread each, `answered` to another."""

    def __init__(self, holder: StageIndex, holder_name: str, send: Send, log: Log) -> None:
        self._holder, self._name, self._send, self._log = holder, holder_name, send, log
        self._lock = threading.Lock()
        self._settled: str = ""  #: digest of the newest that the holder has answered for good
        self._sent_s = self._rest_until_s = 0.0  #: monotonic
        self._busy_s = 0.0  #: that the parts of the one under way have kept the link from other messages
        self._under_way: tuple[Kept, Path] | None = None
        self._tries = 0
        self._complained = False

    def send(self, kept: Kept, path: Path) -> None:
        """Send a state in the background."""
        with self._lock:
            self._under_way, self._tries = (kept, path), 1
            self._sent_s, self._busy_s = time.monotonic(), 0.0
        self._queue(kept, path)

    def settled(self, kept: Kept) -> bool:
        """Whether the holder has it, or has said that it cannot, and the link had its rest: the next may follow."""
        return self._settled == kept.blob.digest and time.monotonic() >= self._rest_until_s

    def answered(self, payload: bytes) -> None:
        """Take the holder's answer; WireError if it is none."""
        if len(payload) != _ANSWER.size or payload[0] != _VERSION:
            raise WireError(f"answer to a replica: {len(payload)} bytes are not understood")
        _, word, raw_digest = _ANSWER.unpack(payload)
        digest = raw_digest.hex()
        with self._lock:
            if self._under_way is None or self._under_way[0].blob.digest != digest:
                return  # of one that was given up
            kept, path = self._under_way
            again = word == Answer.DAMAGED and self._tries < _TRIES
            self._tries += 1
            if not again:
                self._rest_until_s = self._sent_s + self._busy_s / LINK_SHARE
                self._settled, self._under_way = digest, None
        if again:
            self._log("warning", f"replica of step {kept.step} arrived damaged at {self._name}; sent again")
            self._queue(kept, path)
        elif word != Answer.HELD and not self._complained:
            self._complained = True
            self._log("warning", f"{self._name} cannot hold a replica of step {kept.step}; training goes on without it")

    def _queue(self, kept: Kept, path: Path) -> None:
        count = -(-kept.blob.size_bytes // PART_BYTES)
        announcement = _ANNOUNCEMENT.pack(_VERSION, count, kept.blob.size_bytes, bytes.fromhex(kept.blob.digest))
        first = _header(MessageKind.REPLICA, kept.step, 0)
        self._send(self._holder, Outgoing(lambda: (first, announcement), background=True))
        for number in range(1, count + 1):
            self._send(self._holder, self._part(kept, path, number))

    def _part(self, kept: Kept, path: Path, number: int) -> Outgoing:
        """Return a part that counts how long the link was busy with it; what it waited for its turn does not count."""
        begun_s = 0.0

        def prepare() -> tuple[MessageHeader, bytes]:
            nonlocal begun_s
            message = _read_part(kept, path, number)
            begun_s = time.monotonic()
            return message

        def sent(_wire_bytes: int) -> None:
            self._busy_s += time.monotonic() - begun_s

        return Outgoing(prepare, background=True, sent=sent)


def _read_part(kept: Kept, path: Path, number: int) -> tuple[MessageHeader, bytes]:
    """Read a part when the link wants it, so that none waits in memory."""
    offset = (number - 1) * PART_BYTES
    size = min(PART_BYTES, kept.blob.size_bytes - offset)
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), size, offset)
    except OSError:
        data = b""
    data = data.ljust(size, b"\0")  # a file that was given up meanwhile: its digest will tell
    if failpoints.reach("replica.send", stage=kept.stage, step=kept.step, part=number) == "corrupt":
        data = bytes([data[0] ^ 1]) + data[1:]
    return _header(MessageKind.REPLICA, kept.step, number), data


@dataclass(slots=True)
class _Incoming:
    """A replica of which parts are still to come."""

    kept: Kept
    count: int
    hasher: BlobHasher
    number: int = 0  #: of the last part
    part: Path | None = None
    file: BinaryIO | None = None
    problem: OSError | None = None


class ReplicaHolder:
    """Writes the replicas that other stages send to this node's keeping, on a thread of its own."""

    def __init__(
        self, files: StateFiles, job: str, epoch: int, stages: Collection[StageIndex], send: Send, log: Log
    ) -> None:
        self._files, self._job, self._epoch, self._stages = files, job, epoch, frozenset(stages)
        self._send, self._log = send, log
        self._queue: queue.SimpleQueue[Incoming | None] = queue.SimpleQueue()
        self._open: dict[StageIndex, _Incoming] = {}
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="hold-replicas", daemon=True)
        self._thread.start()

    def take(self, message: Incoming) -> None:
        """Take a part, on the transport's thread; WireError from a stage for which nothing is held here."""
        if message.source not in self._stages:
            raise WireError(f"a replica from stage {message.source}, for which this stage holds none")
        self._queue.put(message)

    def close(self) -> None:
        """Stop; what is not whole is dropped."""
        self._queue.put(None)
        self._thread.join(5.0)
        for incoming in self._open.values():
            self._drop(incoming)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._part(message)
            except WireError as error:
                self._log("warning", f"replica from stage {message.source} dropped: {error}")
            finally:
                message.release()

    def _part(self, message: Incoming) -> None:
        source, number = message.source, message.header.micro_batch
        if number == 0:
            self._announced(source, message.header.step, bytes(message.payload))
            return
        incoming = self._open.get(source)
        if incoming is None or incoming.kept.step != message.header.step or number != incoming.number + 1:
            raise WireError(f"part {number} of step {message.header.step} does not follow")
        incoming.number = number
        if incoming.file is not None:
            self._write(incoming, message.payload)
        if number == incoming.count:
            del self._open[source]
            self._end(source, incoming)

    def _announced(self, source: StageIndex, step: int, payload: bytes) -> None:
        if (old := self._open.pop(source, None)) is not None:
            self._drop(old)
        if len(payload) != _ANNOUNCEMENT.size or payload[0] != _VERSION:
            raise WireError(f"announcement of {len(payload)} bytes is not understood")
        _, count, size_bytes, digest = _ANNOUNCEMENT.unpack(payload)
        if count < 1 or count != -(-size_bytes // PART_BYTES):
            raise WireError(f"{count} parts for {size_bytes} bytes")
        kept = Kept(self._job, self._epoch, source, step, BlobRef(digest.hex(), size_bytes))
        incoming = self._open[source] = _Incoming(kept, count, BlobHasher())
        try:
            incoming.part = self._files.begin(self._job, size_bytes)
            incoming.file = incoming.part.open("wb")
        except OSError as error:
            self._drop(incoming, error)

    def _write(self, incoming: _Incoming, payload: memoryview) -> None:
        assert incoming.file is not None
        if incoming.hasher.size_bytes + len(payload) > incoming.kept.blob.size_bytes:
            raise WireError("more bytes than were announced")
        try:
            failpoints.reach("disk.write", what="replica", stage=incoming.kept.stage, step=incoming.kept.step)
            incoming.file.write(payload)
        except OSError as error:
            self._drop(incoming, error)
            return
        incoming.hasher.update(payload)

    def _end(self, source: StageIndex, incoming: _Incoming) -> None:
        answer = Answer.NO_ROOM
        if incoming.file is not None:
            assert incoming.part is not None
            try:
                incoming.file.close()
                answer = Answer.DAMAGED
                if incoming.hasher.hexdigest() == incoming.kept.blob.digest:
                    self._files.keep(incoming.part, incoming.kept)
                    answer = Answer.HELD
            except OSError as error:
                answer, incoming.problem = Answer.NO_ROOM, error
        if answer is not Answer.HELD:
            self._drop(incoming, incoming.problem)
        failpoints.reach("replica.held", stage=incoming.kept.stage, step=incoming.kept.step)
        words = _ANSWER.pack(_VERSION, answer, bytes.fromhex(incoming.kept.blob.digest))
        header = _header(MessageKind.REPLICA_ACK, incoming.kept.step, 0)
        self._send(source, Outgoing(lambda: (header, words), urgent=True))

    def _drop(self, incoming: _Incoming, problem: OSError | None = None) -> None:
        incoming.problem = problem or incoming.problem
        if incoming.file is not None:
            try:
                incoming.file.close()
            except OSError as error:
                incoming.problem = error
        if incoming.part is not None:
            incoming.part.unlink(missing_ok=True)
        incoming.file = incoming.part = None
        if problem is not None and not self._complained:
            self._complained = True
            self._log("warning", f"no replica of stage {incoming.kept.stage} is held: {problem.strerror or problem}")
