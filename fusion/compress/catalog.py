"""Codecs as names and numbers, without torch: what may be asked for, and how many bytes it will cost.

CODEC      = NAME [":" ARGUMENT] { "+" OPTION }
PAIR       = CODEC [ "/" CODEC ]            forward / backward; one alone serves both ways

none                  the elements as they are, with a checksum
fp16 bf16             16 bits an element; fp16 scales the whole tensor into its range first
fp8 int8 int6 int5    blocks of 64 elements with one bf16 step each
int4 int3 int2        the same
hadamard4             int4 of the Hadamard transform of each block: spreads what stands out
topk:R                the largest elements, as many as fit into 1/R of the bytes
adatopk:R             the largest of every 3 R, as 96 bits each: what the paper sends at a ratio of R
mask:A/B              the largest A of every B elements; their gradient comes back on the same places, as values only
lowrank:R             two factors of the tensor seen as a matrix, of the rank that fits into 1/R of the bytes

nearest stochastic    rounding of int8 to int2 and hadamard4. Default: stochastic for gradients and replica deltas
dither                the same numbers added before rounding and taken away behind it: no bias, and half the
                      variance of stochastic. Not for topk and mask
exact sampled         how topk and mask find their threshold. Default: sampled
none fp16 ... int4    how topk and mask send their values. Default: int8, and int4 for the gradient of a mask
zstd plain            try, or never try, zstd on the values. Default: where the link's measured rate makes it pay
ef                    error feedback: what was lost is added to the next tensor. Not for activations or masks
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import isfinite, log2

from fusion.base.errors import ConfigError
from fusion.graph.dag import DTYPE_BYTES, TensorSpec

BLOCK = 64  #: elements that share a step
MAX_RATIO = 10_000.0
MAX_DENOMINATOR = 4096
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})  #: what a lossy codec takes; the rest goes as it is
HEADER_BYTES = 40
SECTION_BYTES = 16  #: a section's entry in the frame
ALIGNMENT_BYTES = 8
INDEX_OVERHEAD = 1.03  #: of gap bytes under zstd, over the entropy of the places


class TensorRole(StrEnum):
    """What a tensor is for; it decides the rounding, and which codecs are sound."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WEIGHTS = "weights"
    REPLICA_DELTA = "replica_delta"


class Values(StrEnum):
    """How a dense run of numbers becomes bytes."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    HADAMARD4 = "hadamard4"
    INT6 = "int6"
    INT5 = "int5"
    INT3 = "int3"


class Kind(StrEnum):
    """Which of a tensor's elements, or which form of it, is sent."""

    DENSE = "dense"
    TOPK = "topk"
    ADATOPK = "adatopk"
    MASK = "mask"
    LOWRANK = "lowrank"


#: Bits of an element in each plane: more and less significant ones, the former alone where they are all.
PLANES: dict[Values, tuple[int, ...]] = {
    Values.FP8: (8,),
    Values.INT8: (8,),
    Values.INT6: (4, 2),
    Values.INT5: (4, 1),
    Values.INT4: (4,),
    Values.INT3: (2, 1),
    Values.INT2: (2,),
    Values.HADAMARD4: (4,),
}
ROUNDED = frozenset(PLANES) - {Values.FP8}
_SPARSE = frozenset({Kind.TOPK, Kind.MASK})
FACTORS = Values.INT8  #: how the factors of lowrank travel
_CHOICES = (
    "none, fp16, bf16, fp8, int8, int6, int5, int4, int3, int2, hadamard4, topk:R, adatopk:R, mask:A/B, lowrank:R"
)


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """One codec with its parameters. `name` reads back as the same codec."""

    kind: Kind = Kind.DENSE
    values: Values = Values.NONE  #: how the elements that are sent are written
    ratio: float = 1.0  #: of topk, adatopk and lowrank: raw bytes over bytes on the wire
    fraction: Fraction = Fraction(1)  #: of mask: kept elements over all
    rounding: str = "auto"  #: "auto", "nearest", "stochastic", "dither"
    threshold: str = "sampled"  #: "sampled", "exact"
    lossless: str = "auto"  #: "auto", "zstd", "plain"
    error_feedback: bool = False

    @property
    def name(self) -> str:
        """The codec's name in its shortest form."""
        if self.kind is Kind.DENSE:
            return self.values + self._options()
        if self.kind is Kind.MASK:
            head = f"mask:{self.fraction.numerator}/{self.fraction.denominator}"
        else:
            head = f"{self.kind}:{self.ratio:.10g}"
        values = f"+{self.values}" if self.kind in _SPARSE and self.values is not Values.INT8 else ""
        return head + values + self._options()

    def _options(self) -> str:
        chosen = (
            (self.rounding, "auto"),
            (self.threshold, "exact" if self.kind is Kind.ADATOPK else "sampled"),
            (self.lossless, "auto"),
        )
        text = "".join(f"+{value}" for value, default in chosen if value != default)
        return text + ("+ef" if self.error_feedback else "")

    def stochastic(self, role: TensorRole) -> bool:
        """Whether tensors of this role are rounded at random: without a bias, so that errors cancel in sums."""
        if self.values not in ROUNDED or self.rounding == "nearest":
            return False
        return self.rounding != "auto" or role in (TensorRole.GRADIENT, TensorRole.REPLICA_DELTA)


NONE = CodecSpec()


@dataclass(frozen=True, slots=True)
class CodecPair:
    """The codecs of an edge: of its values on the way forward, and of their gradients on the way back."""

    forward: CodecSpec
    backward: CodecSpec

    @property
    def name(self) -> str:
        """A name that reads back as the same pair."""
        backward = self.backward
        if backward.kind is Kind.MASK:
            backward = replace(backward, kind=Kind.DENSE, fraction=Fraction(1), threshold="sampled")
        elif self.forward == self.backward:
            return self.forward.name
        return f"{self.forward.name}/{backward.name}"

    def of(self, role: TensorRole) -> CodecSpec:
        """Return the codec of tensors with this role."""
        return self.backward if role is TensorRole.GRADIENT else self.forward


def parse_codec(text: str, field: str = "codec") -> CodecSpec:
    """Read the name of one codec; ConfigError says what is wrong with it."""
    head, *options = text.split("+")
    name, colon, argument = head.partition(":")
    if not colon and name in set(Values):
        spec = CodecSpec(values=Values(name))
    elif name == Kind.MASK:
        spec = CodecSpec(Kind.MASK, Values.INT8, fraction=_fraction(argument, text, field))
    elif name in (Kind.TOPK, Kind.ADATOPK, Kind.LOWRANK):
        kind = Kind(name)
        values = {Kind.TOPK: Values.INT8, Kind.ADATOPK: Values.NONE, Kind.LOWRANK: FACTORS}[kind]
        threshold = "exact" if kind is Kind.ADATOPK else "sampled"
        spec = CodecSpec(kind, values, _ratio(argument, text, field), threshold=threshold)
    else:
        raise ConfigError(f"{field}: {text[:40]!r} is none of {_CHOICES}")
    for option in sorted(options, key=lambda option: option not in set(Values)):  # which rounding fits depends on them
        spec = _with_option(spec, option, text, field)
    return spec


def parse_pair(text: str, field: str = "codec") -> CodecPair:
    """Read "FORWARD/BACKWARD" or one codec for both ways; ConfigError says what is wrong.

    Behind a mask the second name says how the gradient's values on the mask are written: "mask:1/8/int4".
    """
    parts = re.split(r"/(?=[a-z])", text)
    if len(parts) > 2:
        raise ConfigError(f"{field}: {text[:40]!r} has {len(parts)} parts; allowed are FORWARD/BACKWARD, or one codec")
    forward = parse_codec(parts[0], field)
    if forward.error_feedback:
        raise ConfigError(
            f"{field}: {text[:40]!r} asks for error feedback on activations, where it adds other samples' errors; "
            f"write it for gradients only, as in int8/int8+ef"
        )
    if forward.kind is Kind.MASK:
        return CodecPair(forward, _on_mask(forward, parts[1] if len(parts) == 2 else str(Values.INT4), text, field))
    backward = parse_codec(parts[1], field) if len(parts) == 2 else forward
    if backward.kind is Kind.MASK:
        raise ConfigError(f"{field}: {text[:40]!r} has a mask on the way back only; the way forward chooses it")
    return CodecPair(forward, backward)


def _on_mask(forward: CodecSpec, backward: str, text: str, field: str) -> CodecSpec:
    spec = parse_codec(backward, field)
    if spec.kind is Kind.MASK and spec.fraction == forward.fraction:
        return spec
    if spec.kind is not Kind.DENSE or spec.error_feedback:
        raise ConfigError(
            f"{field}: {text[:40]!r}: the gradient of a mask is sent as values on the mask, "
            f"without error feedback; allowed behind it are {', '.join(Values)}"
        )
    return replace(spec, kind=Kind.MASK, fraction=forward.fraction)


def _ratio(argument: str, text: str, field: str) -> float:
    try:
        ratio = float(argument)
    except ValueError:
        ratio = 0.0
    if not isfinite(ratio) or not 1.0 <= ratio <= MAX_RATIO:
        raise ConfigError(f"{field}: {text[:40]!r} needs a ratio of 1 to {MAX_RATIO:.0f}, such as topk:100")
    return ratio


def _fraction(argument: str, text: str, field: str) -> Fraction:
    found = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", argument)
    if found is None or not int(found[1]) <= int(found[2]) <= MAX_DENOMINATOR:
        raise ConfigError(f"{field}: {text[:40]!r} needs a fraction up to 1 of whole numbers, such as mask:1/8")
    return Fraction(int(found[1]), int(found[2]))


def _with_option(spec: CodecSpec, option: str, text: str, field: str) -> CodecSpec:
    allowed = {"zstd", "plain"}
    if spec.values in ROUNDED and spec.kind is not Kind.LOWRANK:
        allowed |= {"nearest", "stochastic"} | ({"dither"} if spec.kind is Kind.DENSE else set())
    if spec.kind in _SPARSE:
        allowed |= {"exact", "sampled", *Values}
    if spec.kind is not Kind.MASK and spec != NONE:
        allowed.add("ef")
    if option not in allowed:
        raise ConfigError(f"{field}: {text[:40]!r}: option {option[:20]!r} is none of {', '.join(sorted(allowed))}")
    if option in ("zstd", "plain"):
        return replace(spec, lossless=option)
    if option in ("nearest", "stochastic", "dither"):
        return replace(spec, rounding=option)
    if option in ("exact", "sampled"):
        return replace(spec, threshold=option)
    if option == "ef":
        return replace(spec, error_feedback=True)
    return replace(spec, values=Values(option))


def adatopk_kept_one_in(ratio: float, link_s: float, slowest_link_s: float) -> float:
    """Return r_link = max(1, 3 r R_link / max R) of AdaTopK: a link keeps one element in that many.

    R is the time that a link's raw values take. The 3 stands for an index of 8 bytes beside each value of 4.
    """
    if slowest_link_s <= 0:
        return 1.0
    return max(1.0, 3.0 * ratio * link_s / slowest_link_s)


def adatopk_on_link(ratio: float, link_s: float, slowest_link_s: float) -> CodecSpec:
    """Return the codec that AdaTopK gives to one link; where its entries would cost more than all elements, none."""
    on_wire = adatopk_kept_one_in(ratio, link_s, slowest_link_s) / 3.0
    return CodecSpec(Kind.ADATOPK, ratio=on_wire, threshold="exact") if on_wire > 1.0 else NONE


#: Raw float32 bytes per second of one thread, (encode, decode), the slower way of both models of `benchmarks.codecs`.
_VALUE_SPEEDS = {
    Values.NONE: (3.4e9, 4.6e9),
    Values.FP16: (3.7e9, 5.0e9),
    Values.BF16: (5.2e9, 5.7e9),
    Values.FP8: (2.3e9, 4.3e9),
    Values.INT8: (2.1e9, 6.2e9),
    Values.INT6: (1.3e9, 2.7e9),
    Values.INT5: (1.4e9, 2.4e9),
    Values.INT4: (2.2e9, 5.1e9),
    Values.INT3: (1.4e9, 2.2e9),
    Values.INT2: (2.0e9, 4.6e9),
    Values.HADAMARD4: (1.1e9, 1.8e9),
}
_KIND_SPEEDS = {
    Kind.TOPK: (1.0e9, 2.7e9),
    Kind.ADATOPK: (1.4e9, 10e9),
    Kind.MASK: (0.9e9, 1.8e9),
    Kind.LOWRANK: (0.6e9, 1.8e9),
}


#: Seconds that one thread takes for a message however small it is, (encode, decode): tensors of 4 KB, as above.
_MESSAGE_S, _CONVERSION_MESSAGE_S = (2.0e-4, 1.5e-4), (3.0e-5, 3.0e-5)


def message_s(spec: CodecSpec) -> tuple[float, float]:
    """Return the seconds that encoding and decoding take at the least, as measured on one machine."""
    if spec.kind is Kind.DENSE and spec.values in (Values.NONE, Values.FP16, Values.BF16):
        return _CONVERSION_MESSAGE_S
    return _MESSAGE_S


def speeds(spec: CodecSpec) -> tuple[float, float]:
    """Return raw float32 bytes per second that one thread encodes and decodes, as measured on one machine."""
    return _KIND_SPEEDS.get(spec.kind) or _VALUE_SPEEDS[spec.values]


# Sizes


def value_sections(values: Values, count: int, item_bytes: int) -> tuple[int, ...]:
    """Return the bytes of each part that `count` values become; `item_bytes` is the size of one as it is."""
    if values is Values.NONE:
        return (count * item_bytes,)
    if values is Values.FP16:
        return (2 * count, 4)
    if values is Values.BF16:
        return (2 * count,)
    blocks = -(-count // BLOCK)
    return (*(blocks * BLOCK * bits // 8 for bits in PLANES[values]), 2 * blocks)


def frame_bytes(sections: tuple[int, ...]) -> int:
    """Return the size of a frame with these sections, before any zstd."""
    return HEADER_BYTES + sum(SECTION_BYTES + aligned(size) for size in sections)


def aligned(size: int) -> int:
    """Return `size`, rounded up to where the next section starts."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def largest_frame_bytes(tensor: TensorSpec) -> int:
    """Return the most that a frame of this tensor can have, whatever the codec: what does not pay goes as it is."""
    return frame_bytes((tensor.bytes,))


def kept_elements(spec: CodecSpec, elements: int, item_bytes: int) -> int:
    """Return how many elements a sparse codec aims to keep; `elements` where all of them fit."""
    if spec.kind is Kind.MASK:
        return min(elements, max(1, round(elements * spec.fraction))) if elements else 0
    if spec.kind is Kind.ADATOPK:
        return max(1, int(elements / max(1.0, 3.0 * spec.ratio))) if elements else 0
    share = _kept_share(8 * item_bytes / spec.ratio, _bits_per_value(spec.values, item_bytes))
    return min(elements, max(1, round(elements * share))) if elements else 0


def lowrank_rank(spec: CodecSpec, tensor: TensorSpec) -> int:
    """Return the rank whose factors fit into the ratio, at least 1."""
    rows, columns = matrix_shape(tensor.shape)
    per_rank = (rows + columns) * _bits_per_value(FACTORS, 4) / 8
    return max(1, min(rows, columns, int(tensor.bytes / spec.ratio / per_rank)))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns): the shape cut in two where the factors of a given rank are smallest."""
    best = (1, TensorSpec("float32", shape).elements)
    rows = 1
    for size in shape:
        rows *= size
        columns = best[0] * best[1] // rows if rows else 0
        if rows + columns < sum(best):
            best = (rows, columns)
    return best


def size_bytes(spec: CodecSpec, tensor: TensorSpec, role: TensorRole = TensorRole.ACTIVATION) -> int:
    """Return the bytes of a contiguous tensor's frame.

    Exact for dense codecs and lowrank without zstd, which can only make it smaller; an estimate where places are sent.
    """
    raw = frame_bytes((tensor.bytes,))
    if tensor.dtype not in FLOATS or not tensor.elements:
        return raw
    return min(raw, frame_bytes(_sections(spec, tensor, role)))


def ratio(spec: CodecSpec, dtype: str = "float32", role: TensorRole = TensorRole.ACTIVATION) -> float:
    """Return raw bytes over bytes on the wire, of a tensor of a million elements."""
    tensor = TensorSpec(dtype, (1024, 1024))
    return tensor.bytes / size_bytes(spec, tensor, role)


def _sections(spec: CodecSpec, tensor: TensorSpec, role: TensorRole) -> tuple[int, ...]:
    elements, item = tensor.elements, DTYPE_BYTES[tensor.dtype]
    if spec.kind is Kind.LOWRANK:
        rank = lowrank_rank(spec, tensor)
        return tuple(part for side in matrix_shape(tensor.shape) for part in value_sections(FACTORS, rank * side, 4))
    if spec.kind is Kind.DENSE:
        return value_sections(spec.values, elements, item)
    kept = kept_elements(spec, elements, item)
    if spec.kind is Kind.ADATOPK:
        return (8 * kept, *value_sections(spec.values, kept, item))
    values = value_sections(spec.values, kept, item)
    if kept == elements or (spec.kind is Kind.MASK and role is TensorRole.GRADIENT):
        return values
    return (_index_bytes(kept, elements), *values)


def _index_bytes(kept: int, elements: int) -> int:
    return int(INDEX_OVERHEAD * _entropy_bits(kept / elements) * elements / 8) + 1 if kept else 0


def _entropy_bits(share: float) -> float:
    if not 0.0 < share < 1.0:
        return 0.0
    return -share * log2(share) - (1 - share) * log2(1 - share)


def _bits_per_value(values: Values, item_bytes: int) -> float:
    return 8 * sum(value_sections(values, 1 << 16, item_bytes)) / (1 << 16)


def _kept_share(bits: float, value_bits: float) -> float:
    """Return the share of elements whose values and places cost `bits` per element of the tensor."""
    if value_bits <= bits:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        cost = middle * value_bits + INDEX_OVERHEAD * _entropy_bits(middle)
        low, high = (middle, high) if cost <= bits else (low, middle)
    return low
