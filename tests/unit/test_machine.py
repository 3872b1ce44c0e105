"""The stage machine releases instructions in one order, each only once its messages are there."""

from __future__ import annotations

import pytest

from fusion.base.ids import EdgeId, StageIndex
from fusion.plan.schedule import parse_schedule
from fusion.protocol.messages import MessageKind
from fusion.runtime import machine
from fusion.runtime.machine import Key, StageMachine, StageRole


def _machine(role: StageRole, schedule: str = "F0 F1 B0 B1", **settings: int) -> StageMachine:
    return StageMachine(
        role, parse_schedule(schedule), first_step=1, last_step=settings.pop("last_step", 1), **settings
    )


def _role(stage: int, stages: int, **rest: object) -> StageRole:
    settings: dict[str, object] = {"incoming": (), "outgoing": (), "tied_in": (), "tied_in_late": (), "tied_out": ()}
    return StageRole(stage=StageIndex(stage), stages=stages, **(settings | rest))  # type: ignore[arg-type]


def test_a_lone_stage_runs_its_step_without_waiting() -> None:
    lone = _machine(_role(0, 1))
    names = []
    while (instruction := lone.take()) is not None:
        names.append(type(instruction).__name__)
        if isinstance(instruction, machine.Forward):
            lone.sent(instruction.step, instruction.micro_batch, ())
    assert names == ["Forward", "Forward", "Backward", "Backward", "SumTied", "Norm", "Update", "EndStep"]
    assert lone.finished


def test_a_forward_waits_for_all_its_edges_and_only_for_its_own_micro_batch() -> None:
    stage = _machine(_role(1, 2, incoming=(EdgeId(0), EdgeId(1))))
    assert stage.take() is None
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 1, 0))
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 1, 1))
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 0, 0))
    assert stage.take() is None
    assert stage.missing() == {Key(MessageKind.ACTIVATION, 1, 0, 1)}
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 0, 1))
    assert stage.take() == machine.Forward(1, 0)
    stage.sent(1, 0, ())
    assert stage.take() == machine.Forward(1, 1)


def test_a_backward_waits_for_exactly_the_gradients_that_its_forward_asked_for() -> None:
    stage = _machine(_role(0, 2, outgoing=(EdgeId(0), EdgeId(1))), "F0 B0")
    assert stage.take() == machine.Forward(1, 0)
    stage.sent(1, 0, (EdgeId(1),))
    assert stage.missing() == {Key(MessageKind.GRADIENT, 1, 0, 1)}
    stage.arrived(Key(MessageKind.GRADIENT, 1, 0, 1))
    assert stage.take() == machine.Backward(1, 0)


def test_the_first_stage_gives_the_verdict_once_the_sums_of_those_behind_are_there() -> None:
    stage = _machine(_role(0, 2), "F0 B0")
    stage.take()
    stage.sent(1, 0, ())
    assert [type(stage.take()).__name__ for _ in range(2)] == ["Backward", "SumTied"]
    assert stage.missing() == {Key(MessageKind.NORM, 1, 0, 0)}
    stage.arrived(Key(MessageKind.NORM, 1, 0, 0))
    assert [type(stage.take()).__name__ for _ in range(2)] == ["Norm", "Update"]


def test_a_later_stage_sends_its_sums_before_it_waits_for_the_verdict_and_the_other_uses_of_its_copy() -> None:
    role = _role(1, 2, tied_in_late=(0,), tied_out=((1, StageIndex(0)),))
    stage = _machine(role, "F0 B0")
    stage.take()
    stage.sent(1, 0, ())
    names = [type(stage.take()).__name__ for _ in range(4)]
    assert names == ["Backward", "SendTied", "SumTied", "Norm"]
    assert stage.take() is None
    stage.arrived(Key(MessageKind.VERDICT, 1, 0, 0))
    assert stage.take() == machine.Verdict(1)
    assert stage.missing() == {Key(MessageKind.TIED, 1, 0, 0)}
    stage.arrived(Key(MessageKind.TIED, 1, 0, 0))
    assert [type(stage.take()).__name__ for _ in range(2)] == ["SumTied", "Update"]


def test_messages_of_the_next_step_wait_their_turn() -> None:
    stage = _machine(_role(1, 2, incoming=(EdgeId(0),)), "F0 B0", last_step=2)
    stage.arrived(Key(MessageKind.ACTIVATION, 2, 0, 0))
    assert stage.take() is None
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 0, 0))
    assert stage.take() == machine.Forward(1, 0)


def test_evaluation_runs_every_few_steps_and_after_the_last() -> None:
    lone = _machine(_role(0, 1), "F0 B0", last_step=5, eval_every_steps=2, eval_micro_batches=2)
    evaluations = []
    while (instruction := lone.take()) is not None:
        if isinstance(instruction, machine.Forward):
            lone.sent(instruction.step, instruction.micro_batch, ())
        if isinstance(instruction, machine.Evaluate):
            evaluations.append((instruction.step, instruction.micro_batch))
    assert evaluations == [(2, 0), (2, 1), (4, 0), (4, 1), (5, 0), (5, 1)]


def test_a_message_that_arrives_twice_is_our_own_mistake() -> None:
    stage = _machine(_role(1, 2, incoming=(EdgeId(0),)))
    stage.arrived(Key(MessageKind.ACTIVATION, 1, 0, 0))
    with pytest.raises(AssertionError, match="arrived twice"):
        stage.arrived(Key(MessageKind.ACTIVATION, 1, 0, 0))


def test_the_first_stage_begins_the_next_step_once_it_has_updated_itself_whatever_the_others_do() -> None:
    first = _machine(_role(0, 3, outgoing=(EdgeId(0),)), "F0 B0", last_step=2)
    taken = []
    first.arrived(Key(MessageKind.GRADIENT, 1, 0, 0))
    first.arrived(Key(MessageKind.NORM, 1, 0, 0))  # left the stage behind after its own backward, not after an update
    while (instruction := first.take()) is not None:
        taken.append((type(instruction).__name__, instruction.step))
        if isinstance(instruction, machine.Forward):
            first.sent(instruction.step, instruction.micro_batch, (EdgeId(0),))
    assert taken[-3:] == [("Update", 1), ("EndStep", 1), ("Forward", 2)]


def test_a_later_stage_needs_for_its_update_but_a_verdict_that_left_before_the_next_steps_first_value() -> None:
    before, behind = _machine(_role(0, 2, outgoing=(EdgeId(0),)), "F0 B0", last_step=2), []
    before.arrived(Key(MessageKind.GRADIENT, 1, 0, 0))
    before.arrived(Key(MessageKind.NORM, 1, 0, 0))
    while (instruction := before.take()) is not None:
        behind.append(type(instruction).__name__)  # stage 0 sends the verdict with its norm
        if isinstance(instruction, machine.Forward):
            before.sent(instruction.step, instruction.micro_batch, (EdgeId(0),))
    assert behind.index("Norm") < len(behind) - 1 - behind[::-1].index("Forward")
    last = _machine(_role(1, 2, incoming=(EdgeId(0),)), "F0 B0", last_step=2)
    last.arrived(Key(MessageKind.ACTIVATION, 1, 0, 0))
    assert last.take() == machine.Forward(1, 0)
    last.sent(1, 0, ())
    assert [type(last.take()).__name__ for _ in range(3)] == ["Backward", "SumTied", "Norm"]
    assert last.missing() == {Key(MessageKind.VERDICT, 1, 0, 0)}
