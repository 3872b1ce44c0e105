"""What each codec does to a tensor's values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fusion.base.errors import ConfigError, StateError, WireError
from fusion.compress.blocks import encode_blocks
from fusion.compress.catalog import TensorRole, Values, parse_codec
from fusion.compress.codec import Codec
from fusion.compress.frame import FrameKind, parse
from fusion.compress.noise import Turn
from fusion.compress.state import EdgeState
from tests.support.compress import TURN, Edge, one_way, spec_of

DENSE = ["fp16", "bf16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "hadamard4"]
ALL = [*DENSE, "none", "topk:10", "topk:10+exact+int4", "adatopk:10", "mask:1/4", "lowrank:8"]


def normal(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(sent: torch.Tensor, arrived: torch.Tensor) -> float:
    return float((sent.double() - arrived.double()).norm() / sent.double().norm())


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    # Uniform rounding of normal numbers: step / sqrt(12), with a step of about 2.4 sigma over the largest code. Four
    # equidistant levels: sqrt(0.1188) (Max 1960). e4m3: 3 bits of mantissa.
    # A mask leaves out all below t: 1 - 2 (t phi(t) + Q(t)) of the energy, with t = 1.534 and 0.6745.
    [
        ("fp16", 2.2e-4, 1e-4),
        ("bf16", 1.8e-3, 1.5e-3),
        ("fp8", 0.027, 0.022),
        ("int8", 0.0066, 0.0052),
        ("int6", 0.027, 0.022),
        ("int5", 0.055, 0.045),
        ("int4", 0.12, 0.095),
        ("int3", 0.28, 0.23),
        ("int2", 0.36, 0.33),
        ("hadamard4", 0.12, 0.095),
        ("mask:1/8+exact+fp16", 0.711, 0.700),
        ("mask:1/2+exact+fp16", 0.272, 0.262),
    ],
)
def test_the_error_on_normal_numbers_is_what_theory_says(name: str, largest: float, smallest: float) -> None:
    sent = normal(64, 1024)
    _, arrived = one_way(name, sent)
    assert smallest < relative(sent, arrived) < largest


def test_int8_codes_and_steps_are_those_computed_by_hand() -> None:
    block = torch.zeros(64)
    block[:4] = torch.tensor([127.0, -63.0, 0.6, 0.4])  # largest 127: the step is 1
    (codes,), steps = encode_blocks(Values.INT8, block, None)
    assert steps.tolist() == [1.0]
    assert codes.view(torch.int8)[:5].tolist() == [127, -63, 1, 0, 0]


def test_int4_codes_lie_in_pairs_the_first_in_the_low_half() -> None:
    block = torch.zeros(64)
    block[:4] = torch.tensor([7.0, -7.0, 1.0, 2.0])
    (codes,), steps = encode_blocks(Values.INT4, block, None)
    assert steps.tolist() == [1.0]
    assert codes[:3].tolist() == [0x97, 0x21, 0x00]  # -7 is 9 in four bits


def test_int2_codes_lie_in_fours_the_first_lowest() -> None:
    block = torch.tensor([3.0, 1.0, -1.0, -3.0] * 16)
    (codes,), steps = encode_blocks(Values.INT2, block, None)
    assert steps.float().item() == pytest.approx(2 * 0.9957 * 1.2533, rel=2**-7)
    assert codes.tolist() == [0b00_01_10_11] * 16


@pytest.mark.parametrize(
    ("values", "numbers", "planes"),
    [
        # 30 = 0111_10, -31 = 1000_01, 1 = 0000_01, 31 = 0111_11
        (Values.INT6, [30.0, -31.0, 1.0, 31.0], ([0x87, 0x70], [0b11_01_01_10])),
        # 14 = 0111_0, -15 = 1000_1, 1 = 0000_1, 15 = 0111_1
        (Values.INT5, [14.0, -15.0, 1.0, 15.0], ([0x87, 0x70], [0b1110])),
        # 2 = 01_0, -3 = 10_1, 1 = 00_1, 3 = 01_1
        (Values.INT3, [2.0, -3.0, 1.0, 3.0], ([0b01_00_10_01], [0b1110])),
    ],
)
def test_odd_numbers_of_bits_lie_in_two_planes_the_higher_bits_first(values, numbers, planes) -> None:
    block = torch.zeros(64)
    block[:4] = torch.tensor(numbers)
    found, steps = encode_blocks(values, block, None)
    assert steps.tolist() == [1.0]
    for plane, expected in zip(found, planes, strict=True):
        assert plane[: len(expected)].tolist() == expected
        assert not plane[len(expected) :].any()


def test_a_step_is_rounded_up_so_that_no_element_is_clipped() -> None:
    for seed in range(20):
        sent = normal(64, seed=seed)
        _, steps = encode_blocks(Values.INT8, sent, None)
        assert sent.abs().amax() <= 127 * steps.float().item() <= sent.abs().amax() * (1 + 2**-7)


def test_fp8_is_torchs_own_e4m3_of_the_scaled_numbers() -> None:
    sent = normal(1 << 16) * torch.logspace(-6, 6, 1 << 10).repeat_interleave(64)
    frame, arrived = one_way("fp8", sent)
    (codes,), steps = encode_blocks(Values.FP8, sent, None)
    expected = codes.view(torch.float8_e4m3fn).float() * steps.float().repeat_interleave(64)
    assert torch.equal(arrived, expected)
    assert len(frame.payload) == 40 + 32 + (1 << 16) + 2 * (1 << 10)


@pytest.mark.parametrize("name", [*DENSE, "adatopk:10", "mask:1/4", "topk:10", "lowrank:8"])
def test_zeros_arrive_as_exact_zeros(name: str) -> None:
    _, arrived = one_way(name, torch.zeros(40, 50))
    assert torch.equal(arrived, torch.zeros(40, 50))


@pytest.mark.parametrize("name", ["int8", "int6", "int5", "int4", "int3", "hadamard4", "fp8", "fp16", "bf16"])
def test_zeros_among_others_stay_zeros_where_a_code_means_zero(name: str) -> None:
    sent = torch.relu(normal(64, 64))
    sent[10:20] = 0
    _, arrived = one_way(name, sent)
    assert torch.equal(arrived[10:20], torch.zeros(10, 64))


def test_fp16_keeps_gradients_that_half_precision_alone_would_lose() -> None:
    sent = normal(64, 64) * 1e-12
    assert not sent.half().any()
    _, arrived = one_way("fp16", sent)
    assert relative(sent, arrived) < 3e-4


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1.0, 1e20])
@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "int2", "hadamard4", "fp8", "mask:1/4+exact"])
def test_the_error_does_not_depend_on_the_scale(name: str, scale: float) -> None:
    sent = normal(64, 64)
    _, plain = one_way(name, sent)
    _, scaled = one_way(name, sent * scale)
    assert relative(sent * scale, scaled) == pytest.approx(relative(sent, plain), rel=0.05, abs=1e-5)


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("values", ["int8", "int6", "int5", "int4", "int3", "int2", "hadamard4"])
def test_rounding_at_random_is_right_in_the_mean_and_nearest_is_not(values: str, rounding: str) -> None:
    name = f"{values}+{rounding}"
    sent = normal(16, 256)
    rounds = 200

    def mean(codec_name: str) -> torch.Tensor:
        codec = Codec(parse_codec(codec_name), TensorRole.ACTIVATION)
        state = EdgeState()
        total = torch.zeros_like(sent)
        for step in range(rounds):
            turn = Turn(1, step, 0, 0)
            total += codec.decode(codec.encode(sent, state, turn), spec_of(sent), state, turn)
        return total / rounds

    once = relative(sent, one_way(name, sent)[1])
    assert relative(sent, mean(name)) < 1.3 * once / rounds**0.5
    nearest = f"{values}+nearest"
    assert relative(sent, mean(nearest)) == pytest.approx(relative(sent, one_way(nearest, sent)[1]), rel=1e-3)


@pytest.mark.parametrize(("values", "spare"), [("int8", 1 / 127), ("int4", 1 / 14), ("int3", 1 / 6), ("int2", 0.0)])
def test_dither_has_half_the_variance_of_stochastic_rounding_and_half_a_step_more_room(values, spare) -> None:
    sent = normal(64, 1024)
    stochastic = relative(sent, one_way(f"{values}+stochastic", sent)[1])
    dither = relative(sent, one_way(f"{values}+dither", sent)[1])
    assert dither == pytest.approx(stochastic / 2**0.5 / (1 + spare), rel=0.02)


def test_an_elements_error_under_dither_does_not_depend_on_its_size() -> None:
    sent = torch.full((256, 64), 0.01)
    sent[:, 0] = 7.5  # a step of 1: all others would become zero
    _, arrived = one_way("int4+dither", sent)
    error = (arrived - sent)[:, 1:]
    assert error.std().item() == pytest.approx(12**-0.5, rel=0.02)
    assert error.abs().max().item() < 0.51


def test_noise_of_a_long_tensor_is_not_repeated_at_the_same_feature() -> None:
    sent = torch.full((4096, 256), 0.5)
    sent[:, 0] = 7.0  # a step of 1 in the first block of each row
    _, arrived = one_way("int4+stochastic", sent)
    ups = arrived[:, 1:64] == 1.0
    assert ups.float().mean().item() == pytest.approx(0.5, abs=0.01)
    periods = ups.view(32, 128, 63)  # 32,768 elements each share their noise, shifted
    for first, second in itertools.combinations(range(32), 2):
        assert (periods[first] == periods[second]).float().mean().item() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("change", [{"job_seed": 12}, {"step": 8}, {"micro_batch": 3}, {"edge": 4}])
def test_randomness_is_a_function_of_job_step_micro_batch_and_edge(change: dict[str, int]) -> None:
    sent, codec = normal(64, 64), Codec(parse_codec("int4"), TensorRole.GRADIENT)
    fields = {"job_seed": 11, "step": 7, "micro_batch": 2, "edge": 3}
    first = codec.encode(sent, EdgeState(), Turn(**fields))
    assert codec.encode(sent, EdgeState(), Turn(**fields)).payload == first.payload
    assert codec.encode(sent, EdgeState(), Turn(**(fields | change))).payload != first.payload
    ahead = Codec(parse_codec("int4+stochastic"), TensorRole.ACTIVATION)
    assert ahead.encode(sent, EdgeState(), Turn(**fields)).payload != first.payload


def test_exact_topk_keeps_the_largest_and_of_equals_the_first() -> None:
    sent = torch.ones(1000)
    sent[[3, 500, 999]] = torch.tensor([5.0, -6.0, 7.0])
    frame, arrived = one_way("adatopk:50", sent)  # 1000 // 150 = 6 kept
    assert parse(frame.payload)[0].kept == 6
    assert arrived.nonzero().view(-1).tolist() == [0, 1, 2, 3, 500, 999]
    assert torch.equal(arrived[[3, 500, 999]], sent[[3, 500, 999]])


def test_a_sampled_threshold_keeps_about_as_many_and_no_smaller_ones() -> None:
    sent = normal(512, 768)
    frame, arrived = one_way("mask:1/8+fp16", sent)
    kept = parse(frame.payload)[0].kept
    assert abs(kept / sent.numel() - 1 / 8) < 0.01
    threshold = sent.abs().view(-1).sort(descending=True).values[kept - 1]
    assert torch.equal(arrived != 0, sent.abs() >= threshold)


@pytest.mark.parametrize("sent", [torch.full((300, 300), 2.5), torch.eye(300), -torch.ones(300, 300).triu()])
def test_a_sampled_threshold_that_would_keep_too_many_or_too_few_is_replaced_by_an_exact_one(
    sent: torch.Tensor,
) -> None:
    frame, _ = one_way("mask:1/8", sent)
    assert parse(frame.payload)[0].kept == pytest.approx(sent.numel() / 8, rel=0.25)


def test_topk_meets_its_ratio_of_bytes() -> None:
    sent = normal(1024, 1024)
    for name in ("topk:20", "topk:100+fp16", "topk:100+exact+int4", "topk:400"):
        frame, _ = one_way(name, sent)
        assert 4 * sent.numel() / len(frame.payload) == pytest.approx(parse_codec(name).ratio, rel=0.15)


def test_places_cost_about_their_entropy() -> None:
    sent = normal(1024, 1024)
    frame, _ = one_way("mask:1/8+exact", sent)
    values = (1 << 17) + 2 * (1 << 11)
    bits = 8 * (len(frame.payload) - 40 - 48 - values) / sent.numel()
    assert 0.5436 < bits < 0.5436 * 1.04  # H(1/8) = 0.5436


def test_gaps_longer_than_a_byte_survive() -> None:
    sent = torch.zeros(20_000)
    sent[[0, 255, 511, 767, 19_999]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    _, arrived = one_way("topk:1000+exact+fp16", sent)
    places = arrived.nonzero().view(-1)
    assert set(places.tolist()) <= {0, 255, 511, 767, 19_999}
    assert torch.equal(arrived[places], sent[places])
    assert 19_999 in places


def test_the_gradient_of_a_mask_comes_back_on_the_mask_as_values_only() -> None:
    edge = Edge("mask:1/8/fp16")
    activation, gradient = normal(64, 256), normal(64, 256, seed=6)
    forward, arrived = edge.forward(activation)
    backward, returned = edge.backward(gradient)
    mask = arrived != 0
    assert torch.equal(returned != 0, mask)
    assert relative(gradient[mask], returned[mask]) < 3e-4
    kept = int(mask.sum())
    assert len(backward.payload) == 40 + 32 + -(-2 * kept // 8) * 8 + 8
    assert len(forward.payload) > len(backward.payload) / 2
    assert not edge.producer.masks
    assert not edge.consumer.masks


def test_masks_of_several_micro_batches_wait_for_their_own_gradients() -> None:
    edge = Edge("mask:1/4/fp16")
    masks = {}
    for number in range(3):
        edge.turn = Turn(11, 7, number, 3)
        masks[number] = edge.forward(normal(32, 64, seed=number))[1] != 0
    for number in (1, 0, 2):
        edge.turn = Turn(11, 7, number, 3)
        assert torch.equal(edge.backward(normal(32, 64, seed=9))[1] != 0, masks[number])


def test_a_mask_does_not_depend_on_how_either_tensor_lies_in_memory() -> None:
    edge = Edge("mask:1/4/fp16")
    activation = normal(2, 8, 6, 6).to(memory_format=torch.channels_last)
    _, arrived = edge.forward(activation)
    assert arrived.stride() == activation.stride()
    _, returned = edge.backward(torch.ones(1).expand(2, 8, 6, 6) * normal(2, 8, 6, 6))
    assert torch.equal(returned != 0, arrived != 0)


def test_evaluations_leave_no_mask_behind_and_old_ones_can_be_dropped() -> None:
    edge = Edge("mask:1/4", Turn(11, 7, 0, 3, expects_gradient=False))
    edge.forward(normal(32, 64))
    assert not edge.producer.masks
    assert not edge.consumer.masks
    edge.turn = Turn(11, 7, 0, 3)
    edge.forward(normal(32, 64))
    edge.producer.forget_before(7)
    assert edge.producer.masks
    edge.producer.forget_before(8)
    assert not edge.producer.masks


def test_a_gradient_without_its_mask_is_refused_at_both_ends() -> None:
    edge = Edge("mask:1/4")
    with pytest.raises(StateError, match="edge 3, step 7, micro-batch 2"):
        edge.backward(normal(32, 64))
    edge.forward(normal(32, 64))
    edge.producer.masks.clear()
    with pytest.raises(WireError, match="was not sent"):
        edge.backward(normal(32, 64))


def test_a_gradient_for_another_mask_is_refused_and_ours_is_kept() -> None:
    edge, other = Edge("mask:1/4"), Edge("mask:1/4")
    edge.forward(normal(32, 64))
    other.forward(normal(32, 64, seed=6))
    frame = other.back.encode(normal(32, 64), other.consumer, TURN)
    with pytest.raises(WireError, match="another mask"):
        edge.back.decode(frame, spec_of(normal(32, 64)), edge.producer, TURN)
    assert edge.producer.masks


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ALL)
def test_f19_inf_and_nan_arrive_as_they_are(name: str, bad: float) -> None:
    sent = normal(64, 128)
    sent[33, 77] = bad
    _, arrived = one_way(name, sent)
    assert not torch.isfinite(arrived[33, 77])
    if name != "bf16":
        assert torch.equal(arrived.nan_to_num(123.0), sent.nan_to_num(123.0))


def test_an_overflow_in_a_masks_gradient_arrives_on_the_mask_only() -> None:
    edge = Edge("mask:1/4/int4")
    _, arrived = edge.forward(normal(64, 128))
    gradient = torch.full((64, 128), torch.inf)
    _, returned = edge.backward(gradient)
    assert torch.equal(returned, torch.where(arrived != 0, torch.inf, 0.0))


def test_an_overflow_ahead_of_a_mask_has_a_dense_gradient() -> None:
    edge = Edge("mask:1/4/int8")
    edge.forward(torch.full((64, 128), torch.nan))
    gradient = normal(64, 128)
    frame, returned = edge.backward(gradient)
    assert parse(frame.payload)[0].kind is FrameKind.DENSE
    assert relative(gradient, returned) < 0.01


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sent", [torch.arange(500), torch.rand(300) > 0.5, torch.zeros(3, 0, 4), torch.tensor(2.5)])
def test_what_is_no_float_or_too_small_arrives_exactly(name: str, sent: torch.Tensor) -> None:
    frame, arrived = one_way(name, sent)
    assert torch.equal(arrived, sent)
    assert arrived.dtype == sent.dtype
    assert parse(frame.payload)[0].kind is FrameKind.RAW


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_a_tensor_comes_back_in_the_edges_dtype(name: str, dtype: torch.dtype) -> None:
    sent = normal(64, 128).to(dtype)
    frame, arrived = one_way(name, sent)
    assert arrived.dtype == dtype
    assert relative(sent, arrived) < 1.0
    assert len(frame.payload) <= 56 + sent.numel() * sent.element_size()


def test_half_precision_does_not_overflow_when_a_step_was_rounded_up() -> None:
    sent = torch.full((64, 64), 65504.0, dtype=torch.float16)
    for name in ("int8", "int4", "fp8", "hadamard4"):
        _, arrived = one_way(name, sent)
        assert torch.isfinite(arrived).all(), name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["transposed", "channels last", "slice with gaps", "offset view"])
def test_a_tensor_comes_back_in_its_place_in_memory(name: str, kind: str) -> None:
    base = normal(12, 16, 40)
    sent = {
        "transposed": base.transpose(0, 2),
        "channels last": base.view(4, 3, 16, 40).contiguous(memory_format=torch.channels_last),
        "slice with gaps": base[:, :, 10:30],
        "offset view": base.view(-1)[3 : 3 + 12 * 600].view(12, 600),
    }[kind]
    _, arrived = one_way(name, sent)
    assert arrived.stride() == sent.stride()
    assert arrived.data_ptr() % 64 == sent.data_ptr() % 64
    assert relative(sent, arrived) == pytest.approx(relative(sent, one_way(name, sent.contiguous())[1]), abs=0.1)


def test_repeated_elements_travel_once_through_a_dense_codec() -> None:
    sent = normal(1, 512).expand(100, 512)
    frame, arrived = one_way("int8", sent)
    assert arrived.stride() == (0, 1)
    assert len(frame.payload) == 40 + 32 + 512 + 16
    assert relative(sent, arrived) < 0.01


@pytest.mark.parametrize("name", ["topk:10", "mask:1/4", "lowrank:8"])
def test_repeated_elements_go_as_they_are_where_that_is_smaller(name: str) -> None:
    sent = normal(1, 64).expand(1000, 64)
    _, arrived = one_way(name, sent)
    assert torch.equal(arrived, sent)


def test_lowrank_is_exact_up_to_int8_on_a_matrix_of_that_rank() -> None:
    sent = normal(128, 3) @ normal(3, 256, seed=6)
    frame, arrived = one_way("lowrank:10", sent)
    assert parse(frame.payload)[0].kept >= 3
    assert relative(sent, arrived) < 0.02


def test_lowrank_improves_on_a_slowly_changing_matrix_by_its_remembered_basis() -> None:
    spectrum = 0.9 ** torch.arange(128.0)
    left, right = torch.linalg.qr(normal(128, 128)).Q, torch.linalg.qr(normal(128, 128, seed=6)).Q
    sent = (left * spectrum) @ right
    codec, state = Codec(parse_codec("lowrank:8"), TensorRole.WEIGHTS), EdgeState()
    errors = [
        relative(sent, codec.decode(codec.encode(sent, state, TURN), spec_of(sent), state, TURN)) for _ in range(8)
    ]
    rank = parse(codec.encode(sent, state, TURN).payload)[0].kept
    best = float(spectrum[rank:].norm() / spectrum.norm())
    assert errors[-1] < errors[0]
    assert errors[-1] == pytest.approx(best, rel=0.1, abs=0.01)


def test_error_feedback_makes_the_sum_right_that_rounding_alone_gets_wrong() -> None:
    sent = normal(32, 64) * 0.01
    sent[:, 0] = 1.0  # makes everything else vanish in int4

    def total(name: str) -> torch.Tensor:
        codec, state = Codec(parse_codec(name), TensorRole.GRADIENT), EdgeState()
        rounds = (
            codec.decode(codec.encode(sent, state, turn), spec_of(sent), state, turn)
            for turn in (Turn(1, step, 0, 0) for step in range(60))
        )
        return torch.stack(list(rounds)).sum(0) / 60

    assert relative(sent[:, 1:], total("int4+nearest")[:, 1:]) > 0.99
    assert relative(sent[:, 1:], total("int4+nearest+ef")[:, 1:]) < 0.25
    assert relative(sent[:, 1:], total("topk:20+exact+ef")[:, 1:]) < 0.5


def test_the_residual_is_what_was_lost_and_belongs_to_the_checkpoint() -> None:
    sent = normal(32, 64)
    codec, state = Codec(parse_codec("int4+ef"), TensorRole.GRADIENT), EdgeState()
    arrived = codec.decode(codec.encode(sent, state, TURN), spec_of(sent), state, TURN)
    assert torch.equal(state.residuals[TensorRole.GRADIENT], sent - arrived)
    resumed = EdgeState()
    resumed.load_state_dict({name: tensor.clone() for name, tensor in state.state_dict().items()})
    later = Turn(11, 8, 0, 3)
    assert codec.encode(sent, resumed, later).payload == codec.encode(sent, state, later).payload
    assert codec.encode(sent, EdgeState(), later).payload != codec.encode(sent, resumed, later).payload


def test_lowrank_bases_belong_to_the_checkpoint_too() -> None:
    codec, state = Codec(parse_codec("lowrank:8"), TensorRole.GRADIENT), EdgeState()
    codec.encode(normal(64, 64), state, TURN)
    resumed = EdgeState()
    resumed.load_state_dict(state.state_dict())
    assert codec.encode(normal(64, 64), resumed, TURN).payload == codec.encode(normal(64, 64), state, TURN).payload
    with pytest.raises(StateError, match="neither"):
        resumed.load_state_dict({"residual.nothing": torch.zeros(1)})


def test_an_overflow_leaves_the_residual_alone() -> None:
    codec, state = Codec(parse_codec("int4+ef"), TensorRole.GRADIENT), EdgeState()
    codec.encode(normal(32, 64), state, TURN)
    before = state.residuals[TensorRole.GRADIENT].clone()
    codec.encode(torch.full((32, 64), torch.inf), state, TURN)
    codec.encode(normal(16, 64), state, TURN)  # a smaller last micro-batch
    assert torch.equal(state.residuals[TensorRole.GRADIENT], before)


def test_error_feedback_is_refused_for_activations() -> None:
    with pytest.raises(ConfigError, match="error feedback"):
        Codec(parse_codec("int8+ef"), TensorRole.ACTIVATION)


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "fp8", "int8", "int4", "int2", "hadamard4", "lowrank:8", "adatopk:20"]
)
@pytest.mark.parametrize("count", [256, 257, 1000, 262_144 + 70])
def test_the_static_size_is_the_frames(name: str, count: int) -> None:
    sent = normal(count)
    frame, _ = one_way(name, sent)
    assert Codec(parse_codec(name), TensorRole.WEIGHTS).size_bytes(spec_of(sent)) == len(frame.payload)


@pytest.mark.parametrize("name", ["topk:10", "topk:100+exact+int4", "mask:1/8", "mask:3/8+exact"])
def test_the_static_size_estimates_sparse_frames(name: str) -> None:
    sent = normal(512, 512)
    frame, _ = one_way(name, sent)
    assert len(frame.payload) == pytest.approx(
        Codec(parse_codec(name), TensorRole.WEIGHTS).size_bytes(spec_of(sent)), rel=0.15
    )


def test_zstd_is_used_where_the_link_is_slow_and_the_values_shrink() -> None:
    relu = torch.relu(normal(256, 256) - 1)

    def size(sent: torch.Tensor, rate: float | None, name: str = "int4") -> int:
        return len(Edge(name, rate_bytes_per_s=rate).forward(sent)[0].payload)

    plain = size(relu, None)
    assert plain == Codec(parse_codec("int4"), TensorRole.ACTIVATION).size_bytes(spec_of(relu))
    assert size(relu, 1e6) < 0.75 * plain
    assert size(relu, 1e6, "int4+plain") == plain
    assert size(relu, 1e9) == plain
    assert size(relu, None, "int4+zstd") == size(relu, 1e6)
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, 65536, dtype=np.uint32).view(np.float32))
    assert size(noise.nan_to_num(), 1e6, "none") == size(noise.nan_to_num(), None, "none")


@pytest.mark.parametrize("name", ["int4", "mask:1/8", "topk:20", "hadamard4"])
def test_zstd_changes_no_value(name: str) -> None:
    sent = torch.relu(normal(256, 256))
    _, plain = Edge(name).forward(sent)
    _, small = Edge(name, rate_bytes_per_s=1e5).forward(sent)
    assert torch.equal(plain, small)


def test_encoding_changes_neither_the_tensor_nor_its_graph() -> None:
    sent = normal(64, 128).requires_grad_()
    before = sent.detach().clone()
    for name in ALL:
        _, arrived = one_way(name, sent)
        assert not arrived.requires_grad
    assert torch.equal(sent, before)
