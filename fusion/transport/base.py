"""The contract that every transport keeps: the gRPC one, and the in-memory twin for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fusion.base.ids import StageIndex
from fusion.protocol.messages import MessageHeader

Payload = bytes | bytearray | memoryview


@dataclass(slots=True)
class Outgoing:
    """A message that waits to be sent. `prepare` runs on the link's own thread: encoding never stops compute."""

    prepare: Callable[[], tuple[MessageHeader, Payload]]
    urgent: bool = False  #: small control messages overtake bulk, between two chunks
    background: bool = False  #: begins only when nothing else waits; kept small, since what it has begun it ends
    sent: Callable[[int], None] = field(default=lambda _wire_bytes: None)  #: called after the last chunk has left


@dataclass(slots=True)
class Incoming:
    """A message that has arrived whole. Call `release` once its payload is no longer needed: it returns the credit."""

    source: StageIndex
    header: MessageHeader
    payload: memoryview
    release: Callable[[], None]
    began_s: float = 0.0  #: when its header came, on the monotonic clock


class Receiver(Protocol):
    """What a worker offers its transport. Both are called on the transport's threads and must return soon."""

    def on_message(self, message: Incoming) -> None:
        """Take a message. Messages of one source with the same urgency arrive in the order they were sent."""
        ...

    def on_lost(self, peer: StageIndex, reason: str) -> None:
        """Learn, once per peer, that nothing more will be exchanged with it. `reason` is one line."""
        ...


class Transport(Protocol):
    """Streams to and from the peers of one worker, for one epoch of one job."""

    def start(self, receiver: Receiver, connect_timeout_s: float) -> None:
        """Connect to every peer and return when all streams stand; UnreachableError names the peer that does not."""
        ...

    def send(self, target: StageIndex, message: Outgoing) -> None:
        """Queue a message and return at once. After the peer is lost, messages to it are dropped."""
        ...

    def bytes_sent(self) -> dict[StageIndex, int]:
        """Return payload bytes sent to each peer so far."""
        ...

    def close(self, reason: str) -> None:
        """Send what is queued (for at most 5 s), say goodbye, stop every thread and close every channel."""
        ...
