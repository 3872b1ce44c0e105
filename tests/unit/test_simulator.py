"""The simulator against times that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from fusion.base.errors import ConfigError
from fusion.base.units import KIB
from fusion.plan.schedule import make_schedule, most_in_flight
from fusion.plan.simulation import EdgeLoad, Pipeline, SharedLoad, Simulation, StageLoad, Wire
from fusion.plan.simulator import CONTROL_BYTES, simulate
from fusion.plan.timeline import Kind, Span
from tests.support.pipelines import both_ways, line

GB = 10**9  #: with bytes in these, the control messages take no time worth mentioning
GOODPUT = 1448 / 1500  # of a link's rate: TCP's share of a full packet


def spans(result: Simulation, kind: Kind, stage: int, target: int = -1) -> list[Span]:
    return [span for span in result.spans if (span.stage, span.target, span.kind) == (stage, target, kind)]


def test_one_stage_takes_the_sum_of_its_tasks() -> None:
    result = simulate(line([[1, 2, 4]], [[8, 16, 32]], "1f1b", 3, update_s=64))
    assert result.total_s == 1 + 2 + 4 + 8 + 16 + 32 + 64
    assert result.steps[0].backward_end_s == 63
    assert result.stages[0].share == 1.0
    assert [str(span.kind) for span in result.spans] == ["forward", "backward"] * 3 + ["update"]


def test_two_stages_on_an_infinitely_fast_network() -> None:
    # each way: one task to fill, then four in a row
    result = simulate(line([1, 1], [2, 2], "gpipe", 4))
    assert result.total_s == (1 + 4) * 1 + (1 + 4) * 2
    assert result.stages[0].share == pytest.approx(4 * 3 / 15)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (5, 7), (8, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_uniform_stages_take_the_fill_and_then_the_bottleneck(schedule: str, stages: int, micro_batches: int) -> None:
    result = simulate(line([1] * stages, [2] * stages, schedule, micro_batches))
    fill_s, bottleneck_s = stages * 3, 3
    assert result.total_s == pytest.approx(fill_s + (micro_batches - 1) * bottleneck_s)


def test_unlike_stages_take_the_fill_and_then_the_slowest() -> None:
    result = simulate(line([1, 5, 2], [3, 9, 4], "gpipe", 6))
    assert result.total_s == (1 + 5 + 2) + 5 * 5 + (3 + 9 + 4) + 5 * 9
    assert result.bottleneck == (1, -1)


def test_a_slow_link_is_the_bottleneck() -> None:
    # 100 GB at 10 GB/s: after the first forward the link is busy for 40 s, and again on the way back
    result = simulate(line([1, 1], [1, 1], "gpipe", 4, bytes_each=100 * GB, rate=10 * GB))
    assert result.steps[0].backward_end_s == pytest.approx(1 + 40 + 1 + 1 + 40 + 1)
    assert result.bottleneck in ((0, 1), (1, 0))
    use = {(wire.source, wire.target): wire for wire in result.wires}
    assert use[1, 0].busy_s == pytest.approx(40)
    assert use[1, 0].bytes == 400 * GB + CONTROL_BYTES
    assert use[0, 1].queued_peak_bytes == 400 * GB  # after 4 s all forwards are done, and the first is not yet sent


def test_delay_counts_once_each_way_and_boundary() -> None:
    result = simulate(line([1] * 3, [2] * 3, "gpipe", 4, delay_s=10))
    assert result.steps[0].backward_end_s == (3 + 4 - 1) * 3 + 2 * 2 * 10


def test_the_warm_up_of_1f1b_does_not_cover_a_round_trip() -> None:
    # Stage 0: F0 F1 at 0-2, then B0 only at 23 = 2 + 10 + (F0 B0 of stage 1) ... B3 at 49-50; worked out on paper.
    result = simulate(line([1, 1], [1, 1], "1f1b", 4, delay_s=10))
    begins = [span.start_s for span in result.spans if span.stage == 0 and span.kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert begins == [0, 1, 23, 24, 25, 26, 47, 49]
    assert result.steps[0].backward_end_s == 50
    assert simulate(line([1, 1], [1, 1], "gpipe", 4, delay_s=10)).steps[0].backward_end_s == 30


@pytest.mark.parametrize(
    ("schedule", "mbit_per_s", "seconds"),
    [
        ("gpipe", 1000, 1.46),
        ("gpipe", 100, 1.64),
        ("gpipe", 8, 8.75),
        ("1f1b", 1000, 1.69),
        ("1f1b", 100, 2.16),
        ("1f1b", 8, 8.16),
    ],
)
def test_four_stages_over_a_wan(schedule: str, mbit_per_s: int, seconds: float) -> None:
    # 20 ms one way, 40 ms forward, 80 ms backward, 8 micro-batches, edges of 2 x 128 x 384 floats
    pipeline = line(
        [0.04] * 4,
        [0.08] * 4,
        schedule,
        8,
        bytes_each=393216,
        rate=mbit_per_s * 1e6 / 8 * GOODPUT,
        delay_s=0.02,
    )
    result = simulate(pipeline, steps=4)
    assert result.steps[0].backward_end_s == pytest.approx(seconds, rel=0.005)
    # the first stage goes on at once with the next step, so that is also the time from step to step
    assert result.step_s == pytest.approx(seconds, rel=0.005)


def test_the_verdict_travels_back_and_the_next_step_does_not_wait_for_it() -> None:
    result = simulate(line([1] * 3, [1] * 3, "gpipe", 1, delay_s=10, update_s=2), steps=2)
    end_s = 6 + 40  # of the last backward, on stage 0
    assert result.steps[0].backward_end_s == end_s
    assert [spans(result, Kind.UPDATE, stage)[0].start_s for stage in range(3)] == [end_s, end_s + 10, end_s + 20]
    assert result.steps[0].end_s == end_s + 22
    assert result.steps[1].start_s == end_s + 2
    assert result.step_s == 48  # stage 0's round, although the step took 68 s from its start to its end


def test_a_norm_overtakes_bulk_where_a_chunk_ends() -> None:
    # One chunk a second. The backward ends at 3 s; the norm leaves with the end of the gradient's first chunk, at 4 s.
    pipeline = line([1, 1], [1, 1], "gpipe", 1, bytes_each=4 * 512 * KIB, rate=512 * KIB)
    pipeline = replace(pipeline, edges=[replace(pipeline.edges[0], forward_bytes=0)])
    result = simulate(pipeline)
    norm, gradient = spans(result, Kind.NORM, 1, 0)[0], spans(result, Kind.GRADIENT, 1, 0)[0]
    norm_s = CONTROL_BYTES / (512 * KIB)
    assert (norm.start_s, norm.end_s) == pytest.approx((4, 4 + norm_s))
    assert (gradient.start_s, gradient.end_s) == pytest.approx((3, 7 + norm_s))


def test_the_norm_grows_with_the_tensors_behind() -> None:
    pipeline = line([1] * 3, [1] * 3, "gpipe", 1, rate=1)
    pipeline = replace(
        pipeline, stages=[replace(stage, tensors=10 * index) for index, stage in enumerate(pipeline.stages)]
    )
    result = simulate(pipeline)
    sizes = {(wire.source, wire.target): wire.bytes for wire in result.wires}
    assert sizes[2, 1] == CONTROL_BYTES + 8 * 20
    assert sizes[1, 0] == CONTROL_BYTES + 8 * 30
    assert sizes[0, 1] == sizes[1, 2] == CONTROL_BYTES


def test_a_links_thread_encodes_and_sends_in_turn_and_another_decodes_meanwhile() -> None:
    pipeline = line([0, 0], [0, 0], "gpipe", 3, bytes_each=30, rate=10)  # 3 s on the wire
    edge = replace(pipeline.edges[0], forward_encode_s=2, forward_decode_s=1, backward_bytes=None)
    result = simulate(replace(pipeline, edges=[edge]))
    assert [span.start_s for span in spans(result, Kind.ENCODE, 0, 1)] == [0, 5, 10]
    assert [span.start_s for span in spans(result, Kind.ACTIVATION, 0, 1)] == [2, 7, 12]
    assert [span.start_s for span in spans(result, Kind.DECODE, 0, 1)] == [5, 10, 15]
    assert result.steps[0].backward_end_s == 16


def test_a_decoder_takes_one_message_at_a_time() -> None:
    pipeline = line([0, 0], [0, 0], "gpipe", 3, bytes_each=10, rate=10)
    edge = replace(pipeline.edges[0], forward_decode_s=4, backward_bytes=None)
    result = simulate(replace(pipeline, edges=[edge]))
    assert [span.start_s for span in spans(result, Kind.DECODE, 0, 1)] == [1, 5, 9]
    assert result.steps[0].backward_end_s == 13


def test_a_link_faster_than_its_stage_queues_one_message() -> None:
    result = simulate(line([20, 1], [1, 20], "gpipe", 4, bytes_each=100, rate=10))
    assert [wire.queued_peak_bytes for wire in result.wires] == [100, 100]


def test_credit_lets_a_message_go_once_the_one_before_is_used() -> None:
    # Sent at 1-2, used at 7, credit back at 12; sent 12-13, used at 18, credit at 23; sent 23-24, used at 29-30. The
    # gradients the same way: 31-32, 42-43, 53-54, and the last backward at 59.
    result = simulate(line([1, 1], [1, 1], "gpipe", 3, bytes_each=GB, rate=GB, delay_s=5, window=GB))
    assert [span.start_s for span in spans(result, Kind.ACTIVATION, 0, 1)] == pytest.approx([1, 12, 23])
    assert [span.start_s for span in spans(result, Kind.GRADIENT, 1, 0)] == pytest.approx([31, 42, 53])
    assert result.steps[0].backward_end_s == pytest.approx(60)
    assert result.wires[0].blocked_s == pytest.approx(10 + 10)
    assert result.wires[0].buffered_peak_bytes == GB


def test_arrived_values_count_until_they_are_used() -> None:
    result = simulate(line([0, 5], [0, 0], "gpipe", 4, bytes_each=10))
    assert result.wires[0].buffered_peak_bytes == 30  # the first is used at once
    assert result.wires[0].blocked_s == 0


def test_a_message_larger_than_the_window_passes_alone() -> None:
    free = simulate(line([1, 1], [1, 1], "gpipe", 1, bytes_each=1000, rate=10))
    tight = simulate(line([1, 1], [1, 1], "gpipe", 1, bytes_each=1000, rate=10, window=1))
    assert tight.steps == free.steps


def test_two_values_of_a_micro_batch_that_exceed_the_window_stand_still() -> None:
    pipeline = line([1, 1], [1, 1], "gpipe", 1, bytes_each=60, rate=10, window=100)
    with pytest.raises(ConfigError, match=r"stage 1 waits for ever before forward 0 of step 1.*link 0 → 1 has no cred"):
        simulate(replace(pipeline, edges=[pipeline.edges[0], pipeline.edges[0]]))


def test_schedules_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="stage 0 waits for ever before backward 0 of step 1"):
        simulate(line([1, 1], [1, 1], ["F0 B0 F1 B1", "F0 F1 B0 B1"]))
    with pytest.raises(ConfigError, match="before backward 0"):
        simulate(line([1], [1], ["B0 F0"]))


def test_a_stage_waits_for_the_value_that_skips_stages() -> None:
    pipeline = line([1] * 3, [1] * 3, "gpipe", 1)
    skip = EdgeLoad(0, 2, forward_bytes=500, backward_bytes=100)
    wires = [*pipeline.wires, *both_ways([(0, 2)], rate_bytes_per_s=10)]
    result = simulate(replace(pipeline, edges=[*pipeline.edges, skip], wires=wires))
    assert spans(result, Kind.FORWARD, 1)[0].start_s == 1
    assert spans(result, Kind.FORWARD, 2)[0].start_s == 51
    # stage 0's backward needs both gradients: the skipping one leaves at 53 and takes 10 s
    assert spans(result, Kind.BACKWARD, 1)[0].start_s == 53
    assert spans(result, Kind.BACKWARD, 0)[0].start_s == 63


def shared_uplink(rates: tuple[float, float], sizes: tuple[int, int]) -> Simulation:
    """Stage 0 sends to stages 1 and 2 at once, through one uplink of 10 bytes/s."""
    edges = [EdgeLoad(0, target, size, None) for target, size in zip((1, 2), sizes, strict=True)]
    ways = [Wire(0, target, rate, pipes=(0,)) for target, rate in zip((1, 2), rates, strict=True)]
    wires = [*ways, Wire(1, 0), Wire(1, 2), Wire(2, 1)]
    stages = [StageLoad(str(index), 0, 0) for index in range(3)]
    return simulate(Pipeline(stages, edges, wires, make_schedule("gpipe", 3, 1), (), [10]))


def test_links_share_an_uplink_fairly() -> None:
    # 5 bytes/s each until the smaller is through at 20 s; then 10 for the 50 bytes that are left
    result = shared_uplink((100, 100), (100, 150))
    assert [spans(result, Kind.ACTIVATION, 0, target)[0].end_s for target in (1, 2)] == pytest.approx([20, 25])


def test_what_a_slow_link_leaves_of_an_uplink_goes_to_the_other() -> None:
    result = shared_uplink((2, 100), (100, 160))
    assert spans(result, Kind.ACTIVATION, 0, 2)[0].end_s == pytest.approx(20)  # 8 bytes/s
    assert spans(result, Kind.ACTIVATION, 0, 1)[0].end_s == pytest.approx(50)


def test_a_link_through_two_pipes_gets_the_smaller_share() -> None:
    edges = [EdgeLoad(0, 1, 100, None), EdgeLoad(0, 2, 40, None)]
    wires = [Wire(0, 1, pipes=(0,)), Wire(0, 2, pipes=(0, 1)), Wire(1, 0), Wire(1, 2), Wire(2, 1)]
    stages = [StageLoad(str(index), 0, 0) for index in range(3)]
    result = simulate(Pipeline(stages, edges, wires, make_schedule("gpipe", 3, 1), (), [10, 4]))
    # 4 bytes/s for the one that must also pass the narrow pipe, 6 for the other until 10 s, then 10
    assert spans(result, Kind.ACTIVATION, 0, 2)[0].end_s == pytest.approx(10)
    assert spans(result, Kind.ACTIVATION, 0, 1)[0].end_s == pytest.approx(14)


def test_shared_parameters_hold_up_the_norm_and_the_update() -> None:
    pipeline = line([1, 1, 1], [1, 1, 1], "gpipe", 1)
    wires = [*pipeline.wires, Wire(0, 2, 10), Wire(2, 0, 5)]
    result = simulate(replace(pipeline, wires=wires, shared=[SharedLoad((0, 2), (0, 2), 100)]))
    # stage 2 is through at 4 s: its gradient reaches stage 0 at 24 s; that of stage 0 leaves at 6 s, is there at 16 s
    updates = [span.end_s for span in spans(result, Kind.TIED, 2, 0) + spans(result, Kind.TIED, 0, 2)]
    assert updates == [24, 16]
    assert spans(result, Kind.VERDICT, 0, 1)[0].start_s == 24
    slow_back = [*pipeline.wires, Wire(0, 2, 1), Wire(2, 0)]
    late = simulate(replace(pipeline, wires=slow_back, shared=[SharedLoad((0, 2), (0, 2), 100)]))
    assert spans(late, Kind.VERDICT, 0, 1)[0].start_s == 6
    assert late.steps[0].end_s == 106  # stage 2 alone waits


def test_held_micro_batches_are_those_of_the_schedule() -> None:
    result = simulate(line([1] * 4, [2] * 4, "1f1b", 8))
    assert [stage.most_in_flight for stage in result.stages] == [4, 3, 2, 1]
    assert [most_in_flight(item) for item in make_schedule("1f1b", 4, 8)] == [4, 3, 2, 1]


def test_a_run_without_spans_has_the_same_times() -> None:
    pipeline = line([1, 2], [3, 4], "1f1b", 5, bytes_each=10, rate=4, delay_s=1, window=30)
    full, bare = simulate(pipeline, steps=3), simulate(pipeline, steps=3, record=False)
    assert bare.spans == ()
    assert (bare.steps, bare.stages, bare.wires) == (full.steps, full.stages, full.wires)


def test_a_thousand_nodes_are_simulated() -> None:
    pipeline = line([0.04] * 1000, [0.08] * 1000, "gpipe", 16, bytes_each=393216, rate=1e8, delay_s=0.02, window=64e6)
    result = simulate(pipeline, record=False)
    expected_s = 1015 * 0.12 + 2 * 999 * (0.02 + 393216 / 1e8)
    assert result.steps[0].backward_end_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": []}, "0 stages with 2 schedules"),
        ({"stages": [StageLoad("a", 1, 1), StageLoad("b", -1, 1)]}, "stage 1: forward_s must be 0 or more"),
        ({"stages": [StageLoad("a", 1, inf), StageLoad("b", 1, 1)]}, "stage 0: backward_s must be"),
        ({"stages": [StageLoad("a", 1, 1), StageLoad("b", [1, 2, 3], 1)]}, "3 values for 2 micro-batches"),
        ({"schedules": make_schedule("gpipe", 1, 2) + make_schedule("gpipe", 1, 3)}, "schedule of stage 1 must hold"),
        ({"wires": [Wire(0, 1)]}, "no link from stage 1 to stage 0"),
        ({"wires": [Wire(0, 1), Wire(0, 1)]}, "two links between the same stages"),
        ({"wires": [Wire(0, 1, 0), Wire(1, 0)]}, "rate must be more than 0"),
        ({"wires": [Wire(0, 1, 1, -1), Wire(1, 0)]}, "delay must be 0 or more"),
        ({"wires": [Wire(0, 1, window_bytes=0), Wire(1, 0)]}, "credit window must be more than 0"),
        ({"wires": [Wire(0, 1, pipes=(0,)), Wire(1, 0)]}, "shared pipe 0 does not exist"),
        ({"edges": [EdgeLoad(1, 0, 1, 1)]}, "must lead to a later stage"),
        ({"edges": [EdgeLoad(0, 1, 1, 1, forward_encode_s=-1)]}, "codec of the edge from stage 0 to 1 must be"),
    ],
)
def test_pipelines_that_make_no_sense_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(replace(line([1, 1], [1, 1], "gpipe", 2), **change))  # type: ignore[arg-type]


def test_no_step_is_no_simulation() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        simulate(line([1], [1], "gpipe", 1), steps=0)
