"""A cluster's links for planners: what was measured, and what follows from it for pairs that were not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fusion.links.book import LinkBook
from fusion.links.estimate import LinkEstimate
from fusion.links.sites import infer_sites

LEAST_SHARE = 0.6  #: of an idle link's goodput that is left at the least when everybody works
_WEAK = 0.8  #: of the links of its site: a node with less has a connection of its own that limits it


@dataclass(frozen=True, slots=True)
class LinkView:
    """A pair's own entry goes before the one of its sites, and that before `default`. None: they cannot connect."""

    site: Mapping[str, str]  #: of each node whose place is known, by the site's representative
    pairs: Mapping[tuple[str, str], LinkEstimate | None] = field(default_factory=dict)  #: by (source, target)
    sites: Mapping[tuple[str, str], LinkEstimate] = field(default_factory=dict)  #: by their representatives
    default: LinkEstimate | None = None  #: where nothing at all is known; None: nothing was measured anywhere

    @property
    def anything(self) -> bool:
        """Whether any link was measured."""
        return self.default is not None


def view_of(book: LinkBook, nodes: Sequence[str]) -> LinkView:
    """Return the links between `nodes`, which are in an order that does not change.

    A pair that was not measured is taken for what lies between the sites of the two, or less where a node's own
    connection to its site is slower than that. A node of which nothing is known is taken to be behind the slowest link
    that was measured: a plan must not prefer it for that.
    """
    inside = set(nodes)
    pairs: dict[tuple[str, str], LinkEstimate | None] = {}
    for pair, record in book.measured():
        if inside.issuperset(pair):
            if record.absent and not (book.called(*pair) and record.estimate):
                pairs[pair] = None
            elif record.estimate is not None:
                pairs[pair] = record.estimate
    place = infer_sites(nodes, lambda a, b: book.record(a, b).round_trip_s)
    site = {node: head for node, head in place.items() if head is not None}
    known = [link for link in pairs.values() if link is not None]
    if not known:
        return LinkView(site, pairs)
    default = LinkEstimate(min(link.rate_bytes_per_s for link in known), max(link.round_trip_s for link in known))
    sites = _between_sites(site, pairs)
    _limit_weak_nodes(site, pairs, sites, default)
    return LinkView(site, pairs, sites, default)


def under_load(view: LinkView, book: LinkBook) -> LinkView:
    """Return the view for comparing links in use with idle ones, which were measured while nobody worked.

    What a link carries while its ends compute is less than what a probe found. The usual share of the links in use is
    taken off the others too, within bounds; else they would always look better.
    """
    shares = [
        record.rate_bytes_per_s / record.probed_bytes_per_s
        for pair, record in book.measured()
        if view.pairs.get(pair) is not None and record.loaded and record.probed_bytes_per_s > 0
    ]
    share = min(1.0, max(LEAST_SHARE, median(shares))) if shares else 1.0

    def lessened(link: LinkEstimate) -> LinkEstimate:
        return LinkEstimate(link.rate_bytes_per_s * share, link.round_trip_s)

    pairs = {
        pair: link if link is None or book.record(*pair).loaded else lessened(link) for pair, link in view.pairs.items()
    }
    sites = {pair: lessened(link) for pair, link in view.sites.items()}
    return LinkView(view.site, pairs, sites, None if view.default is None else lessened(view.default))


def _between_sites(
    site: Mapping[str, str], pairs: Mapping[tuple[str, str], LinkEstimate | None]
) -> dict[tuple[str, str], LinkEstimate]:
    """The median goodput and the shortest round trip of what was measured between the nodes of two sites, or of one."""
    found: dict[tuple[str, str], list[LinkEstimate]] = {}
    for (source, target), link in pairs.items():
        if link is not None and source in site and target in site:
            found.setdefault((site[source], site[target]), []).append(link)
    return {key: _typical(links) for key, links in found.items()}


def _typical(links: Sequence[LinkEstimate]) -> LinkEstimate:
    rates = sorted(link.rate_bytes_per_s for link in links)
    return LinkEstimate(rates[len(rates) // 2], min(link.round_trip_s for link in links))


def _limit_weak_nodes(
    site: Mapping[str, str],
    pairs: dict[tuple[str, str], LinkEstimate | None],
    sites: Mapping[tuple[str, str], LinkEstimate],
    default: LinkEstimate,
) -> None:
    """Add entries for nodes whose way to their own site's representative is slower than the links of that site."""
    for node, head in site.items():
        for sending in (True, False):
            access = pairs.get((node, head) if sending else (head, node))
            if node == head or access is None:
                continue
            for other in site:
                pair = (node, other) if sending else (other, node)
                if other in (node, head) or pair in pairs:
                    continue
                link = sites.get((site[pair[0]], site[pair[1]]), default)
                if access.rate_bytes_per_s < _WEAK * link.rate_bytes_per_s:
                    pairs[pair] = LinkEstimate(access.rate_bytes_per_s, link.round_trip_s)
