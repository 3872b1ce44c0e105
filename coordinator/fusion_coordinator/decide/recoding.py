"""Whether a running job's links should change their codecs. Pure: choices and the memory of earlier looks in, out.

For each link and way there are two choices by the planner's own model, under what was measured: the mildest codecs that
do, and the mildest that would do if all links were slower by a margin. A link keeps a codec between the two, and takes
the nearer one otherwise, after several looks in a row and not soon after the last change: so noise changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.base.errors import ConfigError
from fusion.base.units import format_rate
from fusion.compress.catalog import parse_codec
from fusion.compress.linkcodecs import Link, LinkCodecs
from fusion.plan.codecs import PlanCodec

SLOWER = 0.7  #: of what was measured: a link's rate, for the stronger of the two choices


@dataclass(frozen=True, slots=True)
class Limits:
    """When a change is allowed."""

    wins: int = 2  #: looks in a row that must want a change
    hold_off_s: float = 20.0  #: after the plan came into force, or the last change


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of a job between two looks."""

    changed_s: float  #: monotonic
    wins: int = 0


@dataclass(frozen=True, slots=True)
class Choices:
    """What the planner's model says of a job's links now."""

    present: Mapping[Link, PlanCodec]
    least: Mapping[Link, PlanCodec]  #: under what was measured
    most: Mapping[Link, PlanCodec]  #: if links were slower, by SLOWER
    rate_bytes_per_s: Mapping[Link, float]
    present_s: float  #: of a step, by the model
    least_s: float


def wanted(choices: Choices) -> dict[Link, PlanCodec]:
    """Return the links that should have another codec, and which."""
    found = {}
    for link, present in choices.present.items():
        least, most = choices.least[link], choices.most[link]
        if present.ratio < least.ratio:
            found[link] = least
        elif present.ratio > most.ratio:
            found[link] = most
    if not _fits({**choices.present, **found}):  # a mask goes both ways or not at all
        found = {link: codec for link, codec in choices.least.items() if codec != choices.present[link]}
    return found


def _fits(codecs: Mapping[Link, PlanCodec]) -> bool:
    try:
        LinkCodecs(links={link: parse_codec(codec.name) for link, codec in codecs.items()}).check()
    except ConfigError:
        return False
    return True


def judge(choices: Choices, memory: Memory, now_s: float, limits: Limits) -> tuple[dict[Link, PlanCodec], Memory]:
    """Return the links that change their codecs now, and what to remember until the next look."""
    found = wanted(choices)
    if not found:
        return {}, replace(memory, wins=0)
    memory = replace(memory, wins=memory.wins + 1)
    if memory.wins < limits.wins or now_s < memory.changed_s + limits.hold_off_s:
        return {}, memory
    return found, Memory(now_s)


def reason(choices: Choices, found: Mapping[Link, PlanCodec]) -> str:
    """Return in one line what changes and why."""
    parts = []
    for (source, target), codec in sorted(found.items()):
        before, rate = choices.present[source, target], choices.rate_bytes_per_s.get((source, target))
        speed = "unmeasured" if rate is None else format_rate(rate)
        parts.append(f"{source} -> {target} ({speed}) from {before.name} to {codec.name}")
    stronger = any(codec.ratio > choices.present[link].ratio for link, codec in found.items())
    why = "the links hold the step up" if stronger else "the links are fast enough without"
    return (
        f"{', '.join(parts)}: {why}; {choices.present_s:.3g} s per step by the model, {choices.least_s:.3g} s with it"
    )
