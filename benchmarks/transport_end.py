"""One end of a link for `benchmarks.transport`: sends tensors to the other end over mutual TLS, or receives them.

    python -m benchmarks.transport_end < settings.json

Both ends print one JSON object when the time is over.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fusion.base.ids import EdgeId, Epoch, Incarnation, JobId, NodeId, StageIndex
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.security.credentials import Credentials
from fusion.security.roles import Access, Authorizer
from fusion.transport.base import Incoming, Outgoing
from fusion.transport.grpc import GrpcTransport, PeerInfo

JOB, EPOCH = JobId("job-aaaaaaaaaa"), Epoch(1)
QUEUED = 3  #: messages that wait to be sent at any time
CONNECT_S = 60.0


class EndSettings(msgspec.Struct, frozen=True):
    """Who we are, and what to do."""

    stage: int  #: 0 sends, 1 receives
    credentials: str  #: directory
    peer: str  #: node id of the other end
    address: str  #: to listen on
    peer_address: str
    warm_up_s: float
    seconds: float
    message_bytes: int


def cpu_s() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Sink:
    """Counts what arrives; the receiver of both ends."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lost = threading.Event()

    def on_message(self, message: Incoming) -> None:
        """Count a message and give its credit back."""
        self.bytes += len(message.payload)
        message.release()

    def on_lost(self, peer: StageIndex, reason: str) -> None:
        """The other end has gone before its time."""
        print(f"lost stage {peer}: {reason}", file=sys.stderr)
        self.lost.set()


def transport_of(settings: EndSettings) -> GrpcTransport:
    """Return this end's transport."""
    credentials = Credentials.load(Path(settings.credentials))
    other = StageIndex(1 - settings.stage)
    return GrpcTransport(
        job=JOB,
        epoch=EPOCH,
        stage=StageIndex(settings.stage),
        incarnation=Incarnation(1),
        peers={other: PeerInfo(NodeId(settings.peer), "peer", settings.peer_address, Incarnation(1))},
        listen=settings.address,
        credentials=credentials,
        limit=lambda _header: 2**40,
        interceptors=[Authorizer(Access(credentials.cluster))],
    )


def send(settings: EndSettings, transport: GrpcTransport, sink: Sink) -> None:
    """Keep the link busy until the time is over."""
    payload = memoryview(bytearray(settings.message_bytes))
    room = threading.Semaphore(QUEUED)
    end_s = time.monotonic() + settings.warm_up_s + settings.seconds + 1.0
    number = 0
    while time.monotonic() < end_s and not sink.lost.is_set():
        if not room.acquire(timeout=0.1):
            continue
        header = MessageHeader(MessageKind.ACTIVATION, 1 + number // 1000, number % 1000, EdgeId(0))
        transport.send(
            StageIndex(1),
            Outgoing(lambda header=header: (header, payload), sent=lambda _bytes: room.release()),  # type: ignore[misc]
        )
        number += 1


def arrived(transport: GrpcTransport, settings: EndSettings) -> int:
    """Return the payload bytes that have arrived, whole messages or not."""
    return transport.counters()[StageIndex(1 - settings.stage)][1].wire_bytes


def run(settings: EndSettings) -> dict[str, Any]:
    """Connect, work, and return what was seen."""
    transport, sink = transport_of(settings), Sink()
    transport.start(sink, CONNECT_S)
    sender = threading.Thread(target=send, args=(settings, transport, sink), daemon=True)
    if settings.stage == 0:
        sender.start()
    else:
        while not arrived(transport, settings):
            time.sleep(0.001)
    time.sleep(settings.warm_up_s)
    begin_s, begin_cpu_s, before = time.monotonic(), cpu_s(), arrived(transport, settings)
    time.sleep(settings.seconds)
    count, used_s = arrived(transport, settings) - before, cpu_s() - begin_cpu_s
    seconds = time.monotonic() - begin_s
    if settings.stage == 0:
        sender.join()
    else:
        time.sleep(1.5)
    transport.close("the time is over")
    return {"bytes": count, "seconds": seconds, "cpu_s": used_s, "lost": sink.lost.is_set()}


def main(arguments: Sequence[str] = ()) -> None:
    """Read the settings from stdin, work, and print."""
    del arguments
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EndSettings)
    print(json.dumps(run(settings)), flush=True)


if __name__ == "__main__":
    main()
