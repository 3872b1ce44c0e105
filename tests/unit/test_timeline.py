"""Timelines: the Chrome trace and the picture."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from fusion.plan.simulator import simulate
from fusion.plan.timeline import Kind, Span, chrome_trace, chrome_trace_json, row_label, rows_of
from fusion.plan.timeline_svg import MOST_ROWS, nice_step, tick_label, timeline_svg
from tests.support.pipelines import line

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("paris", "oslo")
SPANS = (
    Span(0, -1, Kind.FORWARD, 1, 0, 0.0, 1.0),
    Span(0, 1, Kind.ENCODE, 1, 0, 1.0, 1.25),
    Span(0, 1, Kind.ACTIVATION, 1, 0, 1.25, 2.0),
    Span(1, -1, Kind.WAIT, 1, 0, 0.0, 2.0),
    Span(1, -1, Kind.FORWARD, 1, 0, 2.0, 3.0),
    Span(1, -1, Kind.BACKWARD, 1, 0, 3.0, 5.0),
    Span(1, 0, Kind.GRADIENT, 1, 0, 5.0, 6.0),
    Span(1, 0, Kind.NORM, 1, -1, 5.5, 5.5),
    Span(0, -1, Kind.BACKWARD, 1, 0, 6.0, 8.0),
    Span(0, -1, Kind.FORWARD, 2, 0, 8.0, 10.0),
)


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_rows_are_stages_each_followed_by_its_links() -> None:
    assert [row_label(row, NAMES) for row in rows_of(SPANS)] == [
        "stage 0 paris",
        "link 0 → 1",
        "stage 1 oslo",
        "link 1 → 0",
    ]


def test_a_trace_names_a_process_for_every_row_and_threads_for_what_overlaps() -> None:
    events = chrome_trace(SPANS, NAMES)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["stage 0 paris", "link 0 → 1", "stage 1 oslo", "link 1 → 0"]
    threads = {(names[event["pid"]], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert threads == {
        ("stage 0 paris", "compute"),
        ("stage 1 oslo", "compute"),
        ("link 0 → 1", "wire"),
        ("link 0 → 1", "encode"),
        ("link 1 → 0", "wire"),
        ("link 1 → 0", "control"),
    }


def test_a_trace_event_has_microseconds_and_its_micro_batch() -> None:
    events = [event for event in chrome_trace(SPANS, NAMES)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(SPANS)
    sent = next(event for event in events if event["cat"] == "activation")
    assert (sent["name"], sent["ts"], sent["dur"]) == ("activation 0", 1_250_000, 750_000)
    assert sent["args"] == {"step": 1, "micro_batch": 0}
    norm = next(event for event in events if event["cat"] == "norm")
    assert (norm["name"], norm["args"]) == ("norm", {"step": 1})


def test_spans_of_a_simulation_never_overlap_in_a_thread() -> None:
    pipeline = line([0.1, 0.2, 0.1], [0.3] * 3, "1f1b", 6, bytes_each=2_000_000, rate=7e6, delay_s=0.013, update_s=0.1)
    result = simulate(pipeline, steps=2)
    trace = json.loads(chrome_trace_json(result.spans, result.names))
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 3 + 4 * 2  # each link: bulk and control
    for found in by_thread.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(found)))


def test_a_picture_has_a_row_for_each_stage_and_link_with_its_share() -> None:
    words = texts(timeline_svg(SPANS, NAMES, "two nodes"))
    assert words[0] == "two nodes"
    rows = ["stage 0 paris", "link 0 → 1", "stage 1 oslo", "link 1 → 0"]
    shares = [words[words.index(row) + 1] for row in rows]
    assert shares == ["50 %", "8 %", "30 %", "10 %"]  # encoding, waiting and overlaps do not count
    assert "step 2" in words
    assert {"forward", "backward", "activation", "gradient", "norm", "encode"} <= set(words)
    assert "wait" not in words


def test_a_picture_draws_spans_to_scale() -> None:
    root = ElementTree.fromstring(timeline_svg(SPANS, NAMES, "t"))
    drawn = {}
    for shape in root.iter(f"{SVG}rect"):
        hint = shape.find(f"{SVG}title")
        if hint is not None and hint.text is not None:
            drawn[hint.text.split(":")[0]] = (float(shape.get("x", "")), float(shape.get("width", "")))
    first, second = drawn["forward 0, step 1"], drawn["forward 0, step 2"]
    backward = drawn["backward 0, step 1"]
    assert second[1] == pytest.approx(backward[1], abs=0.02)  # both take 2 s
    assert len(drawn) == 7  # both forwards of step 1 have the same words, both backwards too; waiting is not drawn
    assert first[0] < backward[0] < second[0]


def test_names_and_titles_cannot_become_markup() -> None:
    evil = '<script>alert("1")</script>&\x00'
    picture = timeline_svg(SPANS, (evil, "b"), evil)
    tags = {element.tag for element in ElementTree.fromstring(picture).iter()}
    assert tags == {SVG + name for name in ("svg", "title", "style", "rect", "path", "text")}
    assert texts(picture)[0] == '<script>alert("1")</script>&?'
    assert not re.search(r"\b(href|url\(|@import|on[a-z]+=)", picture)


def test_a_thousand_stages_leave_a_readable_picture_that_says_what_is_missing() -> None:
    loads = [[0.1] * 1000, [0.2] * 1000]
    loads[1][777] = 0.9
    result = simulate(line(*loads, "gpipe", 4, delay_s=0.01))
    picture = timeline_svg(result.spans, result.names, "many")
    words = texts(picture)
    stages = [word for word in words if word.startswith("stage ")]
    assert len(stages) in range(MOST_ROWS - 8, MOST_ROWS + 1)
    assert (stages[0], stages[-1]) == ("stage 0 node-0", "stage 999 node-999")
    assert "stage 777 node-777" in stages  # the one that works most
    assert f"{1000 + 2 * 999 - len(stages)} more rows are not drawn" in words[-1]
    assert len(picture) < 400_000


def test_links_are_left_out_before_stages() -> None:
    result = simulate(line([0.1] * 40, [0.2] * 40, "gpipe", 4))
    words = texts(timeline_svg(result.spans, result.names, "forty"))
    assert len([word for word in words if word.startswith("stage ")]) == 40
    assert not [word for word in words if word.startswith("link ")]


def test_spans_too_narrow_to_tell_apart_are_drawn_together() -> None:
    many = [Span(0, -1, Kind.FORWARD, 1, index, index * 1e-4, (index + 1) * 1e-4) for index in range(10_000)]
    root = ElementTree.fromstring(timeline_svg([*many, Span(0, -1, Kind.BACKWARD, 1, 0, 1.0, 2.0)], ["a"], "t"))
    assert len(list(root.iter(f"{SVG}rect"))) < 10


def test_a_picture_of_nothing_is_still_a_picture() -> None:
    assert texts(timeline_svg([], [], "nothing yet"))[0] == "nothing yet"


@pytest.mark.parametrize(("least", "step"), [(0.9, 1), (1, 1), (1.1, 2), (0.021, 0.05), (3e-5, 5e-5), (700, 1000)])
def test_ticks_are_1_2_or_5_times_a_power_of_ten(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step)


def test_ticks_have_fitting_units() -> None:
    assert [tick_label(0.02, 0.02), tick_label(1.5, 0.5), tick_label(20, 5), tick_label(4e-5, 2e-5)] == [
        "20 ms",
        "1.5 s",
        "20 s",
        "40 µs",
    ]
