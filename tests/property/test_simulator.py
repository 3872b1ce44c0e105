"""The simulator against a direct computation of the same pipelines, and against what must always hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.base.errors import ConfigError
from fusion.plan.schedule import Task, format_schedule
from fusion.plan.simulation import EdgeLoad, Pipeline, Simulation
from fusion.plan.simulator import CONTROL_BYTES, simulate
from fusion.plan.timeline import Kind
from tests.support.pipelines import line

MB = 10**6  #: with bytes in these, control messages hold up bulk for less than NOISE_S
NOISE_S = 0.02
seconds = st.integers(0, 20).map(lambda ticks: ticks / 4)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Stages in a row, with any numbers in flight that fall towards the last stage."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    in_flight = sorted(draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages)), reverse=True)
    schedules = [_schedule(min(warm, micro_batches), micro_batches) for warm in in_flight]
    loads = [
        [draw(st.lists(seconds, min_size=micro_batches, max_size=micro_batches)) for _ in range(stages)]
        for _ in range(2)
    ]
    bytes_each, rate = draw(st.integers(0, 100)) * MB, draw(st.sampled_from([1.0, 10.0, 64.0])) * MB
    pipeline = line(*loads, schedules, bytes_each=bytes_each, rate=rate, delay_s=draw(seconds))
    return replace(pipeline, stages=[replace(stage, update_s=draw(seconds)) for stage in pipeline.stages])


def _schedule(warm: int, micro_batches: int) -> str:
    words = [f"F{index}" for index in range(warm)]
    for index in range(micro_batches):
        words.append(f"B{index}")
        if index + warm < micro_batches:
            words.append(f"F{index + warm}")
    return " ".join(words)


def direct(pipeline: Pipeline) -> float:
    """Return when the last backward of one step ends: each task after the one before it and after what it receives."""
    last = len(pipeline.stages) - 1
    wires = {(wire.source, wire.target): wire for wire in pipeline.wires}

    def duration(stage: int, task: Task) -> float:
        load = pipeline.stages[stage]
        return (load.forward_s if task.kind == "F" else load.backward_s)[task.micro_batch]  # type: ignore[index]

    @cache
    def end(stage: int, place: int) -> float:
        if place < 0:
            return 0.0
        task = pipeline.schedules[stage][place]
        source = stage - 1 if task.kind == "F" else stage + 1
        received_s = arrival(source, stage, task) if 0 <= source <= last else 0.0
        return max(end(stage, place - 1), received_s) + duration(stage, task)

    @cache
    def sent(source: int, target: int, task: Task) -> float:
        edge, wire = pipeline.edges[min(source, target)], wires[source, target]
        before = Task(task.kind, task.micro_batch - 1)
        free_s = sent(source, target, before) if task.micro_batch else 0.0
        size = edge.forward_bytes if task.kind == "F" else edge.backward_bytes
        return max(free_s, end(source, pipeline.schedules[source].index(task))) + size / wire.rate_bytes_per_s

    def arrival(source: int, target: int, task: Task) -> float:
        return sent(source, target, task) + wires[source, target].delay_s

    return max(end(stage, len(schedule) - 1) for stage, schedule in enumerate(pipeline.schedules))


@given(pipelines())
@settings(max_examples=150, deadline=None)
def test_one_step_ends_when_the_direct_computation_says(pipeline: Pipeline) -> None:
    assert simulate(pipeline).steps[0].backward_end_s == pytest.approx(direct(pipeline), abs=NOISE_S)


def check_always(pipeline: Pipeline, result: Simulation, steps: int) -> None:
    for stage, schedule in enumerate(pipeline.schedules):
        own = [span for span in result.spans if (span.stage, span.target) == (stage, -1)]
        assert all(before.end_s <= after.start_s for before, after in pairwise(own))
        assert result.stages[stage].busy_s <= result.total_s + 1e-9
        tasks = [(span.step, span.micro_batch) for span in own if span.kind is Kind.BACKWARD]
        assert tasks == sorted(tasks), format_schedule(schedule)
    ends = [step.end_s for step in result.steps]
    assert ends == sorted(ends)
    assert len(ends) == steps
    for wire in result.wires:
        assert wire.busy_s <= result.total_s + 1e-9


@given(pipelines(), st.integers(1, 3), st.sampled_from([1.0, 50.0, 150.0]))
@settings(max_examples=100, deadline=None)
def test_stages_work_in_order_and_links_carry_every_byte(pipeline: Pipeline, steps: int, window: float) -> None:
    tight = replace(pipeline, wires=[replace(wire, window_bytes=window * MB) for wire in pipeline.wires])
    result, free = simulate(tight, steps=steps), simulate(pipeline, steps=steps)
    check_always(tight, result, steps)
    micro_batches = len(pipeline.schedules[0]) // 2
    for wire in result.wires:
        edge = pipeline.edges[min(wire.source, wire.target)]
        assert wire.bytes == steps * (micro_batches * edge.forward_bytes + CONTROL_BYTES)
        assert wire.buffered_peak_bytes <= max(window * MB, edge.forward_bytes)
    assert result.total_s >= free.total_s - NOISE_S  # credit only ever holds things up


@given(pipelines(), st.integers(0, 200), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_shared_pipes_and_skips_are_deterministic_and_end(pipeline: Pipeline, skip_bytes: int, steps: int) -> None:
    wires = [replace(wire, pipes=(wire.source % 2, 2)) for wire in pipeline.wires]
    edges = list(pipeline.edges)
    if len(pipeline.stages) > 2:
        far = len(pipeline.stages) - 1
        edges.append(EdgeLoad(0, far, skip_bytes * MB, skip_bytes * MB // 2))
        wires += [replace(wires[0], source=0, target=far), replace(wires[0], source=far, target=0)]
    changed = replace(pipeline, edges=edges, wires=wires, pipe_rates_bytes_per_s=[7.0 * MB, 11.0 * MB, 13.0 * MB])
    result = simulate(changed, steps=steps)
    check_always(changed, result, steps)
    assert simulate(changed, steps=steps) == result
    # a pipe never carries more than its rate
    assert sum(wire.bytes for wire in result.wires) <= 13.0 * MB * result.total_s + 1


def test_windows_below_a_micro_batch_are_found() -> None:
    pipeline = line([1, 1], [1, 1], "gpipe", 2, bytes_each=60, window=100)
    with pytest.raises(ConfigError, match="stands still"):
        simulate(replace(pipeline, edges=[*pipeline.edges] * 2))
