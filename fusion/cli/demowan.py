"""The WAN of the demo: a relay process that every connection between two nodes goes through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fusion.base.errors import UnreachableError
from fusion.base.units import format_rate
from fusion.cli.helpers import Helper, Helpers, last_line
from fusion.cli.wan import Machine, WanConfig, default_topology

_START_S = 20.0


class _Routes(msgspec.Struct, frozen=True):
    """The first line that the relay prints."""

    routes: dict[str, dict[str, str]]


class DemoWan:
    """Places for the nodes, and the links between them."""

    def __init__(self, nodes: Mapping[str, str], directory: Path) -> None:
        """`nodes` are the data-plane addresses by name; files are put into `directory`."""
        self._directory = directory
        self._topology = default_topology(list(nodes))
        machines = tuple(Machine(name, self._topology.place_of[name], address) for name, address in nodes.items())
        self._config = WanConfig(self._topology.links, machines)
        #: how the link from one node to another is shaped, in words
        self.links = {(one, other): self._describe(one, other) for one in nodes for other in nodes if one != other}

    def _describe(self, one: str, other: str) -> str:
        link = self._topology.link(one, other)
        where = f"{link.source} -> {link.target}" if link.source != link.target else f"within {link.source}"
        return f"{where}: {format_rate(link.rate_bytes_per_s)}, {2000 * link.delay_s:g} ms round trip"

    def summary(self) -> str:
        """Return the links between the places in one line."""
        return "; ".join(self._topology.describe())

    def start(self, helpers: Helpers, environment: Mapping[str, str]) -> dict[str, Path]:
        """Start the relay; return the file of routes for each node, by name."""
        config = self._directory / "wan.json"
        config.write_bytes(msgspec.json.encode(self._config))
        routes = _wait_for_routes(helpers, helpers.start("wan", "fusion.cli.wan", [str(config)], environment))
        files = {}
        for name, table in routes.items():
            files[name] = self._directory / f"routes-{name}.json"
            files[name].write_bytes(msgspec.json.encode(table))
        return files


def _wait_for_routes(helpers: Helpers, relay: Helper) -> dict[str, dict[str, str]]:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        helpers.check()
        for line in relay.log.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"routes"') and line.endswith(b"\n"):
                return msgspec.json.decode(line, type=_Routes).routes
        time.sleep(0.02)
    raise UnreachableError(f"the WAN relay has not started in {_START_S:.0f} s: {last_line(relay.log)}")
