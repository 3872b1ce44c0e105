"""Schedules: the two kinds, their memory, and what makes one invalid."""

from __future__ import annotations

import pytest

from fusion.base.errors import ConfigError
from fusion.plan.schedule import (
    check_schedule,
    format_schedule,
    make_schedule,
    most_in_flight,
    parse_schedule,
)


def test_1f1b_alternates_after_its_warm_up() -> None:
    schedules = make_schedule("1f1b", 3, 4)
    assert [format_schedule(item) for item in schedules] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_runs_all_forwards_first_on_every_stage() -> None:
    schedules = make_schedule("gpipe", 2, 3)
    assert {format_schedule(item) for item in schedules} == {"F0 F1 F2 B0 B1 B2"}


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (4, 8), (8, 4), (5, 1), (9, 32)])
def test_made_schedules_pass_their_own_check(name: str, stages: int, micro_batches: int) -> None:
    check_schedule(make_schedule(name, stages, micro_batches), micro_batches)


def test_1f1b_holds_fewer_micro_batches_the_later_the_stage() -> None:
    assert [most_in_flight(item) for item in make_schedule("1f1b", 4, 8)] == [4, 3, 2, 1]
    assert [most_in_flight(item) for item in make_schedule("gpipe", 4, 8)] == [8, 8, 8, 8]


def test_a_schedule_is_text_and_comes_back() -> None:
    assert format_schedule(parse_schedule("F0  F1 B0\nB1")) == "F0 F1 B0 B1"


@pytest.mark.parametrize("text", ["X0", "F", "Fx", "F-1", "0F"])
def test_text_that_is_no_schedule_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["F0 B0"], "needed: 0 to 1"),
        (["F0 F1 B1 B0"], "B of micro-batches"),
        (["F0 F0 F1 B0 B1"], "F of micro-batches"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "stage 0 waits for ever before B0"),
        (["B0 F0 F1 B1"], "waits for ever before B0"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_reason(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schedule([parse_schedule(text) for text in texts], 2)


def test_an_unknown_kind_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="1f1b, gpipe"):
        make_schedule("zigzag", 2, 2)
