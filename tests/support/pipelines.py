"""Pipelines for the simulator: a line of stages, each with a link to and from the next."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fusion.plan.schedule import StageSchedule, make_schedule, parse_schedule
from fusion.plan.simulation import EdgeLoad, Pipeline, StageLoad, Wire


def both_ways(pairs: Sequence[tuple[int, int]], **settings: object) -> list[Wire]:
    """A link in each direction for every pair of stages."""
    return [Wire(*way, **settings) for a, b in pairs for way in ((a, b), (b, a))]  # type: ignore[arg-type]


def line(
    forward_s: Sequence[float | Sequence[float]],
    backward_s: Sequence[float | Sequence[float]],
    schedule: str | Sequence[str],
    micro_batches: int = 0,
    *,
    bytes_each: int = 0,
    rate: float = inf,
    delay_s: float = 0.0,
    window: float = inf,
    update_s: float = 0.0,
) -> Pipeline:
    """Stages in a row; `schedule` is a name, or each stage's schedule as text."""
    count = len(forward_s)
    schedules: Sequence[StageSchedule]
    if isinstance(schedule, str):
        schedules = make_schedule(schedule, count, micro_batches)
    else:
        schedules = [parse_schedule(text) for text in schedule]
    neighbours = [(stage, stage + 1) for stage in range(count - 1)]
    return Pipeline(
        stages=[
            StageLoad(f"node-{index}", forward, backward, update_s)
            for index, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True))
        ],
        edges=[EdgeLoad(a, b, bytes_each, bytes_each) for a, b in neighbours],
        wires=both_ways(neighbours, rate_bytes_per_s=rate, delay_s=delay_s, window_bytes=window),
        schedules=schedules,
    )
