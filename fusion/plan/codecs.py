"""Codecs as a planner sees them, and what a job may ask for: ratio to the raw bytes, and the speed of both ends."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from fusion.base.errors import ConfigError

MAX_RATIO = 10_000.0


@dataclass(frozen=True, slots=True)
class PlanCodec:
    """A codec's cost. Speeds are of the raw bytes, one thread."""

    name: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    @property
    def encode_s_per_byte(self) -> float:
        """Seconds to encode a raw byte."""
        return 1.0 / self.encode_bytes_per_s

    @property
    def decode_s_per_byte(self) -> float:
        """Seconds to decode to a raw byte."""
        return 1.0 / self.decode_bytes_per_s


NONE = PlanCodec("none", 1.0, inf, inf)
#: From mild to strong: those that keep the loss. Ratios to fp32, speeds measured on one thread.
LADDER = (
    NONE,
    PlanCodec("bf16", 2.0, 25e9, 13e9),
    PlanCodec("int8", 3.9, 12e9, 8e9),
    PlanCodec("int4", 7.5, 2.3e9, 2.6e9),
)
#: The paper's codec: exact top-k is slow to find, and its values and indices are fast to scatter.
TOPK_ENCODE_BYTES_PER_S, TOPK_DECODE_BYTES_PER_S = 257e6, 25e9


def topk(ratio: float) -> PlanCodec:
    """Return the top-k codec that sends `ratio` times fewer bytes; the mildest one sends everything as it is."""
    if ratio <= 1.0:
        return NONE
    return PlanCodec(f"topk:{ratio:.4g}", ratio, TOPK_ENCODE_BYTES_PER_S, TOPK_DECODE_BYTES_PER_S)


def adatopk_ratio(ratio: float, link_s: float, slowest_link_s: float) -> float:
    """Return by how much AdaTopK shrinks the bytes of a link whose raw values take `link_s`.

    The paper keeps one value in r_link = max(1, 3 r R_link / max R), the 3 because a kept value travels with an index
    of twice its size. On the wire that leaves r on the slowest link, and never more than the raw bytes.
    """
    kept_one_in = max(1.0, 3.0 * ratio * link_s / slowest_link_s) if slowest_link_s > 0 else 1.0
    return max(1.0, kept_one_in / 3.0)


@dataclass(frozen=True, slots=True)
class Compression:
    """What a job wants of the codecs."""

    kind: Literal["none", "topk", "adatopk", "auto"]
    ratio: float = 1.0  #: of topk and adatopk; the strongest that auto may use

    def ladder(self) -> tuple[PlanCodec, ...]:
        """Return the codecs that the planner may choose from, mildest first."""
        if self.kind != "auto":
            return (NONE,)
        return tuple(codec for codec in LADDER if codec.ratio <= self.ratio)


def parse_compression(text: str, field: str = "compression") -> Compression:
    """Read "none", "topk:R", "adatopk:R", "auto" or "auto:R"; ConfigError for anything else."""
    kind, _, argument = text.partition(":")
    if kind == "none" and not argument:
        return Compression("none")
    if kind == "auto" and not argument and text == "auto":
        return Compression("auto", LADDER[-1].ratio)
    if kind in ("topk", "adatopk", "auto"):
        try:
            ratio = float(argument)
        except ValueError:
            ratio = 0.0
        if not isfinite(ratio) or not 1.0 <= ratio <= MAX_RATIO:
            raise ConfigError(f"{field}: {text[:40]!r} needs a ratio of 1 to {MAX_RATIO:.0f}, such as {kind}:100")
        if kind == "topk":
            return Compression("topk", ratio)
        return Compression("adatopk" if kind == "adatopk" else "auto", ratio)
    raise ConfigError(f"{field}: {text[:40]!r} is none of none, topk:R, adatopk:R, auto, auto:R")
