"""Schedules are data: for every stage, in which order it runs the forward and backward of its micro-batches.

In text, a stage's schedule is a list such as "F0 F1 B0 F2 B1 B2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fusion.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """The forward ("F") or backward ("B") of one micro-batch."""

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


StageSchedule = tuple[Task, ...]


def make_schedule(name: str, stages: int, micro_batches: int) -> tuple[StageSchedule, ...]:
    """Return the schedule "gpipe" or "1f1b" for each of `stages` stages."""
    if name == "gpipe":
        return tuple(alternating(micro_batches, micro_batches) for _ in range(stages))
    if name == "1f1b":
        return tuple(alternating(stages - stage, micro_batches) for stage in range(stages))
    raise ConfigError(f"schedule must be one of 1f1b, gpipe; got {name!r}")


def alternating(in_flight: int, micro_batches: int) -> StageSchedule:
    """Return the schedule of a stage that has at most `in_flight` micro-batches between forward and backward.

    It runs that many forwards, and then one backward before each further forward.
    """
    warm = min(in_flight, micro_batches)
    tasks = [Task("F", index) for index in range(warm)]
    for index in range(warm, micro_batches):
        tasks += [Task("B", index - warm), Task("F", index)]
    tasks += [Task("B", index) for index in range(micro_batches - warm, micro_batches)]
    return tuple(tasks)


def parse_schedule(text: str) -> StageSchedule:
    """Read a stage's schedule from text; ConfigError names what cannot be read."""
    tasks = []
    for word in text.split():
        if word[:1] not in ("F", "B") or not word[1:].isdecimal():
            raise ConfigError(f"schedule: {word!r} is no task; write F or B and the micro-batch's number, such as F0")
        tasks.append(Task("F" if word[0] == "F" else "B", int(word[1:])))
    return tuple(tasks)


def format_schedule(schedule: StageSchedule) -> str:
    """Return a stage's schedule as text."""
    return " ".join(map(str, schedule))


def most_in_flight(schedule: StageSchedule) -> int:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    held = most = 0
    for task in schedule:
        held += 1 if task.kind == "F" else -1
        most = max(most, held)
    return most


def check_schedule(schedules: Sequence[StageSchedule], micro_batches: int) -> None:
    """Raise ConfigError unless every stage runs each micro-batch once each way, in ascending order, without deadlock.

    The ascending order gives every parameter's gradient one order of additions, whatever the schedule.
    """
    for stage, schedule in enumerate(schedules):
        for kind in ("F", "B"):
            order = [task.micro_batch for task in schedule if task.kind == kind]
            if order != list(range(micro_batches)):
                raise ConfigError(
                    f"schedule of stage {stage} runs {kind} of micro-batches {order}; "
                    f"needed: 0 to {micro_batches - 1} in order"
                )
    _check_progress(schedules)


def _check_progress(schedules: Sequence[StageSchedule]) -> None:
    """Run the schedules against each other: a forward waits for the stage before, a backward for the one behind."""
    done: list[set[Task]] = [set() for _ in schedules]
    position = [0] * len(schedules)
    progress = True
    while progress:
        progress = False
        for stage, schedule in enumerate(schedules):
            while position[stage] < len(schedule) and _ready(schedule[position[stage]], stage, done):
                done[stage].add(schedule[position[stage]])
                position[stage] += 1
                progress = True
    for stage, schedule in enumerate(schedules):
        if position[stage] < len(schedule):
            raise ConfigError(f"schedule: stage {stage} waits for ever before {schedule[position[stage]]}")


def _ready(task: Task, stage: int, done: list[set[Task]]) -> bool:
    if task.kind == "F":
        return stage == 0 or task in done[stage - 1]
    return Task("F", task.micro_batch) in done[stage] and (stage == len(done) - 1 or task in done[stage + 1])
