"""Measured spans: clocks that nobody set are put on one line, and what is kept is bounded."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from fusion.base.errors import WireError
from fusion.base.ids import JobId
from fusion.cli.timelineview import timeline_lines
from fusion.links.clocks import ClockBook, Offset, offsets_to
from fusion.observe.spans import SpanRecorder, is_traced
from fusion.plan.timeline import Kind, Span, chrome_trace
from fusion.protocol.timeline import StageSpans, align, stage_spans_from_proto, stage_spans_to_proto, whole_steps
from fusion.wire.v1 import node_pb2
from fusion_coordinator.timelines import JOBS, STEPS, Timelines


def test_many_pairs_of_messages_narrow_an_offset_down_and_never_exclude_the_truth():
    draw, book, ahead_s = random.Random(3), ClockBook(), -812.5
    now_s = 1000.0
    for _ in range(40):
        there_s, back_s = 0.02 + draw.expovariate(50), 0.02 + draw.expovariate(50)
        book.pair(now_s, now_s + there_s + ahead_s, now_s + there_s + back_s)
        now_s += 1.0
    found = book.offset()
    assert abs(found.offset_s - ahead_s) <= found.error_s + 1e-9
    assert found.error_s < 0.025


def test_a_clock_that_has_drifted_is_known_by_the_closest_pair():
    book = ClockBook()
    book.pair(0.0, 5.01, 0.02)
    book.pair(100.0, 105.5, 100.1)
    assert book.offset() == Offset(pytest.approx(5.0), pytest.approx(0.01))


def test_offsets_add_up_along_the_pipeline_and_both_ends_count():
    found = {
        (0, 1): Offset(10.0, 0.5),
        (1, 0): Offset(-10.4, 0.1),
        (1, 2): Offset(-3.0, 0.2),
        (5, 6): Offset(1.0, 0.1),
    }
    known = offsets_to(0, found)
    assert known[0] == Offset(0.0, 0.0)
    assert known[1] == Offset(pytest.approx(10.4), pytest.approx(0.1))
    assert known[2] == Offset(pytest.approx(7.4), pytest.approx(0.3))
    assert set(known) == {0, 1, 2}


def test_spans_of_stages_with_clocks_of_their_own_come_onto_one_line():
    first = StageSpans(0, 4, (Span(0, -1, Kind.FORWARD, 4, 0, 100.0, 100.5),), {1: Offset(900.0, 0.001)})
    second = StageSpans(
        1,
        4,
        (Span(0, 1, Kind.ACTIVATION, 4, 0, 1000.6, 1000.7), Span(1, -1, Kind.FORWARD, 4, 0, 1000.7, 1001.0)),
        {0: Offset(-900.0, 0.002)},
    )
    again = [stage_spans_from_proto(stage_spans_to_proto(item)) for item in (second, first)]
    timeline = align(again)
    assert [(span.stage, span.target) for span in timeline.spans] == [(0, -1), (0, 1), (1, -1)]
    assert [span.start_s for span in timeline.spans] == pytest.approx([0.0, 0.6, 0.7])
    assert [span.end_s for span in timeline.spans] == pytest.approx([0.5, 0.7, 1.0])
    assert timeline.error_s == pytest.approx(0.001)
    lines = timeline_lines(timeline, ["berlin", "tokyo"])
    assert "stage 1 tokyo: forward 300 ms" in lines[-1]
    assert len([event for event in chrome_trace(timeline.spans, ["a", "b"])["traceEvents"] if event["ph"] == "X"]) == 3


def test_a_stage_whose_clock_is_unknown_is_left_out_and_named():
    items = [StageSpans(stage, 1, (Span(stage, -1, Kind.UPDATE, 1, -1, 5.0, 6.0),), {}) for stage in (0, 1)]
    timeline = align(items)
    assert (len(timeline.spans), timeline.missing) == (1, (1,))


def test_only_steps_of_which_every_stage_has_told_count():
    items = [StageSpans(stage, step, (), {}) for stage, step in ((0, 7), (1, 7), (0, 8))]
    assert [(item.stage, item.step) for item in whole_steps(items)] == [(0, 7), (1, 7)]


def test_a_recorder_gives_a_step_once_and_forgets_earlier_ones():
    recorder = SpanRecorder(2)
    for step in (1, 2, 3):
        recorder.work(Kind.FORWARD, step, 0, float(step), step + 0.5)
    recorder.link(1, 2, Kind.DECODE, 2, 0, 2.0, 2.1)
    assert recorder.take(2) == [Span(2, -1, Kind.FORWARD, 2, 0, 2.0, 2.5), Span(1, 2, Kind.DECODE, 2, 0, 2.0, 2.1)]
    assert recorder.take(2) == []
    assert len(recorder.take(3)) == 1


def test_short_steps_are_traced_rarely_and_long_ones_always():
    assert all(is_traced(step, 1.0) for step in range(1, 20))
    traced = [step for step in range(1, 200) if is_traced(step, 0.01)]
    assert traced == [64, 128, 192]


@pytest.mark.parametrize(
    "change", [{"kind": "nap"}, {"start_s": float("nan")}, {"end_s": float("inf")}, {"start_s": 3.0, "end_s": 2.0}]
)
def test_spans_that_cannot_be_are_refused(change):
    settings = {"stage": 0, "target": -1, "kind": "forward", "start_s": 1.0, "end_s": 2.0} | change
    with pytest.raises(WireError):
        stage_spans_from_proto(node_pb2.StageSpans(step=1, spans=[node_pb2.TimedSpan(**settings)]))


def test_the_coordinator_keeps_few_steps_of_few_jobs_and_none_of_an_earlier_epoch():
    kept, job = Timelines(), JobId("job-aaaaaaaaaa")
    for step in range(1, 3 * STEPS):
        for stage in (1, 0):
            kept.add(job, 1, node_pb2.StageSpans(stage=stage, step=step))
    assert [(item.step, item.stage) for item in kept.of(job)] == [
        (step, stage) for step in range(2 * STEPS, 3 * STEPS) for stage in (0, 1)
    ]
    kept.add(job, 2, node_pb2.StageSpans(stage=0, step=2))
    assert [item.step for item in kept.of(job)] == [2]
    for number in range(JOBS):
        kept.add(JobId(f"job-{number:010}"), 1, node_pb2.StageSpans(step=1))
    assert kept.of(job) == []


def test_clocks_are_read_while_another_thread_hears_of_them():
    book, over = ClockBook(), threading.Event()
    book.pair(0.0, 0.5, 1.0)

    def hear() -> None:
        while not over.is_set():
            book.pair(0.0, 0.5, 1.0)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=hear)
    thread.start()
    try:
        for _ in range(2000):
            assert book.offset() is not None
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before_s)
