"""Which codec each directed link uses, step by step. Without torch: planners and coordinators use it too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

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


@dataclass(frozen=True)
class CodecSchedule:
    """The codecs of a run by its steps."""

    start: LinkCodecs = LinkCodecs()
    #: (first step, what changes), ascending: everything, or some links, until a later change names them
    changes: tuple[tuple[int, LinkCodecs | Mapping[Link, CodecSpec]], ...] = ()

    @staticmethod
    def always(codecs: LinkCodecs | CodecPair) -> CodecSchedule:
        """Return the schedule that never changes."""
        return CodecSchedule(codecs if isinstance(codecs, LinkCodecs) else LinkCodecs(codecs))

    @cached_property
    def _phases(self) -> tuple[list[int], list[LinkCodecs]]:
        tables = [self.start]
        for _, change in self.changes:
            tables.append(change if isinstance(change, LinkCodecs) else tables[-1].changed(change))
        return [step for step, _ in self.changes], tables

    @property
    def tables(self) -> list[LinkCodecs]:
        """The codecs of all times, in their order."""
        return self._phases[1]

    def at(self, step: int) -> LinkCodecs:
        """Return the codecs of a step."""
        steps, tables = self._phases
        return tables[bisect_right(steps, step)]

    def changed(self, from_step: int, change: LinkCodecs | Mapping[Link, CodecSpec]) -> CodecSchedule:
        """Return the schedule with one change more; of two from the same step the later one counts."""
        place = bisect_right(self.changes, from_step, key=lambda known: known[0])
        return CodecSchedule(self.start, (*self.changes[:place], (from_step, change), *self.changes[place:]))
