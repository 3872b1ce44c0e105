"""The WAN of the demo: a relay process that every connection between two nodes goes through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fusion.base.errors import UnreachableError
from fusion.base.units import format_rate
from fusion.cli.helpers import Helper, Helpers, last_line
from fusion.cli.wan import Machine, WanConfig, WanLink, default_topology
from fusion.cli.wanfaults import Fault
from fusion.plan.types import Cluster, ClusterNode, Link, Uplink, site_of

_START_S = 20.0


class _Routes(msgspec.Struct, frozen=True):
    """The first line that the relay prints."""

    routes: dict[str, dict[str, str]]


class DemoWan:
    """The links between the nodes, as a configuration of the relay."""

    def __init__(self, config: WanConfig, links: Mapping[tuple[str, str], str], summary: str, directory: Path) -> None:
        """Files are put into `directory`; see `of_places` and `of_cluster`."""
        self._directory = directory
        self._relay: Helper | None = None
        self.config = config
        self.links = links  #: how the link from one node to another is shaped, in words
        self.summary = summary  #: all of them in one line

    @staticmethod
    def of_places(nodes: Mapping[str, str], directory: Path) -> DemoWan:
        """Spread nodes (data-plane addresses by name) over the places of the default WAN."""
        topology = default_topology(list(nodes))
        machines = tuple(Machine(name, topology.place_of[name], address) for name, address in nodes.items())
        links = {}
        for one in nodes:
            for other in nodes:
                if one != other:
                    link = topology.link(one, other)
                    where = f"{link.source} -> {link.target}" if link.source != link.target else f"within {link.source}"
                    links[one, other] = f"{where}: {_words(link)} round trip"
        return DemoWan(WanConfig(topology.links, machines), links, "; ".join(topology.describe()), directory)

    @staticmethod
    def of_cluster(nodes: Mapping[str, str], cluster: Cluster, directory: Path) -> DemoWan:
        """Give every pair of nodes the link that it has in `cluster`, and sites their shared uplinks."""
        machines = tuple(Machine(name, name, address) for name, address in nodes.items())
        pairs = [(one, other) for one in cluster.nodes for other in cluster.nodes if one is not other]
        links = tuple(_link(cluster, one, other) for one, other in pairs)
        words = {
            (link.source, link.target): f"{_words(link)} round trip" if link.connects else "no link" for link in links
        }
        sites = len({site_of(node) for node in cluster.nodes})
        absent = sum(not link.connects for link in links) // 2
        summary = f"{len(nodes)} nodes at {sites} sites, {len(links) // 2 - absent} links between them"
        if absent:
            summary += f", {absent} pairs cannot connect"
        return DemoWan(WanConfig(links, machines, _pipes(cluster.links.uplinks)), words, summary, directory)

    def start(self, helpers: Helpers, environment: Mapping[str, str]) -> dict[str, Path]:
        """Start the relay; return the file of routes for each node, by name."""
        config = self._directory / "wan.json"
        config.write_bytes(msgspec.json.encode(self.config))
        self._relay = helpers.start("wan", "fusion.cli.wan", [str(config)], environment)
        routes = _wait_for_routes(helpers, self._relay)
        files = {}
        for name, table in routes.items():
            files[name] = self._directory / f"routes-{name}.json"
            files[name].write_bytes(msgspec.json.encode(table))
        return files

    def shape(self, one: str, other: str, link: Link) -> None:
        """From now on let the links between two nodes, both ways, be like `link`. Only while the relay runs."""
        assert self._relay is not None
        assert self._relay.process.stdin is not None
        fault = Fault("shape", ((one, other), (other, one)), link.rate_bytes_per_s, link.delay_s)
        self._relay.process.stdin.write(msgspec.json.encode(fault) + b"\n")
        self._relay.process.stdin.flush()


def _words(link: WanLink) -> str:
    return f"{format_rate(link.rate_bytes_per_s)}, {2000 * link.delay_s:g} ms"


def _link(cluster: Cluster, one: ClusterNode, other: ClusterNode) -> WanLink:
    """A site's uplink is a pipe that all its links to other sites share."""
    found = cluster.links.between(one, other)
    if found is None:
        return WanLink(one.name, other.name, 0.0, 0.0, connects=False)
    pipes: tuple[str, ...] = ()
    leaving, entering = site_of(one), site_of(other)
    if leaving != entering:
        wanted = [(leaving, "out"), (entering, "in")]
        pipes = tuple(f"{site} {way}" for site, way in wanted if site in cluster.links.uplinks)
    return WanLink(one.name, other.name, found.rate_bytes_per_s, found.delay_s, pipes)


def _pipes(uplinks: Mapping[str, Uplink]) -> dict[str, float]:
    found = {}
    for site, uplink in uplinks.items():
        found[f"{site} out"], found[f"{site} in"] = uplink.out_bytes_per_s, uplink.in_bytes_per_s
    return found


def _wait_for_routes(helpers: Helpers, relay: Helper) -> dict[str, dict[str, str]]:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        helpers.check()
        for line in relay.log.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"routes"') and line.endswith(b"\n"):
                return msgspec.json.decode(line, type=_Routes).routes
        time.sleep(0.02)
    raise UnreachableError(f"the WAN relay has not started in {_START_S:.0f} s: {last_line(relay.log)}")
