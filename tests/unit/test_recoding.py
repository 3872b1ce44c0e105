"""When the links of a running job change their codecs, and what is remembered of it."""

from __future__ import annotations

import pytest

from fusion.base.errors import WireError
from fusion.base.ids import Epoch, Incarnation, NodeId, StageIndex
from fusion.compress.catalog import TensorRole, parse_codec
from fusion.compress.linkcodecs import CodecSchedule, Link
from fusion.plan.codecs import (
    PlanCodec,
    codec_schedule,
    compression_text,
    parse_compression,
    plan_at,
    plan_codec,
    plan_with_change,
    plan_with_codecs_of,
    schedule_without_links,
)
from fusion.plan.types import Plan, PlannedLink, PlannedStage
from fusion.protocol.passes import CodecPass
from fusion_coordinator.decide.recoding import Choices, Limits, Memory, judge, reason, wanted

S0, S1 = StageIndex(0), StageIndex(1)
THERE, BACK = (0, 1), (1, 0)
LIMITS = Limits(wins=2, hold_off_s=20.0)


def codecs(there: str, back: str) -> dict[Link, PlanCodec]:
    return {
        THERE: plan_codec(parse_codec(there)),
        BACK: plan_codec(parse_codec(back), TensorRole.GRADIENT),
    }


def choices(present: tuple[str, str], least: tuple[str, str], most: tuple[str, str]) -> Choices:
    return Choices(codecs(*present), codecs(*least), codecs(*most), {THERE: 1_250_000.0}, 2.0, 1.0)


def names(found: dict[Link, PlanCodec]) -> dict[Link, str]:
    return {link: codec.name for link, codec in found.items()}


@pytest.mark.parametrize(
    ("present", "least", "most", "changes"),
    [
        (("none", "none"), ("int8", "none"), ("int4", "bf16"), {THERE: "int8"}),  # too mild: what is needed
        (("int4", "int4"), ("none", "none"), ("bf16", "int8"), {THERE: "bf16", BACK: "int8"}),  # too strong
        (("int8", "bf16"), ("bf16", "none"), ("int4", "bf16"), {}),  # between the two
        (("none", "none"), ("mask:1/8", "mask:1/8+int4"), ("mask:1/8", "mask:1/8+int4"), None),
    ],
)
def test_a_link_keeps_a_codec_between_what_is_needed_and_what_a_slower_link_would_need(
    present: tuple[str, str], least: tuple[str, str], most: tuple[str, str], changes: dict[Link, str] | None
) -> None:
    expected = {THERE: least[0], BACK: least[1]} if changes is None else changes
    assert names(wanted(choices(present, least, most))) == expected


def test_a_mask_and_its_gradient_change_together() -> None:
    found = choices(("int8", "int2"), ("mask:1/8", "mask:1/8+int4"), ("mask:1/8", "mask:1/8+int8"))
    assert names(wanted(found)) == {THERE: "mask:1/8", BACK: "mask:1/8+int4"}


def test_a_change_needs_several_looks_in_a_row_and_time_since_the_last() -> None:
    slow = choices(("none", "none"), ("int8", "none"), ("int8", "none"))
    fine = choices(("none", "none"), ("none", "none"), ("int8", "none"))
    found, memory = judge(slow, Memory(0.0), 100.0, LIMITS)
    assert found == {}
    assert judge(fine, memory, 101.0, LIMITS) == ({}, Memory(0.0, 0))
    found, memory = judge(slow, memory, 102.0, LIMITS)
    assert names(found) == {THERE: "int8"}
    assert memory == Memory(102.0)
    for at_s in (103.0, 104.0, 121.9):
        found, memory = judge(slow, memory, at_s, LIMITS)
        assert found == {}
    assert judge(slow, memory, 122.0, LIMITS)[0]


def test_the_reason_names_the_links_their_rates_and_what_is_gained() -> None:
    slow = choices(("none", "int8"), ("int8", "int8"), ("int8", "int8"))
    assert reason(slow, wanted(slow)) == (
        "0 -> 1 (10 Mbit/s) from none to int8: the links hold the step up; 2 s per step by the model, 1 s with it"
    )
    idle = choices(("int4", "int8"), ("none", "int8"), ("none", "int8"))
    assert "the links are fast enough without" in reason(idle, wanted(idle))


# ---- what the plan remembers ----


def plan(*codec_names: str, cut: int = 5) -> Plan:
    stages = tuple(
        PlannedStage(NodeId(name * 20), name, "h:1", Incarnation(1), first, end, 1, 1, 0.1, 0.1)
        for name, first, end in (("a", 0, cut), ("b", cut, 9))
    )
    links = tuple(PlannedLink(*link, codec, 100) for link, codec in zip(((S0, S1), (S1, S0)), codec_names, strict=True))
    return Plan(Epoch(1), stages, links, "1f1b", 4)


def test_a_change_lasts_until_the_plan_names_the_link_again() -> None:
    phased = plan_with_change(plan("int8", "int4"), 50, ((S0, S1, "bf16"), (S1, S0, "bf16")))
    changed = plan_with_change(phased, 20, ((S0, S1, "int4"),))
    schedule = codec_schedule(changed)
    names_at = {
        step: (schedule.at(step).of(0, 1).name, schedule.at(step).of(1, 0).name) for step in (1, 19, 20, 49, 50)
    }
    assert names_at == {
        1: ("int8", "int4"),
        19: ("int8", "int4"),
        20: ("int4", "int4"),
        49: ("int4", "int4"),
        50: ("bf16", "bf16"),
    }
    now = plan_at(changed, 20)
    assert [(link.codec, round(link.ratio, 1)) for link in now.links] == [("int4", 7.5), ("int4", 7.5)]
    again = plan_with_change(changed, 20, ((S1, S0, "none"),))
    assert codec_schedule(again).at(20).of(0, 1).name == "int4"
    assert codec_schedule(again).at(20).of(1, 0).name == "none"


def test_what_a_plan_remembers_can_be_given_to_another_job() -> None:
    changed = plan_with_change(plan("int8", "none"), 20, ((S0, S1, "none"), (S1, S0, "topk:20+ef")))
    text = compression_text(changed)
    assert text == "none,0>1=int8 none,1>0=topk:20+ef@20"
    again, known = schedule_without_links(text, 100), codec_schedule(changed)
    for step in (1, 19, 20, 100):
        assert [again.at(step).of(*link) for link in (THERE, BACK)] == [
            known.at(step).of(*link) for link in (THERE, BACK)
        ]
    assert len(parse_compression(text)) == 2


def test_a_plan_with_the_same_cuts_takes_the_codecs_over_and_another_does_not() -> None:
    before = plan_with_change(plan("int8", "int4"), 20, ((S0, S1, "none"),))
    taken = plan_with_codecs_of(plan("none", "none"), before)
    assert codec_schedule(taken).at(19) == codec_schedule(before).at(19)
    assert taken.codec_changes == before.codec_changes
    other = plan("none", "none", cut=6)
    assert plan_with_codecs_of(other, before) == other


def test_a_schedule_answers_for_every_step() -> None:
    int8 = parse_codec("int8")
    schedule = (
        CodecSchedule().changed(10, {THERE: int8}).changed(5, {BACK: int8}).changed(10, {THERE: parse_codec("bf16")})
    )
    assert [schedule.at(step).of(*BACK).name for step in (1, 4, 5, 99)] == ["none", "none", "int8", "int8"]
    assert [schedule.at(step).of(*THERE).name for step in (9, 10)] == ["none", "bf16"]


# ---- between the stages ----


def test_a_change_of_codecs_passes_in_a_verdicts_tail() -> None:
    change = CodecPass(3, ((S0, S1, "int8"), (S1, S0, "int4")), 17)
    assert CodecPass.unpack(change.pack(), 2) == change
    for data, stages in ((b"\xff\xff", 2), (change.pack(), 1), (CodecPass(1, ((S0, S1, "zip"),), 3).pack(), 2)):
        with pytest.raises(WireError):
            CodecPass.unpack(data, stages)
