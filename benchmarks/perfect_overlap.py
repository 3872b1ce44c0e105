"""The least time that a step can take when every transfer is hidden behind compute as far as the schedule lets it.

Each stage runs its tasks one at a time in its schedule's order. Each directed link carries one tensor at a time, which
arrives `delay_s` after its last byte has left. Nothing else costs anything: no encoding, no waiting for a receiver, no
optimizer, no word between stages at the step's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.base.errors import ConfigError
from fusion.plan.schedule import StageSchedule

WIRE_OVERHEAD = (
    1500 / 1448
)  #: TCP over IPv4 with timestamps at an MTU of 1500 bytes: bytes on the wire per payload byte


@dataclass(frozen=True, slots=True)
class Boundary:
    """The link between a stage and the next one, alike both ways."""

    rate_mbps: float  #: of packets
    delay_s: float  #: one way

    def transfer_s(self, tensor_bytes: int) -> float:
        """Return how long a tensor keeps the link busy."""
        return tensor_bytes * WIRE_OVERHEAD * 8 / (self.rate_mbps * 1e6)


def step_s(
    schedules: Sequence[StageSchedule],
    forward_s: float,
    backward_s: float,
    tensor_bytes: int,
    boundaries: Sequence[Boundary],
) -> float:
    """Return the seconds of one step; ConfigError for schedules that wait for each other for ever.

    Tasks are placed as soon as all that they need has been placed: a forward needs the stage before, a backward the
    stage behind, each a transfer earlier.
    """
    ready: dict[tuple[str, int, int], float] = {("F", 0, task.micro_batch): 0.0 for task in schedules[0]}
    free = [0.0] * len(schedules)
    link_free: dict[tuple[int, int], float] = {}
    position = [0] * len(schedules)
    left = sum(map(len, schedules))
    while left:
        before = left
        for stage, schedule in enumerate(schedules):
            while position[stage] < len(schedule):
                task = schedule[position[stage]]
                needed = ready.get((task.kind, stage, task.micro_batch))
                if needed is None:
                    break
                end_s = max(free[stage], needed) + (forward_s if task.kind == "F" else backward_s)
                free[stage] = end_s
                position[stage] += 1
                left -= 1
                neighbour = stage + (1 if task.kind == "F" else -1)
                if neighbour == len(schedules):
                    ready["B", stage, task.micro_batch] = end_s
                elif neighbour >= 0:
                    boundary = boundaries[min(stage, neighbour)]
                    sent_s = max(end_s, link_free.get((stage, neighbour), 0.0)) + boundary.transfer_s(tensor_bytes)
                    link_free[stage, neighbour] = sent_s
                    ready[task.kind, neighbour, task.micro_batch] = sent_s + boundary.delay_s
        if left == before:
            raise ConfigError("schedules: the stages wait for each other for ever")
    return max(free)
