"""The sending end of a link by itself: a message counts as sent once it has arrived, whatever its streams did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.base.ids import Epoch, Incarnation, JobId, StageIndex
from fusion.protocol.messages import Session
from fusion.transport.frames import Standing, parse_frame
from fusion.transport.outbox import Outbox
from tests.support.transport import outgoing

SESSION = Session(JobId("job-aaaaaaaaaa"), Epoch(7), StageIndex(1), StageIndex(0), Incarnation(5), Incarnation(6))


@pytest.mark.parametrize("acknowledged", [False, True], ids=["told by the next stream", "acknowledged before"])
def test_a_message_under_whose_last_frame_the_stream_broke_is_counted_once(acknowledged: bool) -> None:
    outbox = Outbox(SESSION, iter(range(1, 100)).__next__)
    told: list[int] = []
    outbox.put(replace(outgoing(0, b"x" * 100), sent=told.append))
    outbox.open(1000)
    frames = outbox.frames()
    assert parse_frame(next(frames)).header.payload_bytes == 100
    assert len(next(frames)) > 100  # all of the payload; the stream breaks before it asks for more
    assert (outbox.counters.messages, told) == (0, [])
    if acknowledged:
        outbox.acknowledge(100, [1])
    del frames
    outbox.suspend()
    outbox.open(1000, Standing(next_message=2))
    assert (outbox.counters.messages, outbox.counters.payload_bytes, len(told)) == (1, 100, 1)
    outbox.put(outgoing(1, b"y" * 50))
    later = outbox.frames()
    assert parse_frame(next(later)).header.message == 2
    next(later)
    outbox.abort()
    assert next(later, None) is None
    assert (outbox.counters.messages, len(told)) == (1, 1)
