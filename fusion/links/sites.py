"""Which nodes are at one place, by the time that a message takes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Nodes whose round trip is shorter are at one site: a building, a campus, a city.
SITE_ROUND_TRIP_S = 0.005

RoundTrip = Callable[[str, str], float | None]


def infer_sites(
    nodes: Sequence[str], round_trip_s: RoundTrip, threshold_s: float = SITE_ROUND_TRIP_S
) -> dict[str, str | None]:
    """Return for each node the one that stands for its site; None while its place is unknown.

    Each node, in the order given, joins the site whose representative is nearest, if that is near; a node that is far
    from all of them opens a site of its own. So latency is needed only to the representatives, and the result follows
    from the order and the round trips alone. A node stays unknown while a representative's distance is unknown that
    could still be near.
    """
    heads: list[str] = []
    site: dict[str, str | None] = {}
    for node in nodes:
        known = [(seconds, head) for head in heads if (seconds := round_trip_s(node, head)) is not None]
        near = [item for item in known if item[0] <= threshold_s]
        if near:
            site[node] = min(near, key=lambda item: (item[0], heads.index(item[1])))[1]
        elif len(known) < len(heads):
            site[node] = None
        else:
            heads.append(node)
            site[node] = node
    return site
