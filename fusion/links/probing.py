"""What to measure next. Cheap: latency first, then goodput between sites and to each site's representative.

All pairs are measured only in small clusters. A pair costs a few pings and at most a few megabytes, and no node takes
part in two measurements of goodput at a time, which would share its connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from fusion.base.units import KIB, MIB
from fusion.links.book import LinkBook
from fusion.links.estimate import LinkRecord
from fusion.links.sites import infer_sites

FIRST_BYTES, LEAST_BYTES, MOST_BYTES = 256 * KIB, 64 * KIB, 4 * MIB
PROBE_S = 0.3  #: how long a measurement of goodput should take, one way
ROUND_TRIPS = 4.0  #: of data beyond that, which a connection has on its way while it comes up to speed
ALL_PAIRS_NODES = 16  #: in clusters up to this size every pair is measured
REFRESH_S = 600.0  #: what no transfer has refreshed for that long is measured again
RETRY_S = (2.0, 60.0, 300.0)  #: after the first failure to connect, the second, and any later one


@dataclass(frozen=True, slots=True)
class ProbeWish:
    """`source` shall dial `target`. `size_bytes` each way; 0: only the round trip."""

    source: str
    target: str
    size_bytes: int


_Wish = Callable[[str, str], ProbeWish | None]


def probe_size(rate_bytes_per_s: float, round_trip_s: float = 0.0) -> int:
    """Return how many bytes to send over a link that is believed to have this goodput; 0: nothing is known.

    A connection needs several round trips to come up to speed, and as long again to show it.
    """
    if rate_bytes_per_s <= 0:
        return FIRST_BYTES
    wanted = int(rate_bytes_per_s * (PROBE_S + ROUND_TRIPS * round_trip_s)) // LEAST_BYTES * LEAST_BYTES
    return min(MOST_BYTES, max(LEAST_BYTES, wanted))


def next_probes(
    book: LinkBook, nodes: Sequence[str], answering: Collection[str], engaged: Collection[str], now_s: float
) -> list[ProbeWish]:
    """Return what to measure now, each node at most once: the most useful first.

    `nodes` in an order that does not change, all of which can dial; only those in `answering` (they train nothing)
    answer at the moment. `engaged` are taking part in a measurement already.
    """
    search = _Search(book, nodes, answering, now_s)
    taken = set(engaged)
    found = []
    for wish in search.wishes():
        if wish.source not in taken and wish.target not in taken:
            taken |= {wish.source, wish.target}
            found.append(wish)
    return found


def all_measured(book: LinkBook, nodes: Sequence[str], answering: Collection[str], now_s: float) -> bool:
    """Whether nothing is left to be measured for the first time."""
    return next(_Search(book, nodes, answering, now_s).first_time(), None) is None


class _Search:
    """The pairs worth a measurement, in order."""

    def __init__(self, book: LinkBook, nodes: Sequence[str], answering: Collection[str], now_s: float) -> None:
        self._book, self._nodes, self._answering, self._now_s = book, list(nodes), set(answering), now_s
        self._site = infer_sites(self._nodes, lambda a, b: book.record(a, b).round_trip_s)
        self._heads = [node for node, head in self._site.items() if node == head]

    def wishes(self) -> Iterator[ProbeWish]:
        yield from self.first_time()
        yield from self._refresh()

    def first_time(self) -> Iterator[ProbeWish]:
        """Places first; then what a plan needs most; then the rest, and the other way of connecting."""
        for node in self._nodes:
            if self._site[node] is None:
                yield from self._each(((node, head) for head in self._heads), self._place)
        yield from self._each(self._pairs(), self._rate)
        yield from self._each(self._pairs(), self._other_way)

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Pairs of representatives, each node and its own; in a small cluster then all others."""
        for index, one in enumerate(self._heads):
            for other in self._heads[index + 1 :]:
                yield one, other
        for node, head in self._site.items():
            if head is not None and node != head:
                yield head, node
        if len(self._nodes) <= ALL_PAIRS_NODES:
            for index, one in enumerate(self._nodes):
                for other in self._nodes[index + 1 :]:
                    if not {one, other} <= set(self._heads) and one != self._site[other] and other != self._site[one]:
                        yield one, other

    def _each(self, pairs: Iterator[tuple[str, str]], wish: _Wish) -> Iterator[ProbeWish]:
        for one, other in pairs:
            found = wish(one, other)
            if found is not None:
                yield found

    def _place(self, one: str, other: str) -> ProbeWish | None:
        if self._book.record(one, other).round_trip_s is not None:
            return None
        return self._dial(one, other, 0)

    def _rate(self, one: str, other: str) -> ProbeWish | None:
        """Measure until a probe was as long as it should be for what it found."""
        there, back = self._book.record(one, other), self._book.record(other, one)
        rates = [record.rate_bytes_per_s for record in (there, back) if record.rates]
        round_trip_s = self._book.record(one, other).round_trip_s or self._book.record(other, one).round_trip_s
        size = probe_size(max(rates, default=0.0), round_trip_s or 0.0)
        if len(rates) == 2 and (2 * min(there.probe_bytes, back.probe_bytes) >= size or self._transferred(there, back)):
            return None
        return self._dial(one, other, size)

    @staticmethod
    def _transferred(*records: LinkRecord) -> bool:
        """Whether real transfers have given more samples than the first probe."""
        return all(len(record.rates) > 2 for record in records)

    def _other_way(self, one: str, other: str) -> ProbeWish | None:
        """A stage dials whomever it sends to; so both must get through."""
        for source, target in ((one, other), (other, one)):
            record = self._book.record(source, target)
            untried = record.dialled_s is None or record.failures
            if untried and target in self._answering and self._due(source, target):
                return ProbeWish(source, target, 0)
        return None

    def _dial(self, one: str, other: str, size: int) -> ProbeWish | None:
        """Let either dial the other: whoever is answered, and was not refused lately."""
        ways = [(one, other), (other, one)]
        for source, target in sorted(ways, key=lambda way: (self._book.record(*way).failures, self._relayed(way))):
            if target in self._answering and self._due(source, target):
                return ProbeWish(source, target, size)
        return None

    def _relayed(self, way: tuple[str, str]) -> bool:
        return self._book.record(*way).relayed

    def _due(self, source: str, target: str) -> bool:
        record = self._book.record(source, target)
        if not record.failures or record.dialled_s is None:
            return True
        pause_s = RETRY_S[min(record.failures, len(RETRY_S)) - 1]
        return self._now_s - record.dialled_s >= pause_s

    def _refresh(self) -> Iterator[ProbeWish]:
        old = []
        for order, (one, other) in enumerate(self._pairs()):
            there, back = self._book.record(one, other), self._book.record(other, one)
            measured_s = min(there.measured_s, back.measured_s)
            dialled_s = max(there.dialled_s or measured_s, back.dialled_s or measured_s)
            if self._now_s - measured_s >= REFRESH_S and self._now_s - dialled_s >= RETRY_S[-1]:
                old.append((measured_s, order, one, other))
        for _, _, one, other in sorted(old):
            size = probe_size(max(self._book.record(*way).rate_bytes_per_s for way in ((one, other), (other, one))))
            found = self._dial(one, other, size)
            if found is not None:
                yield found
