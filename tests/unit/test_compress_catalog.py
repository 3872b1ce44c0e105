"""Names of codecs, what they cost, and AdaTopK's share of each link."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from fusion.base.errors import ConfigError
from fusion.compress.catalog import (
    CodecSpec,
    Kind,
    TensorRole,
    Values,
    adatopk_kept_one_in,
    adatopk_on_link,
    kept_elements,
    matrix_shape,
    parse_codec,
    parse_pair,
    ratio,
    size_bytes,
    speeds,
)
from fusion.graph.dag import TensorSpec

NAMES = [
    "none",
    "fp16",
    "bf16+plain",
    "fp8",
    "int8+stochastic",
    "int4+nearest+zstd+ef",
    "int5",
    "int3+dither",
    "int2",
    "hadamard4",
    "topk:100",
    "topk:33.5+int4+nearest+exact",
    "topk:100+fp16",
    "adatopk:100",
    "mask:1/8",
    "mask:3/8+fp16+exact",
    "lowrank:20+ef",
]
PAIRS = ["int8/int4", "int8/int4+ef", "mask:1/8/int4", "mask:1/8+fp16/int8+nearest", "none/topk:100", "mask:1/4/none"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reads_back_as_itself(name: str) -> None:
    assert parse_codec(name).name == name


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_reads_back_as_itself(name: str) -> None:
    assert parse_pair(name).name == name


def test_one_codec_serves_both_ways() -> None:
    pair = parse_pair("int8")
    assert pair.of(TensorRole.ACTIVATION) == pair.of(TensorRole.GRADIENT) == CodecSpec(values=Values.INT8)
    assert pair.name == "int8"


def test_a_slash_in_a_fraction_is_no_pair() -> None:
    pair = parse_pair("mask:1/8/int2")
    assert (pair.forward.kind, pair.forward.fraction, pair.forward.values) == (Kind.MASK, Fraction(1, 8), Values.INT8)
    assert (pair.backward.kind, pair.backward.fraction, pair.backward.values) == (
        Kind.MASK,
        Fraction(1, 8),
        Values.INT2,
    )


def test_a_mask_alone_sends_its_gradient_as_int4_on_the_mask() -> None:
    assert parse_pair("mask:1/8").name == "mask:1/8/int4"


@pytest.mark.parametrize(
    "text",
    ["", "int7", "int33", "int0", "int8:2", "topk", "topk:", "topk:100:1", "INT8", "int8 ", "gzip", "mask", "none:1"],
)
def test_b6_an_unknown_codec_lists_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match=r"codec: .*(none, fp16, bf16, fp8|needs a)"):
        parse_codec(text)


@pytest.mark.parametrize("ratio_text", ["0", "0.5", "-1", "nan", "inf", "1e9", "many"])
def test_b7_a_ratio_out_of_range_says_what_is_allowed(ratio_text: str) -> None:
    with pytest.raises(ConfigError, match="needs a ratio of 1 to 10000"):
        parse_codec(f"topk:{ratio_text}")


@pytest.mark.parametrize("fraction", ["0/8", "9/8", "1/0", "1/9999", "-1/8", "1.5/8", "1/8/2", ""])
def test_a_fraction_out_of_range_says_what_is_allowed(fraction: str) -> None:
    with pytest.raises(ConfigError, match="needs a fraction up to 1"):
        parse_codec(f"mask:{fraction}")


@pytest.mark.parametrize(
    "text", ["bf16+nearest", "int8+exact", "topk:100+fp16+nearest", "mask:1/8+ef", "int8+x", "none+ef"]
)
def test_an_option_that_does_not_fit_lists_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option .* is none of .*zstd"):
        parse_codec(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int8/int4/int2", "3 parts"),
        ("int8+ef", "error feedback on activations"),
        ("int8/mask:1/8", "on the way back only"),
        ("mask:1/8/topk:10", "values on the mask"),
        ("mask:1/8/int4+ef", "without error feedback"),
        ("mask:1/8/mask:1/4", "values on the mask"),
    ],
)
def test_a_pair_that_makes_no_sense_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_pair(text)


def test_only_gradients_and_deltas_are_rounded_at_random_unless_asked_for() -> None:
    plain, forced, never = parse_codec("int4"), parse_codec("int4+stochastic"), parse_codec("int4+nearest")
    assert [plain.stochastic(role) for role in TensorRole] == [False, True, False, True]
    assert all(forced.stochastic(role) for role in TensorRole)
    assert not any(never.stochastic(role) for role in TensorRole)
    assert not parse_codec("bf16").stochastic(TensorRole.GRADIENT)


def test_sizes_follow_from_bits_and_steps() -> None:
    tensor = TensorSpec("float32", (10, 64))  # 640 elements, 10 blocks
    header = 40
    assert size_bytes(parse_codec("none"), tensor) == header + 16 + 2560
    assert size_bytes(parse_codec("bf16"), tensor) == header + 16 + 1280
    assert size_bytes(parse_codec("int8"), tensor) == header + 32 + 640 + 24  # 20 bytes of steps, padded
    assert size_bytes(parse_codec("int4"), tensor) == header + 32 + 320 + 24
    assert size_bytes(parse_codec("int2"), tensor) == header + 32 + 160 + 24
    assert size_bytes(parse_codec("adatopk:8"), tensor) == header + 32 + 26 * 8 + 26 * 4  # 640 // 24 kept
    assert size_bytes(parse_codec("mask:1/10"), tensor, TensorRole.GRADIENT) == header + 32 + 64 + 8


def test_what_is_no_float_or_too_small_costs_what_it_costs_as_it_is() -> None:
    assert size_bytes(parse_codec("int4"), TensorSpec("int64", (100,))) == 56 + 800
    assert size_bytes(parse_codec("int4"), TensorSpec("float32", ())) == 56 + 8
    assert size_bytes(parse_codec("bf16"), TensorSpec("bfloat16", (1000,))) == 56 + 2000
    assert all(size_bytes(parse_codec(name), TensorSpec("float32", (0, 3))) == 56 for name in NAMES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", 1),
        ("bf16", 2),
        ("int8", 32 / 8.25),
        ("int6", 32 / 6.25),
        ("int3", 32 / 3.25),
        ("int2", 32 / 2.25),
        ("adatopk:100", 100),
    ],
)
def test_ratios_of_large_tensors(name: str, expected: float) -> None:
    assert ratio(parse_codec(name)) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("name", ["topk:10", "topk:100", "topk:1000+fp16", "lowrank:20"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ratio_is_of_bytes_whatever_the_dtype(name: str, dtype: str) -> None:
    spec = parse_codec(name)
    assert ratio(spec, dtype) == pytest.approx(spec.ratio, rel=0.06)


def test_a_mask_keeps_its_fraction_and_at_least_one() -> None:
    spec = parse_codec("mask:3/8")
    assert [kept_elements(spec, count, 4) for count in (0, 1, 80, 1000)] == [0, 1, 30, 375]


def test_adatopk_gives_the_slowest_link_three_times_its_ratio_and_fast_links_everything() -> None:
    # r_link = max(1, 3 r R_link / max R), with r = 100 and links of 8 s, 2 s, 0.01 s
    assert adatopk_kept_one_in(100, 8.0, 8.0) == 300
    assert adatopk_kept_one_in(100, 2.0, 8.0) == 75
    assert adatopk_kept_one_in(100, 0.01, 8.0) == 1
    assert adatopk_on_link(100, 8.0, 8.0) == parse_codec("adatopk:100")
    assert kept_elements(adatopk_on_link(100, 2.0, 8.0), 7500, 4) == 100
    assert adatopk_on_link(100, 0.01, 8.0) == parse_codec("none")
    assert adatopk_on_link(100, 0.0, 0.0) == parse_codec("none")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 64, 256), (256, 256)), ((32, 64, 28, 28), (2048, 784)), ((10,), (1, 10)), ((), (1, 1)), ((0, 3), (0, 0))],
)
def test_a_tensor_is_cut_into_the_matrix_with_the_smallest_factors(shape, expected) -> None:
    assert matrix_shape(shape) == expected


def test_every_codec_has_speeds_for_the_planner_and_stronger_work_costs_more() -> None:
    assert all(min(speeds(parse_codec(name))) > 1e8 for name in NAMES)
    assert speeds(parse_codec("bf16"))[0] > speeds(parse_codec("int4"))[0] > speeds(parse_codec("topk:100"))[0]


def test_the_catalog_and_frames_are_usable_without_torch() -> None:
    script = "import sys, fusion.compress.catalog, fusion.compress.frame; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
