"""Bytes that nobody would send are refused with a WireError, before anything is allocated by what they claim."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard

from fusion.base.errors import WireError
from fusion.base.layout import TensorLayout
from fusion.compress.catalog import TensorRole, Values, parse_codec
from fusion.compress.codec import Codec
from fusion.compress.frame import Frame, FrameHeader, FrameKind, Lossless, Section, open_section, pack, parse
from fusion.compress.state import EdgeState
from fusion.compress.support import read_gaps, read_wide, write_gaps
from fusion.graph.dag import TensorSpec
from tests.support.compress import TURN, one_way, resealed, spec_of

EXPECTED = 1 << 16
ENTRY = struct.Struct("<QQ")


def zstd(data: bytes, **parameters: int) -> bytes:
    settings = {"write_checksum": 1, "write_content_size": 1} | parameters
    chosen = zstandard.ZstdCompressionParameters.from_level(1, **settings)
    return zstandard.ZstdCompressor(compression_params=chosen).compress(data)


def lying_about_its_size(size: int) -> bytes:
    """A frame of 64 KiB of zeros whose header states another size (8-byte field, single segment)."""
    honest = zstd(bytes(EXPECTED))
    assert honest[4] & 0xE0 == 0x60  # a 2-byte size, single segment
    return honest[:4] + bytes([honest[4] & 0x3F | 0xC0]) + struct.pack("<Q", size) + honest[7:]


DICTIONARY = zstandard.ZstdCompressionDict(
    bytes(np.random.default_rng(0).integers(0, 9, 4096, dtype=np.uint8)), dict_type=zstandard.DICT_TYPE_RAWCONTENT
)
TRAINED = zstandard.train_dictionary(
    1024, [bytes(np.random.default_rng(seed).integers(0, 4, 500, dtype=np.uint8)) for seed in range(200)]
)
BAD_ZSTD = {
    "bomb": zstd(bytes(64 << 20)),
    "10 TiB": lying_about_its_size(10 << 40),
    "twice its size": lying_about_its_size(2 * EXPECTED),
    "half its size": lying_about_its_size(EXPECTED // 2),
    "no size": zstd(bytes(EXPECTED), write_content_size=0),
    "no checksum": zstd(bytes(EXPECTED), write_checksum=0),
    "dictionary": zstandard.ZstdCompressor(level=1, dict_data=TRAINED, write_checksum=True).compress(bytes(EXPECTED)),
    "two frames": zstd(bytes(EXPECTED)) + zstd(bytes(EXPECTED)),
    "trailing bytes": zstd(bytes(EXPECTED)) + b"\0",
    "skippable frame": struct.pack("<II", 0x184D2A50, 100) + bytes(100),
    "skippable frame first": struct.pack("<II", 0x184D2A50, 4) + bytes(4) + zstd(bytes(EXPECTED)),
    "truncated": zstd(bytes(EXPECTED))[:-5],
    "bad magic": b"\0\0\0\0" + zstd(bytes(EXPECTED))[4:],
    "flipped checksum": zstd(bytes(EXPECTED))[:-1] + b"\x00",
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_ZSTD)
def test_b20_a_zstd_frame_that_lies_is_refused_before_it_is_opened(name: str) -> None:
    section = Section(memoryview(BAD_ZSTD[name]), EXPECTED, compressed=True)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            open_section(section, EXPECTED)
        assert tracemalloc.get_traced_memory()[1] < EXPECTED + (64 << 10)
    finally:
        tracemalloc.stop()


def test_b20_a_window_of_128_mib_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_checksum=1)
    )
    stream = compressor.compressobj(size=EXPECTED)
    frame = stream.compress(bytes(EXPECTED)) + stream.flush()
    # The window descriptor is written only where the content may be longer than one segment.
    frame = frame[:4] + bytes([0x84]) + bytes([(27 - 10) << 3]) + struct.pack("<I", EXPECTED) + frame[7:]
    assert zstandard.get_frame_parameters(frame).window_size == 128 << 20
    with pytest.raises(WireError, match="window 134217728"):
        open_section(Section(memoryview(frame), EXPECTED, compressed=True), EXPECTED)


def test_b20_an_honest_zstd_frame_is_opened() -> None:
    data = bytes(range(256)) * 256
    assert open_section(Section(memoryview(zstd(data)), EXPECTED, compressed=True), EXPECTED) == data


def header(**changes) -> FrameHeader:
    fields = {"kind": FrameKind.DENSE, "values": Values.INT8, "dtype": "float32", "elements": 640, "kept": 640}
    return FrameHeader(**(fields | changes))


def decode(name: str, payload: bytes, spec: TensorSpec | None = None, layout: TensorLayout | None = None):
    spec = spec or TensorSpec("float32", (10, 64))
    layout = layout or TensorLayout(spec.dtype, spec.shape, tuple(torch.empty(spec.shape, device="meta").stride()))
    return Codec(parse_codec(name), TensorRole.WEIGHTS).decode(Frame(layout, payload), spec, EdgeState(), TURN)


def steps(count: int, first: float = 1.0) -> bytes:
    return torch.tensor([first] + [1.0] * (count - 1), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def plain(head: FrameHeader, *sections: bytes) -> bytes:
    return bytes(pack(head, sections, [Lossless.PLAIN] * len(sections)))


def test_a_frame_made_by_hand_is_decoded() -> None:
    codes = torch.arange(640).remainder(100).to(torch.int8)
    back = decode("int8", plain(header(), codes.numpy().tobytes(), steps(10, 2.0)))
    assert back.view(-1)[:5].tolist() == [0, 2, 4, 6, 8]
    assert back.view(-1)[65].item() == 65


@pytest.mark.parametrize("step", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e38, 1e-38])
@pytest.mark.parametrize("name", ["int8", "int4", "int2", "hadamard4", "fp8"])
def test_b21_t22_a_step_that_is_no_positive_number_is_refused(name: str, step: float) -> None:
    spec = parse_codec(name)
    size = {"int8": 640, "fp8": 640, "int2": 160}.get(name, 320)
    with pytest.raises(WireError, match="step"):
        decode(name, plain(header(values=spec.values), bytes(size), steps(10, step)))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -2.0, 3.0])
def test_b21_a_scale_of_fp16_that_is_no_power_of_two_is_refused(scale: float) -> None:
    with pytest.raises(WireError, match="power of two"):
        decode("fp16", plain(header(values=Values.FP16), bytes(1280), struct.pack("<f", scale)))


@pytest.mark.parametrize(
    ("name", "head", "sections"),
    [
        ("int8", header(), (bytes(639), steps(10))),
        ("int8", header(), (bytes(640), steps(9))),
        ("int8", header(), (bytes(640),)),
        ("int8", header(), (bytes(640), steps(10), b"")),
        ("int8", header(elements=641), (bytes(640), steps(10))),
        ("int8", header(kept=639), (bytes(640), steps(10))),
        ("int8", header(elements=2**62, kept=2**62), (bytes(640), steps(10))),
        ("bf16", header(values=Values.BF16), (bytes(1279),)),
        ("int8", header(kind=FrameKind.RAW, values=Values.NONE), (bytes(2559),)),
        ("int8", header(values=Values.INT4), (bytes(320), steps(10))),
        ("int8", header(kind=FrameKind.ON_MASK), (bytes(640), steps(10))),
        ("topk:10", header(kind=FrameKind.SPARSE, kept=641), (bytes(641), bytes(704), steps(11))),
        ("topk:10", header(kind=FrameKind.SPARSE, kept=2**60), (bytes(10), bytes(64), steps(1))),
        ("topk:10", header(kind=FrameKind.SPARSE_WIDE, kept=1), (bytes(8), bytes(64), steps(1))),
        ("lowrank:10", header(kind=FrameKind.LOWRANK, kept=0), (b"", b"", b"", b"")),
        ("lowrank:10", header(kind=FrameKind.LOWRANK, kept=11), (bytes(110), steps(2), bytes(704), steps(11))),
        ("lowrank:10", header(kind=FrameKind.LOWRANK, kept=1), (bytes(64), steps(1), bytes(64))),
    ],
)
def test_b21_numbers_that_do_not_fit_each_other_are_refused(name: str, head: FrameHeader, sections) -> None:
    with pytest.raises(WireError):
        decode(name, plain(head, *sections))


@pytest.mark.parametrize(
    ("offset", "value"), [(4, 2), (5, 99), (6, 33), (7, 99), (8, 0), (8, 200), (9, 255), (10, 1), (36, 1)]
)
def test_b21_unknown_versions_kinds_values_and_dtypes_are_refused(offset: int, value: int) -> None:
    payload = bytearray(plain(header(), bytes(640), steps(10)))
    payload[offset] = value
    with pytest.raises(WireError):
        decode("int8", resealed(payload))


@pytest.mark.parametrize(
    ("section", "stored", "raw"),
    [(0, 640, 2**63), (0, 2**63, 640), (1, 2**64 - 1, 2**64 - 1), (0, 639, 640), (1, 28, 28), (0, 0, 0)],
)
def test_b21_a_table_of_sections_that_lies_is_refused(section: int, stored: int, raw: int) -> None:
    payload = bytearray(plain(header(), bytes(640), steps(10)))
    ENTRY.pack_into(payload, 40 + 16 * section, stored, raw)
    with pytest.raises(WireError):
        decode("int8", resealed(payload))


@pytest.mark.parametrize("flag", [1, 2, 3])
def test_b21_a_section_that_is_not_zstd_but_says_so_is_refused(flag: int) -> None:
    payload = bytearray(plain(header(), bytes(640), steps(10)))
    payload[9] = flag
    with pytest.raises(WireError):
        decode("int8", resealed(payload))


def test_b21_places_at_or_beyond_the_end_are_refused() -> None:
    assert read_gaps(bytes([9]), 1, 10).tolist() == [9]
    for data, kept, elements in [(bytes([10]), 1, 10), (bytes([0] * 11), 11, 10), (bytes([255, 0]), 1, 255)]:
        with pytest.raises(WireError, match="places"):
            read_gaps(data, kept, elements)


@pytest.mark.parametrize(("data", "kept"), [(b"\1\1", 1), (b"\1", 2), (b"\1\xff", 1), (b"\xff", 0), (b"", 1)])
def test_b21_places_that_are_not_as_many_as_stated_are_refused(data: bytes, kept: int) -> None:
    with pytest.raises(WireError, match="places"):
        read_gaps(data, kept, 1000)


@pytest.mark.parametrize("places", [[3, 3], [5, 4], [-1, 4], [0, 10], [2**62, 2**63 - 1], [-(2**63), 5]])
def test_b21_wide_places_that_repeat_descend_or_leave_the_tensor_are_refused(places: list[int]) -> None:
    assert read_wide(np.array([0, 9]).tobytes(), 2, 10).tolist() == [0, 9]
    with pytest.raises(WireError, match="places"):
        read_wide(np.array(places, dtype=np.int64).tobytes(), 2, 10)


def test_places_survive_whatever_their_gaps() -> None:
    for places in ([], [0], [254], [255], [256], [0, 255, 511, 5000, 5001, 5256, 5512], list(range(300))):
        data = write_gaps(np.array(places, dtype=np.int64))
        assert read_gaps(data, len(places), 6000).tolist() == places


def test_b21_places_that_are_not_those_of_the_header_are_refused() -> None:
    frame, _ = one_way("mask:1/4", torch.randn(64, 64))
    payload = bytearray(frame.payload)
    payload[32] ^= 1
    with pytest.raises(WireError, match="places"):
        decode("mask:1/4", resealed(payload), TensorSpec("float32", (64, 64)))


@pytest.mark.parametrize(
    "layout",
    [
        TensorLayout("float32", (10, 65), (65, 1)),
        TensorLayout("float64", (10, 64), (64, 1)),
        TensorLayout("float99", (10, 64), (64, 1)),
        TensorLayout("float32", (10, 64), (1, 1)),
        TensorLayout("float32", (10, 64), (2**40, 1)),
        TensorLayout("float32", (10, 64), (-64, 1)),
        TensorLayout("float32", (10, 64), (64,)),
        TensorLayout("float32", (10, 64), (64, 1), 64),
        TensorLayout("float32", (10, 64), (0, 1)),
        TensorLayout("float32", (0, 2**62), (1, 1)),
    ],
)
def test_b22_a_layout_that_is_not_the_expected_tensors_is_refused(layout: TensorLayout) -> None:
    with pytest.raises(WireError):
        decode("int8", plain(header(), bytes(640), steps(10)), TensorSpec("float32", (10, 64)), layout)


def test_b22_sparse_and_lowrank_frames_of_repeated_elements_are_refused() -> None:
    for name in ("topk:10", "lowrank:8"):
        sent = torch.randn(100, 64)
        frame, _ = one_way(name, sent)
        with pytest.raises(WireError, match="repeated"):
            decode(name, frame.payload, spec_of(sent), TensorLayout("float32", (100, 64), (0, 1)))


def test_a_small_frame_of_a_huge_tensor_is_refused_before_it_is_made() -> None:
    huge = TensorLayout("float32", (2**19, 2**20), (2**20, 1))
    payload = plain(header(kind=FrameKind.SPARSE, elements=2**39, kept=0), b"", b"", b"")
    with pytest.raises(WireError, match="is expected"):
        decode("topk:10", payload, TensorSpec("float32", (10, 64)), huge)


def test_another_codecs_frame_is_refused_but_never_the_elements_as_they_are() -> None:
    sent = torch.randn(40, 64)
    names = ["bf16", "int8", "hadamard4", "topk:10", "adatopk:10", "lowrank:8"]
    for name, other in itertools.permutations(names, 2):
        with pytest.raises(WireError, match="is agreed"):
            decode(other, one_way(name, sent)[0].payload, spec_of(sent))
    for name in names:
        assert torch.equal(decode(name, one_way("none", sent)[0].payload, spec_of(sent)), sent)


def test_every_flipped_bit_is_noticed() -> None:
    frame, _ = one_way("int4", torch.randn(4, 64))
    for bit in range(8 * len(frame.payload)):
        payload = bytearray(frame.payload)
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            parse(payload)


def test_a_payload_may_be_of_any_bytes_like_type() -> None:
    sent = torch.randn(40, 64)
    for name in ("none", "int8", "topk:10"):
        frame, arrived = one_way(name, sent)
        for payload in (bytes(frame.payload), bytearray(frame.payload), memoryview(bytes(frame.payload))):
            assert torch.equal(decode(name, payload, spec_of(sent)), arrived)
