"""What a link's rate decides: chunk sizes, the kernel's buffer, and how many connections it uses."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest

from fusion.transport.frames import CHUNK_BYTES
from fusion.transport.goodput import Goodput
from fusion.transport.sockets import UnsentLimit
from fusion.transport.striping import MAX_STREAMS, StreamCount

KIB = 1024


def busy(goodput: Goodput, rate: float, seconds: float) -> None:
    """Acknowledge bytes every 10 ms at a rate, with more on the way all the time."""
    for tick in range(int(seconds * 100) + 1):
        goodput.acknowledged(int(rate * tick / 100), 10**6, 100.0 + tick / 100)


@pytest.mark.parametrize(
    ("rate", "chunk", "unsent"),
    [
        (1e6, 16 * KIB, 64 * KIB),  # 8 Mbit/s: 20 ms are 20 kB, 50 ms are 50 kB
        (12.5e6, 240 * KIB, 625_000),
        (125e6, CHUNK_BYTES, 4 * 1024 * KIB),
    ],
)
def test_chunks_and_the_unsent_buffer_follow_the_rate(rate, chunk, unsent):
    goodput = Goodput()
    busy(goodput, rate, 1.0)
    assert goodput.bytes_per_s == pytest.approx(rate, rel=0.02)
    assert abs(goodput.chunk_bytes(CHUNK_BYTES) - chunk) <= 16 * KIB
    assert goodput.unsent_bytes() == pytest.approx(unsent, rel=0.02)


def test_idle_time_does_not_count_as_slowness():
    goodput = Goodput()
    for burst in range(5):
        start_s, before = 100.0 + 10 * burst, burst * 500_000
        goodput.acknowledged(before, 500_000, start_s)
        goodput.acknowledged(before + 500_000, 0, start_s + 0.5)
    assert goodput.bytes_per_s == pytest.approx(1e6)


def run(count: StreamCount, rate_of, seconds: float, start_s: float = 0.0) -> None:
    for tick in range(int(seconds * 10)):
        count.sample(int(rate_of(count.streams) / 10), 0.1, start_s + tick / 10)


def test_streams_are_doubled_while_that_pays():
    lossy = StreamCount()
    run(lossy, lambda streams: min(12e6, 1e6 * streams), 60)
    assert lossy.streams == MAX_STREAMS


def test_streams_that_bring_nothing_are_given_up_and_tried_again_ever_more_seldom():
    clean = StreamCount()
    streams = [clean.sample(1_200_000, 0.1, tick / 10) for tick in range(20_000)]
    assert set(streams) == {1, 2}
    begins = [tick / 10 for tick in range(1, len(streams)) if streams[tick] > streams[tick - 1]]
    pauses = [after - before for before, after in pairwise(begins)]
    assert pauses[:4] == pytest.approx([4 + 3, 8 + 3, 16 + 3, 32 + 3], abs=2)  # and each try takes 3 s
    assert pauses[-1] == pytest.approx(300 + 3, abs=2)


def test_a_first_try_that_came_to_nothing_by_chance_is_soon_made_up_for():
    lossy = StreamCount()
    run(lossy, lambda _streams: 9e6, 6)  # a connection that has not lost anything yet
    assert lossy.streams == 1
    run(lossy, lambda streams: min(12e6, 6e6 * streams), 12, start_s=6)
    assert lossy.streams >= 2


def test_on_a_long_link_a_rate_is_believed_after_many_round_trips():
    long = StreamCount()
    streams = [long.sample(100_000, 0.1, tick / 10, 0.5) for tick in range(300)]
    begin, end = streams.index(2), streams.index(1, streams.index(2))
    assert begin / 10 == pytest.approx(1.5 + 15 * 0.5, abs=0.3)  # what it carries alone
    assert (end - begin) / 10 == pytest.approx(2 * 15 * 0.5, abs=0.3)  # to come up to speed, and what both carry


def test_a_fast_link_stays_with_one_stream():
    fast = StreamCount()
    run(fast, lambda _streams: 110e6, 60)
    assert fast.streams == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such option")
def test_the_unsent_bytes_of_connections_to_an_address_are_bounded_and_of_no_others():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as ours,
            socket.create_connection(other.getsockname()) as not_ours,
        ):
            before = not_ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            limit = UnsentLimit(f"127.0.0.1:{port}")
            limit.set(100_000)
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 100_000
            assert not_ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == before
            limit.set(110_000)  # not worth a system call
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 100_000
            limit.close()
            ours.sendall(b"still open")
