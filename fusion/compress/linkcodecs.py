"""Which codec each directed link uses, step by step. Without torch: planners and coordinators use it too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion.base.errors import ConfigError
from fusion.compress.catalog import NONE, CodecPair, CodecSpec, Kind

Link = tuple[int, int]  #: (source stage, target stage); values go forward on it where source < target

PLAIN = CodecPair(NONE, NONE)


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """The codecs of all links at one time: of single links, and the pair that serves the others."""

    pair: CodecPair = PLAIN
    links: Mapping[Link, CodecSpec] = field(default_factory=dict)

    def of(self, source: int, target: int) -> CodecSpec:
        """Return the codec of what goes from one stage to another."""
        return self.links.get((source, target)) or (self.pair.forward if source < target else self.pair.backward)

    def changed(self, links: Mapping[Link, CodecSpec]) -> LinkCodecs:
        """Return the codecs with those of some links replaced."""
        return LinkCodecs(self.pair, {**self.links, **links})

    def check(self, field: str = "codecs") -> None:
        """Raise ConfigError unless each mask has the way back that belongs to it, and no other way back has one."""
        for source, target in sorted({(min(link), max(link)) for link in self.links}):
            there, back = self.of(source, target), self.of(target, source)
            if Kind.MASK in (there.kind, back.kind) and (there.kind, there.fraction) != (back.kind, back.fraction):
                raise ConfigError(
                    f"{field}: link {source}>{target} has {there.name!r}, the way back {back.name!r}; a mask and "
                    f"its gradient go together"
                )


@dataclass(frozen=True, slots=True)
class CodecSchedule:
    """The codecs of a run by its steps."""

    phases: tuple[tuple[int, LinkCodecs], ...] = ((1, LinkCodecs()),)  #: (first step, codecs), ascending

    @staticmethod
    def always(codecs: LinkCodecs | CodecPair) -> CodecSchedule:
        """Return the schedule that never changes."""
        return CodecSchedule(((1, codecs if isinstance(codecs, LinkCodecs) else LinkCodecs(codecs)),))

    def at(self, step: int) -> LinkCodecs:
        """Return the codecs of a step."""
        return self.phases[max(0, bisect_right(self.phases, step, key=lambda phase: phase[0]) - 1)][1]

    def changed(self, from_step: int, links: Mapping[Link, CodecSpec]) -> CodecSchedule:
        """Return the schedule in which these links have these codecs from a step on, whatever it said of them."""
        before = tuple(phase for phase in self.phases if phase[0] < from_step)
        later = tuple((step, codecs.changed(links)) for step, codecs in self.phases if step > from_step)
        return CodecSchedule((*before, (from_step, self.at(from_step).changed(links)), *later))
