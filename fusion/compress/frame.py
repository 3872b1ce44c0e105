"""A codec's bytes on the wire: a header that says what they are, a checksum over all of them, and their sections.

    0   4  "FLCF"
    4   1  version, 1
    5   1  kind, 1 values, 1 dtype, 1 number of sections, 1 bit mask of the sections under zstd, 2 zero
    12  4  crc32 of everything else
    16  8  elements of the tensor
    24  8  kept elements, or the rank
    32  4  crc32 of the places that the values belong to, 4 zero
    40     per section 8 bytes stored, 8 bytes raw; then the sections, each padded to 8

Numbers are little-endian. Nothing is allocated by what a header claims until it has been compared with what the
receiver expects.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import zstandard

from fusion.base.errors import WireError
from fusion.base.layout import TensorLayout
from fusion.compress.catalog import HEADER_BYTES, SECTION_BYTES, Values, aligned
from fusion.graph.dag import DTYPE_BYTES

Buffer = bytes | bytearray | memoryview

MAGIC = b"FLCF"
VERSION = 1
MAX_SECTIONS = 4
MAX_WINDOW_BYTES = 8 << 20
ZSTD_LEVEL = 1
#: Assumed of zstd on codes, deliberately slow: it shares its core with the training.
ZSTD_ENCODE_BYTES_PER_S, ZSTD_DECODE_BYTES_PER_S = 400e6, 800e6
_SAMPLE_BYTES = 16 << 10
_HEADER = struct.Struct("<4sBBBBBBHIQQII")
_ENTRY = struct.Struct("<QQ")
_CHECKSUM_AT = 12
_VALUES = tuple(Values)
_DTYPES = tuple(DTYPE_BYTES)
_local = threading.local()


class FrameKind(IntEnum):
    """How the sections make a tensor."""

    RAW = 0  #: the elements as they are
    DENSE = 1  #: values of all elements
    SPARSE = 2  #: gaps between places, then values
    SPARSE_WIDE = 3  #: places as int64, then values
    ON_MASK = 4  #: values on places that both ends know
    LOWRANK = 5  #: two factors


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself."""

    kind: FrameKind
    values: Values
    dtype: str
    elements: int
    kept: int
    places: int = 0  #: crc32 of the places of ON_MASK, or of the mask that these places make


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded tensor: where its elements shall lie, and their bytes."""

    layout: TensorLayout
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a frame, as it is stored."""

    stored: memoryview
    raw_bytes: int
    compressed: bool


class Lossless(IntEnum):
    """What zstd may try on a section; it is kept only where it makes the section smaller."""

    PLAIN = 0
    ZSTD = 1
    SYMBOLS = 2  #: few repetitions but unlike frequencies: Huffman codes without a search, smaller and twice as fast


def pack(header: FrameHeader, sections: Sequence[Buffer], lossless: Sequence[Lossless]) -> bytearray:
    """Return the frame."""
    stored: list[Buffer] = []
    mask = 0
    for number, (section, wanted) in enumerate(zip(sections, lossless, strict=True)):
        packed = _compressor(wanted).compress(section) if wanted and len(section) else b""
        smaller = 0 < len(packed) < len(section)
        mask |= smaller << number
        stored.append(packed if smaller else section)
    frame = bytearray(HEADER_BYTES + sum(SECTION_BYTES + aligned(len(part)) for part in stored))
    _HEADER.pack_into(frame, 0, *_fields(header, len(stored), mask))
    place = HEADER_BYTES + SECTION_BYTES * len(stored)
    for number, (part, section) in enumerate(zip(stored, sections, strict=True)):
        _ENTRY.pack_into(frame, HEADER_BYTES + SECTION_BYTES * number, len(part), len(section))
        frame[place : place + len(part)] = part
        place += aligned(len(part))
    struct.pack_into("<I", frame, _CHECKSUM_AT, _checksum(memoryview(frame)))
    return frame


def _fields(header: FrameHeader, sections: int, mask: int) -> tuple[Any, ...]:
    values, dtype = _VALUES.index(header.values), _DTYPES.index(header.dtype)
    numbers = (header.elements, header.kept, header.places, 0)
    return (MAGIC, VERSION, header.kind, values, dtype, sections, mask, 0, 0, *numbers)


def parse(payload: Buffer) -> tuple[FrameHeader, list[Section]]:
    """Return a frame's header and sections, none opened yet; WireError unless every byte is as it was packed."""
    view = memoryview(payload).cast("B")
    if len(view) < HEADER_BYTES:
        raise WireError(f"frame: {len(view)} bytes are fewer than its header's {HEADER_BYTES}")
    magic, version, kind, values, dtype, count, mask, zero, checksum, elements, kept, places, zero_2 = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise WireError(f"frame: starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"frame: version {version} is unknown; this end speaks {VERSION}")
    if checksum != _checksum(view):
        raise WireError("frame: checksum mismatch")
    if kind >= len(FrameKind) or values >= len(_VALUES) or dtype >= len(_DTYPES):
        raise WireError(f"frame: kind {kind}, values {values}, dtype {dtype}: at least one of them is unknown")
    if not 1 <= count <= MAX_SECTIONS or mask >> count or zero or zero_2:
        raise WireError(f"frame: {count} sections, zstd on {mask:#x}, reserved {zero} {zero_2}: out of range")
    return (
        FrameHeader(FrameKind(kind), _VALUES[values], _DTYPES[dtype], elements, kept, places),
        _sections(view, count, mask),
    )


def _sections(view: memoryview, count: int, mask: int) -> list[Section]:
    place = HEADER_BYTES + SECTION_BYTES * count
    if len(view) < place:
        raise WireError(f"frame: {len(view)} bytes do not hold the table of {count} sections")
    sections = []
    for number in range(count):
        stored, raw = _ENTRY.unpack_from(view, HEADER_BYTES + SECTION_BYTES * number)
        compressed = bool(mask >> number & 1)
        if stored > len(view) - place or (stored >= raw if compressed else stored != raw):
            raise WireError(f"frame: section {number} claims {stored} bytes for {raw}")
        sections.append(Section(view[place : place + stored], raw, compressed))
        place += aligned(stored)
    if place != len(view):
        raise WireError(f"frame: {len(view)} bytes, its sections end at {place}")
    return sections


def open_section(section: Section, expected_bytes: int) -> Buffer:
    """Return a section's bytes, writable; WireError unless they are exactly `expected_bytes`."""
    if section.raw_bytes != expected_bytes:
        raise WireError(f"frame: a section of {section.raw_bytes} bytes where {expected_bytes} are expected")
    if section.compressed:
        return bytearray(_decompress(section.stored, expected_bytes))
    return bytearray(section.stored) if section.stored.readonly else section.stored


def _decompress(stored: memoryview, expected_bytes: int) -> bytes:
    """Open a zstd frame. `max_output_size` alone would not do: zstd ignores it where the frame states its size."""
    try:
        about = zstandard.get_frame_parameters(stored)
        if about.content_size != expected_bytes:
            raise WireError(f"zstd: the frame states {about.content_size} bytes, expected are {expected_bytes}")
        if not about.has_checksum or about.dict_id != 0 or about.window_size > MAX_WINDOW_BYTES:
            raise WireError(
                f"zstd: checksum {about.has_checksum}, dictionary {about.dict_id}, window {about.window_size}; "
                f"required are a checksum, no dictionary, at most {MAX_WINDOW_BYTES}"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        opened: bytes = decompressor.decompress(stored, max_output_size=expected_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"zstd: {str(error)[:200]}") from None
    if len(opened) != expected_bytes:
        raise WireError(f"zstd: {len(opened)} bytes came out, expected are {expected_bytes}")
    return opened


def zstd_pays(section: Buffer, rate_bytes_per_s: float | None) -> bool:
    """Whether zstd saves more time on a link of this rate than it takes, judged by three pieces; None: unknown, so no.

    A byte costs 1/encode + 1/decode seconds and saves (1 - size)/rate.
    """
    if rate_bytes_per_s is None or len(section) < _SAMPLE_BYTES // 16:
        return False
    cost_s = 1 / ZSTD_ENCODE_BYTES_PER_S + 1 / ZSTD_DECODE_BYTES_PER_S
    if cost_s >= 1 / rate_bytes_per_s:
        return False
    view = memoryview(section).cast("B")
    starts = {0, max(0, (len(view) - _SAMPLE_BYTES) // 2), max(0, len(view) - _SAMPLE_BYTES)}
    pieces = [view[start : start + _SAMPLE_BYTES] for start in sorted(starts)]
    before = sum(len(piece) for piece in pieces)
    after = sum(len(_compressor(Lossless.ZSTD).compress(piece)) for piece in pieces)
    return (1 - after / before) / rate_bytes_per_s > cost_s


def _checksum(frame: memoryview) -> int:
    return zlib.crc32(frame[_CHECKSUM_AT + 4 :], zlib.crc32(frame[:_CHECKSUM_AT]))


def _compressor(lossless: Lossless) -> Any:
    """Return this thread's compressor; they are not safe to share."""
    if not hasattr(_local, "compressors"):
        _local.compressors = {}
    if lossless not in _local.compressors:
        search = {"min_match": 7, "hash_log": 6} if lossless is Lossless.SYMBOLS else {}
        parameters = zstandard.ZstdCompressionParameters.from_level(
            ZSTD_LEVEL, write_checksum=1, write_content_size=1, **search
        )
        _local.compressors[lossless] = zstandard.ZstdCompressor(compression_params=parameters)
    return _local.compressors[lossless]
