"""A cluster as a text file (TOML), for planning without any node running.

[[nodes]]
name = "atlas"
speed = "10T"            # operations per second that real operators reach
memory = "16GiB"         # what a job may use
site = "berlin"          # optional; without one the node is a site of its own
count = 4                # optional: atlas-1 .. atlas-4

[[sites]]                # optional: the network inside a site, and what it shares towards others
name = "berlin"
rate = "10 Gbit/s"       # between its nodes; 1 Gbit/s if not stated
delay = "0.2 ms"
uplink = "1 Gbit/s"      # shared by all its nodes, outwards
downlink = "2 Gbit/s"    # inwards; as the uplink if not stated

[[links]]
between = ["berlin", "tokyo"]    # two sites or two nodes
rate = "100 Mbit/s"
rate_back = "20 Mbit/s"  # optional, from the second to the first
delay = "120 ms"         # one way
# connect = false        # instead of a rate: they cannot connect

[default]                # optional: links that nothing else names; without it they do not exist
rate = "50 Mbit/s"
delay = "30 ms"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any

from fusion.base.errors import ConfigError
from fusion.base.ids import Incarnation, NodeId, check_name
from fusion.base.units import (
    MIB,
    format_bytes,
    format_duration,
    format_flops,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_flops,
    parse_rate,
)
from fusion.plan.types import Cluster, ClusterNode, Link, LinkTable, Uplink, site_of

MAX_NODES = 10_000
LAN = Link(125_000_000.0, 0.0002)  #: inside a site whose file says nothing else
_SPEED = (1e6, 1e18)
_MEMORY = (float(MIB), 2.0**50)
_RATE = (125.0, 1.25e13)  #: 1 kbit/s to 100 Tbit/s
_DELAY_S = (0.0, 60.0)

Table = Mapping[str, Any]


def parse_cluster(text: str, file: str = "cluster file") -> Cluster:
    """Return the cluster that the text of a file describes; ConfigError names the first thing that is wrong in it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    return _Reader(file, document).cluster()


class _Reader:
    """Reads one document; every method raises ConfigError with the place in the file."""

    def __init__(self, file: str, document: Table) -> None:
        self.file, self.document = file, document
        self.nodes: dict[str, ClusterNode] = {}
        self.sites: set[str] = set()
        self.pairs: dict[tuple[NodeId, NodeId], Link | None] = {}
        self.between_sites: dict[tuple[str, str], Link | None] = {}
        self.uplinks: dict[str, Uplink] = {}

    def cluster(self) -> Cluster:
        self._known(self.document, self.file, ("nodes", "sites", "links", "default"))
        for place, table in self._tables("nodes"):
            self._read_node(place, table)
        if not self.nodes:
            raise ConfigError(f"{self.file}: it names no node; write at least one [[nodes]] table")
        self.sites = {site_of(node) for node in self.nodes.values()}
        self.between_sites = {(site, site): LAN for site in sorted(self.sites)}
        self._read_sites()
        named: set[frozenset[str]] = set()
        for place, table in self._tables("links"):
            self._read_link(place, table, named)
        default = self._read_default()
        return Cluster(tuple(self.nodes.values()), LinkTable(self.pairs, self.between_sites, default, self.uplinks))

    # ---- sections ----

    def _read_node(self, place: str, table: Table) -> None:
        self._known(table, place, ("name", "speed", "memory", "site", "count"))
        name = check_name(f"{place}.name", self._text(table, place, "name"))
        speed = self._figure(table, place, "speed", parse_flops, _SPEED, format_flops)
        memory = self._figure(table, place, "memory", parse_bytes, _MEMORY, format_bytes)
        site = check_name(f"{place}.site", self._text(table, place, "site")) if "site" in table else ""
        count = table.get("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_NODES:
            raise ConfigError(f"{place}.count: {str(count)[:40]} must be a whole number of 1..{MAX_NODES}")
        for one in [name] if "count" not in table else [f"{name}-{index}" for index in range(1, count + 1)]:
            if one in self.nodes:
                raise ConfigError(f"{place}.name: two nodes are named {one!r}; names must differ")
            if len(self.nodes) >= MAX_NODES:
                raise ConfigError(f"{place}: more than {MAX_NODES} nodes")
            self.nodes[one] = ClusterNode(NodeId(one), one, "", Incarnation(1), int(memory), speed, site)

    def _read_sites(self) -> None:
        seen: set[str] = set()
        for place, table in self._tables("sites"):
            self._known(table, place, ("name", "rate", "delay", "uplink", "downlink"))
            name = self._site(f"{place}.name", self._text(table, place, "name"))
            if name in seen:
                raise ConfigError(f"{place}.name: site {name!r} is described twice")
            seen.add(name)
            rate = self._rate(table, place, "rate") if "rate" in table else LAN.rate_bytes_per_s
            delay_s = self._delay(table, place) if "delay" in table else LAN.delay_s
            self.between_sites[name, name] = Link(rate, delay_s)
            if "uplink" in table:
                out = self._rate(table, place, "uplink")
                self.uplinks[name] = Uplink(out, self._rate(table, place, "downlink") if "downlink" in table else out)
            elif "downlink" in table:
                raise ConfigError(f"{place}.downlink: it needs an uplink beside it")

    def _read_link(self, place: str, table: Table, named: set[frozenset[str]]) -> None:
        self._known(table, place, ("between", "rate", "rate_back", "delay", "connect"))
        ends = table.get("between")
        if not (isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, str) for end in ends)):
            raise ConfigError(f"{place}.between: it must name two nodes or two sites, such as ['berlin', 'tokyo']")
        first, second = ends
        if frozenset(ends) in named:
            raise ConfigError(f"{place}.between: a link between {first!r} and {second!r} was stated before")
        named.add(frozenset(ends))
        there, back = self._directions(place, table)
        if first in self.nodes and second in self.nodes and first != second:
            self.pairs[NodeId(first), NodeId(second)] = there
            self.pairs[NodeId(second), NodeId(first)] = back
            return
        one, other = self._site(f"{place}.between", first), self._site(f"{place}.between", second)
        if one == other and there != back:
            raise ConfigError(f"{place}.rate_back: inside one site there is only one rate")
        self.between_sites[one, other] = there
        self.between_sites[other, one] = back

    def _directions(self, place: str, table: Table) -> tuple[Link | None, Link | None]:
        connect = table.get("connect", True)
        if not isinstance(connect, bool):
            raise ConfigError(f"{place}.connect: it must be true or false")
        if not connect:
            if extra := sorted(set(table) & {"rate", "rate_back", "delay"}):
                raise ConfigError(f"{place}.{extra[0]}: a link with connect = false has none")
            return None, None
        rate, delay_s = self._rate(table, place, "rate"), self._delay(table, place)
        back = self._rate(table, place, "rate_back") if "rate_back" in table else rate
        return Link(rate, delay_s), Link(back, delay_s)

    def _read_default(self) -> Link | None:
        table = self.document.get("default")
        if table is None:
            return None
        place = f"{self.file}: default"
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: it must be a table [default]")
        self._known(table, place, ("rate", "delay"))
        return Link(self._rate(table, place, "rate"), self._delay(table, place))

    # ---- values ----

    def _tables(self, key: str) -> list[tuple[str, Table]]:
        found = self.document.get(key, [])
        if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
            raise ConfigError(f"{self.file}: {key}: it must be tables [[{key}]]")
        return [(f"{self.file}: {key}[{index}]", table) for index, table in enumerate(found, start=1)]

    def _known(self, table: Table, place: str, allowed: tuple[str, ...]) -> None:
        for key in table:
            if key not in allowed:
                close = get_close_matches(key, allowed, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"
                raise ConfigError(f"{place}: unknown key {key[:40]!r}; {hint}")

    def _site(self, place: str, name: str) -> str:
        if name in self.sites:
            return name
        known = sorted(self.sites | set(self.nodes))
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "a site exists once a node is in it"
        raise ConfigError(f"{place}: unknown site or node {name[:40]!r}; {hint}")

    def _text(self, table: Table, place: str, key: str) -> str:
        value = table.get(key)
        if not isinstance(value, str):
            raise ConfigError(f"{place}.{key}: it must be a text in quotes")
        return value

    def _rate(self, table: Table, place: str, key: str) -> float:
        return self._figure(table, place, key, parse_rate, _RATE, format_rate, bare=False)

    def _delay(self, table: Table, place: str) -> float:
        if "delay" not in table:
            return 0.0
        return self._figure(table, place, "delay", parse_duration, _DELAY_S, format_duration, bare=False)

    def _figure(
        self,
        table: Table,
        place: str,
        key: str,
        parse: Callable[[str, str], float],
        span: tuple[float, float],
        show: Callable[[float], str],
        *,
        bare: bool = True,
    ) -> float:
        """Return a figure within its span. Only figures whose unit is plain may be bare numbers."""
        value = table.get(key)
        if isinstance(value, str):
            figure = float(parse(f"{place}.{key}", value))
        elif bare and isinstance(value, int | float) and not isinstance(value, bool):
            figure = float(value)
        else:
            what = "missing" if value is None else f"{str(value)[:40]!r} is no text with a unit"
            raise ConfigError(f"{place}.{key}: {what}; write for example {key} = {_EXAMPLES[key]}")
        if not isfinite(figure) or not span[0] <= figure <= span[1]:
            shown = str(value)[:40]
            raise ConfigError(f"{place}.{key}: {shown!r} is not within {show(span[0])} to {show(span[1])}")
        return figure


_EXAMPLES = {
    "speed": '"10T"',
    "memory": '"16GiB"',
    "rate": '"100 Mbit/s"',
    "rate_back": '"20 Mbit/s"',
    "uplink": '"1 Gbit/s"',
    "downlink": '"1 Gbit/s"',
    "delay": '"20 ms"',
}
