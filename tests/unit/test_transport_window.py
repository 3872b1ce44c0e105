"""Credit windows follow what the path holds, within the memory's share, and both ends know it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusion.base.ids import Epoch, Incarnation, JobId, StageIndex
from fusion.protocol.messages import Session
from fusion.transport.assembler import Assembler, CreditError
from fusion.transport.frames import parse_frame
from fusion.transport.goodput import Goodput
from fusion.transport.outbox import Outbox
from fusion.transport.window import Window
from tests.support.transport import outgoing

SESSION = Session(JobId("job-aaaaaaaaaa"), Epoch(7), StageIndex(1), StageIndex(0), Incarnation(5), Incarnation(6))


def test_a_window_is_what_waits_and_twice_the_path_within_memory() -> None:
    window = Window(1000, 10_000)
    assert window.bytes == 1000
    window.follow(0)
    assert window.bytes == 1000
    window.follow(2000)
    assert window.bytes == 1000 + 2 * 2000
    window.follow(100)
    assert window.bytes == 5000  # the sender may have used it already
    window.follow(10**9)
    assert window.bytes == 10_000


def test_a_window_without_a_second_limit_stays() -> None:
    window = Window(1000)
    window.follow(10**9)
    assert window.bytes == 1000


def test_the_path_is_the_shortest_round_trip_times_the_goodput() -> None:
    goodput = Goodput()
    assert goodput.path_bytes == 0
    goodput.travelled(100, 0.5)
    assert goodput.path_bytes == 0  # no rate yet
    goodput.acknowledged(0, 1, 10.0)
    goodput.acknowledged(2_000_000, 1, 12.0)  # 1 MB a second
    assert goodput.path_bytes == 500_000
    goodput.travelled(800_000, 1.0)  # 0.8 s of it were its own bytes
    assert goodput.path_bytes == pytest.approx(200_000, abs=1)
    goodput.travelled(100, 3.0)  # it waited for others
    assert goodput.path_bytes == pytest.approx(200_000, abs=1)


def link(first_bytes: int, most_bytes: int) -> tuple[Outbox, Assembler, Iterator[bytes]]:
    """A sender and its receiver, which holds what comes; frames are carried by hand."""
    outbox = Outbox(SESSION, iter(range(1, 1000)).__next__)
    assembler = Assembler(SESSION, Window(first_bytes, most_bytes), lambda _header: 10**6, lambda _count: None)
    outbox.open(first_bytes)
    return outbox, assembler, outbox.frames()


def test_the_receiver_takes_as_much_more_as_the_announcements_say_the_path_holds() -> None:
    outbox, assembler, frames = link(1000, 2000)
    outbox.goodput.acknowledged(0, 1, 10.0)
    outbox.goodput.acknowledged(1000, 1, 11.0)
    outbox.goodput.travelled(1, 0.4)
    assert outbox.goodput.path_bytes == pytest.approx(400, abs=1)
    for edge in range(3):
        outbox.put(outgoing(edge, bytes(600)))
    held = []

    def carry_message() -> None:
        for _ in range(2):
            message = parse_frame(next(frames))
            if message.WhichOneof("body") == "header":
                held.extend(assembler.header(message.header))
            else:
                held.extend(assembler.chunk(message.chunk))

    carry_message()
    assert 1000 < assembler.window_bytes <= 1000 + 2 * 400
    outbox.credit(0, assembler.window_bytes)  # what the receiver's next words say
    carry_message()
    assert len(held) == assembler.outstanding_bytes // 600 == 2  # with the first window the second one had to wait
    outbox.abort()


def test_a_peer_that_goes_beyond_the_windows_limit_is_refused() -> None:
    outbox, assembler, frames = link(1000, 1100)
    outbox.credit(0, 10**6)  # as if the receiver had said so
    for edge in range(2):
        outbox.put(outgoing(edge, bytes(600)))
    for _ in range(2):
        message = parse_frame(next(frames))
        assembler.header(message.header) if message.WhichOneof("body") == "header" else assembler.chunk(message.chunk)
    message = parse_frame(next(frames))
    message.header.path_bytes = 10**9  # words that widen nothing for the message that brings them
    with pytest.raises(CreditError, match="600 of 1000 are outstanding"):
        assembler.header(message.header)
    outbox.abort()
