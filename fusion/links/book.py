"""What is known of all links of a cluster: probes and real transfers come in, estimates go out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fusion.links.estimate import LinkEstimate, LinkRecord

MAX_RATE_BYTES_PER_S = 1e12  #: nothing is faster; a report that says so is not believed
MAX_ROUND_TRIP_S = 60.0

_NOTHING = LinkRecord()


def _usable(value: float, most: float) -> bool:
    return math.isfinite(value) and 0 < value <= most


class LinkBook:
    """Records by (source, target). Nodes are named by their ids; `now_s` is monotonic.

    Figures that no network has are dropped silently: they come from other machines.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], LinkRecord] = {}

    def record(self, source: str, target: str) -> LinkRecord:
        """Return what is known of a directed link; an empty record if nothing is."""
        return self._records.get((source, target), _NOTHING)

    def measured(self) -> Iterator[tuple[tuple[str, str], LinkRecord]]:
        """Yield all links of which anything is known, in the order of their nodes' names."""
        yield from sorted(self._records.items())

    def estimate(self, source: str, target: str) -> LinkEstimate | None:
        """Return a directed link's figures, where both its goodput and its round trip were measured."""
        return self.record(source, target).estimate

    def probed(
        self,
        source: str,
        target: str,
        now_s: float,
        *,
        round_trip_s: float,
        there_bytes_per_s: float = 0.0,
        back_bytes_per_s: float = 0.0,
        probe_bytes: int = 0,
        relayed: bool = False,
    ) -> None:
        """Take a probe in which `source` dialled `target`; rates are 0 where only the round trip was measured.

        relayed: it went through the coordinator. That says nothing of a pair of which the target can dial the source:
        then the target's own connection carries both ways, and its probes measure both.
        """
        before, back = self.record(source, target), self.record(target, source)
        there = before.dialled(now_s, relayed=relayed)
        if relayed and back.direct:
            self._records[source, target] = there
            return
        if before.relayed != relayed:
            there = there.without_figures()
        if not relayed and back.relayed and not before.direct:
            back = back.without_figures()
        if _usable(round_trip_s, MAX_ROUND_TRIP_S):
            there, back = there.with_round_trip(round_trip_s), back.with_round_trip(round_trip_s)
        if _usable(there_bytes_per_s, MAX_RATE_BYTES_PER_S):
            there = there.with_rate(there_bytes_per_s, now_s, probe_bytes)
        if _usable(back_bytes_per_s, MAX_RATE_BYTES_PER_S):
            back = back.with_rate(back_bytes_per_s, now_s, probe_bytes)
        self._records[source, target], self._records[target, source] = there, back

    def called(self, source: str, target: str) -> bool:
        """Whether `source` cannot dial `target`, which dials it: one connection then carries both ways."""
        record = self.record(source, target)
        return bool(record.relayed or record.failures) and self.record(target, source).direct

    def failed(self, source: str, target: str, now_s: float, reason: str) -> None:
        """Take a probe in which `source` could not reach `target`."""
        self._records[source, target] = self.record(source, target).refused(reason, now_s)

    def transferred(self, source: str, target: str, now_s: float, count: int, busy_s: float, messages: int = 0) -> None:
        """Take what a job sent: `count` bytes in so many messages, for which the receiver was busy for `busy_s`."""
        if not math.isfinite(busy_s):
            return
        record = self.record(source, target).with_transfer(count, busy_s, now_s, messages)
        if record.rates and record.rates[-1] <= MAX_RATE_BYTES_PER_S:
            self._records[source, target] = record

    def forget(self, node: str) -> None:
        """Drop everything about a node: it has moved."""
        self._records = {pair: record for pair, record in self._records.items() if node not in pair}
