"""What the benchmark of pipelines reads from a timeline between two steps."""

from __future__ import annotations

import pytest

from benchmarks.seams import median_seam, seams
from fusion.plan.timeline import Kind, Span


def timeline() -> list[Span]:
    """Two stages, one micro-batch: stage 1 updates from 3.5 to 4.25 s, stage 0 from 3.0 to 3.25 s."""
    spans = []
    for step, shift in ((1, 0.0), (2, 10.0)):
        spans += [
            Span(0, -1, Kind.FORWARD, step, 0, shift + 0.0, shift + 0.5),
            Span(0, 1, Kind.DECODE, step, 0, shift + 0.75, shift + 1.0),
            Span(1, -1, Kind.FORWARD, step, 0, shift + 1.25, shift + 1.5),
            Span(1, -1, Kind.BACKWARD, step, 0, shift + 1.5, shift + 2.0),
            Span(0, -1, Kind.BACKWARD, step, 0, shift + 2.0, shift + 2.75),
            Span(0, -1, Kind.UPDATE, step, -1, shift + 3.0, shift + 3.25),
            Span(1, -1, Kind.UPDATE, step, -1, shift + 3.5, shift + 4.25),
        ]
    return spans


def test_seams_between_steps() -> None:
    (seam,) = seams(timeline())
    assert seam.first_stage_s == pytest.approx(10.0 - 2.75)
    assert seam.first_update_s == pytest.approx(0.25)
    assert seam.ahead_s == pytest.approx(4.25 - 10.0)  # here the update was over long before
    assert seam.held_up_s == pytest.approx(0.25)


def test_medians_need_two_steps_in_a_row() -> None:
    assert median_seam([]) is None
    assert median_seam([span for span in timeline() if span.step == 1]) is None
    assert median_seam(timeline()) == pytest.approx(
        {"first_stage_s": 7.25, "first_update_s": 0.25, "ahead_s": -5.75, "held_up_s": 0.25}
    )
