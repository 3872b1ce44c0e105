"""Codecs as a planner sees them, by ratio and speed, and what a job may ask for.

COMPRESSION = PHASE { " " PHASE }
PHASE       = CHOICE { "," SOURCE ">" TARGET "=" CODEC } [ "@" START ]
CHOICE      = "auto" [ ":" R ] | "adatopk:" R | CODEC [ "/" CODEC ]      codecs as in `fusion.compress.catalog`
START       = STEP | SHARE "%"                                           the first phase begins with the run

auto          for each link and way the mildest codec of AUTO_PAIRS that takes the link off the critical path; R is the
              largest ratio of a pair of codecs, both ways together, that may be used. Alone, "auto:R" is short for
              "auto:R auto:6.7@70%": what is stronger ends early enough for its loss to be made up for; "auto" alone is
              "auto:11.3". In phases it stands for "auto:6.7"
adatopk:R     each link compressed by its share of the slowest link's time, which gets R, as the FusionLLM paper has it
int8/int4     these codecs on every link, forward and backward
1>0=int4      this codec from stage 1 to stage 0, whatever the rest says
@70%          this phase begins when 70 % of the steps are done; @120: with step 120
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from fusion.base.errors import ConfigError
from fusion.base.ids import StageIndex
from fusion.compress import catalog
from fusion.compress.catalog import CodecPair, CodecSpec, Kind, TensorRole, parse_codec, parse_pair
from fusion.compress.linkcodecs import PLAIN, CodecSchedule, Link, LinkCodecs
from fusion.plan.types import CodecChange, Plan

MAX_PHASES = 64
MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class PlanCodec:
    """A codec's cost. Speeds are of the raw bytes, one thread; each message costs some time more, however small."""

    name: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_message_s: float = 0.0
    decode_message_s: float = 0.0

    @property
    def encode_s_per_byte(self) -> float:
        """Seconds to encode a raw byte."""
        return 1.0 / self.encode_bytes_per_s

    @property
    def decode_s_per_byte(self) -> float:
        """Seconds to decode to a raw byte."""
        return 1.0 / self.decode_bytes_per_s


NONE = PlanCodec("none", 1.0, inf, inf)  #: elements as they are, without a frame


def plan_codec(spec: CodecSpec, role: TensorRole = TensorRole.ACTIVATION) -> PlanCodec:
    """Return what a codec costs: the ratio of a float32 tensor of a million elements, and measured times."""
    if spec == catalog.NONE:
        return NONE
    return PlanCodec(spec.name, catalog.ratio(spec, role=role), *catalog.speeds(spec), *catalog.message_s(spec))


@dataclass(frozen=True)
class Ladder:
    """Codecs that links may choose from, mildest first: at each level one for the way forward and one for the way back.

    A link may take different levels for its two ways, unless a mask is at one of them.
    """

    forward: tuple[PlanCodec, ...]
    backward: tuple[PlanCodec, ...]
    joined: tuple[bool, ...]  #: by level: whether both ways go together

    @staticmethod
    def of(*pairs: CodecPair) -> Ladder:
        """Return the ladder of these pairs."""
        return Ladder(
            tuple(plan_codec(pair.forward) for pair in pairs),
            tuple(plan_codec(pair.backward, TensorRole.GRADIENT) for pair in pairs),
            tuple(pair.forward.kind is Kind.MASK for pair in pairs),
        )

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def both(self) -> tuple[PlanCodec, ...]:
        """All codecs: the forward ones, then the backward ones."""
        return self.forward + self.backward

    def upto(self, level: int) -> Ladder:
        """Return the ladder up to and with a level."""
        return Ladder(self.forward[: level + 1], self.backward[: level + 1], self.joined[: level + 1])


def pair_ratio(pair: CodecPair) -> float:
    """Return raw bytes over bytes on the wire, of values and their gradients together, to one digit."""
    there = plan_codec(pair.forward).ratio
    back = plan_codec(pair.backward, TensorRole.GRADIENT).ratio
    return round(2.0 / (1.0 / there + 1.0 / back), 1)


#: What "auto" chooses from, mildest first. The forward way keeps more bits: losing them there costs more of the loss.
#: Gradients are rounded at random: rounded to the nearest of few levels they ruin a ResNet.
AUTO_PAIRS = tuple(
    parse_pair(text)
    for text in ("none", "bf16", "int8", "int8/int4+dither", "int6/int3+dither", "mask:3/8", "mask:1/4", "mask:1/8")
)
#: Ratio of the strongest pair that "auto" uses by itself, mask:3/8, until AUTO_MILD_FROM of the steps are done, and of
#: the strongest one from then on, int6/int3+dither. `benchmarks.convergence` measured the loss of the weights as served
#: at -0.3 +- 0.3 % (GPT, three seeds) and -0.7 +- 1.1 % (ResNet, five) from the uncompressed run's, 11 times fewer
#: bytes; with mask:1/4 it was 0.3 % and 1.8 +- 1.4 %. See docs/compression.md.
AUTO_CEILING, AUTO_MILD_CEILING, AUTO_MILD_FROM = 11.3, 6.7, 0.7
PLAIN_LADDER = Ladder.of(PLAIN)


@dataclass(frozen=True, slots=True)
class Compression:
    """What a job wants of the codecs at one time."""

    kind: Literal["fixed", "adatopk", "auto"] = "fixed"
    pair: CodecPair = PLAIN  #: of "fixed"
    ratio: float = 1.0  #: of adatopk; the strongest that auto may use
    links: Mapping[Link, CodecSpec] = field(default_factory=dict)  #: of single links, whatever the rest says

    def ladder(self) -> Ladder:
        """Return the codecs that the planner may choose from, mildest first."""
        if self.kind == "auto":
            return Ladder.of(*(pair for pair in AUTO_PAIRS if pair_ratio(pair) <= self.ratio))
        return Ladder.of(self.pair)


@dataclass(frozen=True, slots=True)
class Phase:
    """What a job wants from some point of the run on."""

    compression: Compression
    from_step: int = 1
    from_share: float | None = None  #: of all steps, instead of a step

    def begins(self, steps: int) -> int:
        """Return the first step of the phase in a run of so many."""
        return self.from_step if self.from_share is None else min(steps, int(self.from_share * steps)) + 1


def parse_compression(text: str, field: str = "compression") -> tuple[Phase, ...]:
    """Return the phases of a text as in this module's description; ConfigError says in one line what is wrong."""
    words = text.split()
    if not words or len(words) > MAX_PHASES or len(text) > MAX_TEXT:
        raise ConfigError(f"{field}: {len(words)} phases in {len(text)} characters; allowed are 1 to {MAX_PHASES}")
    phases = tuple(_phase(word, field) for word in words)
    if len(words) == 1:
        phases = _annealed(phases[0], default=words[0].partition(",")[0] == "auto")
    if phases[0] != Phase(phases[0].compression):
        raise ConfigError(f"{field}: the first phase of {text[:60]!r} begins with the run and takes no @START")
    for before, after in pairwise(phases):
        mixed = (before.from_share is None) != (after.from_share is None) and before is not phases[0]
        if mixed or (before.from_share or 0.0, before.from_step) >= (after.from_share or 0.0, after.from_step):
            raise ConfigError(
                f"{field}: the phases of {text[:60]!r} must begin one after the other, "
                f"all with @STEP or all with @SHARE%"
            )
    return phases


def _annealed(phase: Phase, default: bool) -> tuple[Phase, ...]:
    """Return the phases of a whole run for which a job says no more than "auto" or "auto:R"."""
    wanted = phase.compression
    if wanted.kind != "auto" or phase != Phase(wanted):
        return (phase,)
    first = replace(wanted, ratio=AUTO_CEILING) if default else wanted
    if first.ratio <= AUTO_MILD_CEILING:
        return (Phase(first),)
    return (Phase(first), Phase(replace(wanted, ratio=AUTO_MILD_CEILING), from_share=AUTO_MILD_FROM))


def _phase(word: str, field: str) -> Phase:
    head, at, start = word.partition("@")
    choice, *links = head.split(",")
    compression = _choice(choice, field)
    found = dict(_link(item, word, field) for item in links)
    compression = Compression(compression.kind, compression.pair, compression.ratio, found)
    if compression.kind == "fixed":
        LinkCodecs(compression.pair, found).check(field)
    if not at:
        return Phase(compression)
    if share := re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)%", start):
        return Phase(compression, from_share=float(share[1]) / 100)
    if not re.fullmatch(r"[1-9][0-9]{0,9}", start) or int(start) < 2:
        raise ConfigError(f"{field}: {word[:60]!r} begins at {start[:20]!r}; allowed are steps from 2, and 0% to 99.9%")
    return Phase(compression, from_step=int(start))


def _choice(text: str, field: str) -> Compression:
    kind, colon, argument = text.partition(":")
    if text == "auto":
        return Compression("auto", ratio=AUTO_MILD_CEILING)
    if kind == "auto" and colon:
        try:
            ratio = float(argument)
        except ValueError:
            ratio = 0.0
        if not isfinite(ratio) or not 1.0 <= ratio <= catalog.MAX_RATIO:
            raise ConfigError(f"{field}: {text[:40]!r} needs a ratio of 1 to {catalog.MAX_RATIO:.0f}, such as auto:8")
        return Compression("auto", ratio=ratio)
    try:
        pair = parse_pair(text, field)
    except ConfigError as error:
        if "is none of" in str(error):
            raise ConfigError(f"{error}, or auto, auto:R") from None
        raise
    if pair.forward.kind is Kind.ADATOPK and pair.forward == pair.backward == parse_codec(f"adatopk:{argument}"):
        return Compression("adatopk", ratio=pair.forward.ratio)
    return Compression("fixed", pair)


def _link(item: str, word: str, field: str) -> tuple[Link, CodecSpec]:
    found = re.fullmatch(r"([0-9]{1,4})>([0-9]{1,4})=(.+)", item)
    if found is None or found[1] == found[2]:
        raise ConfigError(f"{field}: {item[:40]!r} in {word[:60]!r} is not SOURCE>TARGET=CODEC, such as 1>0=int4")
    link, spec = (int(found[1]), int(found[2])), parse_codec(found[3], field)
    if spec.error_feedback and link[0] < link[1]:
        raise ConfigError(f"{field}: {item[:40]!r} asks for error feedback on activations; write it for gradients only")
    return link, spec


def adatopk_ratio(ratio: float, link_s: float, slowest_link_s: float) -> float:
    """Return by how much AdaTopK shrinks the bytes of a link whose raw values take `link_s`; 1 where it does not."""
    return max(1.0, catalog.adatopk_kept_one_in(ratio, link_s, slowest_link_s) / 3.0)


def schedule_without_links(text: str, steps: int) -> CodecSchedule:
    """Return the codecs of a run whose links are all alike and free, as in one process: "auto" uses none there.

    ConfigError as `parse_compression`.
    """
    first, *later = parse_compression(text)
    found = CodecSchedule(_codecs_of(first.compression))
    for phase in later:
        found = found.changed(phase.begins(steps), _codecs_of(phase.compression))
    return found


def _codecs_of(wanted: Compression) -> LinkCodecs:
    if wanted.kind != "adatopk":
        return LinkCodecs(wanted.pair, wanted.links)
    codec = catalog.adatopk_on_link(wanted.ratio, 1.0, 1.0)
    return LinkCodecs(CodecPair(codec, codec), wanted.links)


# ---- of a plan ----


def codec_schedule(plan: Plan) -> CodecSchedule:
    """Return which codec each link of a plan uses at each step. ConfigError: a mask without its way back."""
    links = ((item.source, item.target, item.codec) for item in plan.links)
    found = CodecSchedule.always(LinkCodecs(links=_specs(links)))
    for change in plan.codec_changes:
        found = found.changed(change.from_step, _specs(change.links))
    for codecs in found.tables:
        codecs.check()
    return found


def plan_with_change(plan: Plan, from_step: int, links: Sequence[tuple[StageIndex, StageIndex, str]]) -> Plan:
    """Return a plan of which some links have other codecs from a step on, until a later change names them."""
    changes = {change.from_step: {link[:2]: link for link in change.links} for change in plan.codec_changes}
    at_once = changes.setdefault(from_step, {})
    at_once |= {link[:2]: link for link in links}
    ordered = (CodecChange(step, tuple(changes[step].values())) for step in sorted(changes))
    return replace(plan, codec_changes=tuple(ordered))


def plan_at(plan: Plan, step: int) -> Plan:
    """Return a plan as it is in one step: its links with the codecs that they have then."""
    now = codec_schedule(plan).at(step)
    links = (
        replace(link, codec=codec.name, ratio=codec.ratio)
        for link in plan.links
        for codec in (link_codec(now.of(link.source, link.target).name, link.source, link.target),)
    )
    return replace(plan, links=tuple(links), codec_changes=())


def plan_with_codecs_of(plan: Plan, other: Plan) -> Plan:
    """Return a plan with the codecs of another one that has the same cuts, at the same steps; else as it is."""
    if [stage.first_operator for stage in plan.stages] != [stage.first_operator for stage in other.stages]:
        return plan
    known = {(link.source, link.target): link for link in other.links}
    links = tuple(
        replace(link, codec=same.codec, ratio=same.ratio)
        for link in plan.links
        for same in (known.get((link.source, link.target), link),)
    )
    return replace(plan, links=links, codec_changes=other.codec_changes)


def compression_text(plan: Plan) -> str:
    """Return what a job with the same cuts is given as `compression` to use a plan's codecs at the same steps."""

    def links(codecs: Iterable[tuple[int, int, str]]) -> str:
        return ",".join(["none", *(f"{source}>{target}={codec}" for source, target, codec in codecs)])

    now = {(link.source, link.target): link.codec for link in plan.links if link.codec != "none"}
    text = [links((*link, codec) for link, codec in now.items())]
    for change in plan.codec_changes:
        now |= {(source, target): codec for source, target, codec in change.links}
        phase = links((*link, codec) for link, codec in now.items() if codec != "none")
        text.append(f"{phase}@{change.from_step}")
    return " ".join(text)


def link_codec(name: str, source: int, target: int) -> PlanCodec:
    """Return what the codec of a plan's link costs; what a later release names costs nothing known."""
    try:
        spec = parse_codec(name)
    except ConfigError:
        return NONE
    return plan_codec(spec, TensorRole.ACTIVATION if source < target else TensorRole.GRADIENT)


def _specs(links: Iterable[tuple[StageIndex, StageIndex, str]]) -> dict[Link, CodecSpec]:
    found = {(int(source), int(target)): parse_codec(codec) for source, target, codec in links}
    masks = {link: spec for link, spec in found.items() if spec.kind is Kind.MASK}
    return {link[::-1]: spec for link, spec in masks.items()} | found  # a way back that nothing is sent on has no link
