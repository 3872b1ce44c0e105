"""A whole cluster on this machine for the demo: coordinator and node daemons as processes of their own, on loopback."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fusion.base.errors import UnreachableError
from fusion.base.ids import random_id
from fusion.base.units import GIB
from fusion.cli.helpers import Helpers, run_once
from fusion.job.client import Client
from fusion.plan.types import Cluster
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

START_S = 60.0
NODE_FLOPS = 2e9  #: stated instead of measured: the demo's nodes are equal, and measuring would only take time
NODE_MEMORY_BYTES = 2 * GIB
PROBES_S = 180.0  #: at most, until all links of a cluster are measured
_QUIET_S = 2.5  #: no figure has changed for so long: nobody measures any more


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A daemon to start. A job may take no more than this machine's memory, whatever the node is said to have."""

    name: str
    flops: float = NODE_FLOPS
    memory_bytes: int = NODE_MEMORY_BYTES
    emulated: bool = False  #: whether passes are stretched to that speed

    def options(self) -> list[str]:
        """Return the command line's part that is about the device."""
        memory_bytes = min(self.memory_bytes, psutil.virtual_memory().total)
        speed = ["--emulate-speed" if self.emulated else "--speed", repr(self.flops)]
        return ["--device", "cpu", "--threads", "1", "--no-spare-worker", "--max-memory", str(memory_bytes), *speed]


class DemoCluster:
    """Runs until `helpers` are stopped. Everything lies below `directory`."""

    def __init__(
        self, helpers: Helpers, directory: Path, nodes: int | Sequence[DemoNode], *, relays: bool = False
    ) -> None:
        """`nodes`: so many equal ones, node-0 and so on, or whatever they are.

        relays: whether nodes that cannot reach each other are joined by the coordinator; what it relays takes no
        emulated link.
        """
        self._helpers, self._directory, self._relays = helpers, directory, relays
        self.environment = _environment(directory)
        equal = [DemoNode(f"node-{number}") for number in range(nodes)] if isinstance(nodes, int) else nodes
        self._made = {node.name: node for node in equal}
        ports = free_ports(2 + len(self._made))
        self.address = f"127.0.0.1:{ports[0]}"
        self._enrol_address = f"127.0.0.1:{ports[1]}"
        #: data-plane address of each node, by its name
        self.nodes = {name: f"127.0.0.1:{port}" for name, port in zip(self._made, ports[2:], strict=True)}

    @property
    def credentials(self) -> Path:
        """The owner's credentials."""
        return self._directory / "owner"

    def start_coordinator(self) -> None:
        """Make the cluster and start its coordinator; returns when it answers."""
        listen = ["--listen", self.address]
        run_once("fusion-coordinator init", "fusion_coordinator.cli", ["init", *listen], self.environment)
        serve = ["serve", *listen, "--enrol-listen", self._enrol_address]
        serve += [] if self._relays else ["--relay-rate", "0"]
        self._helpers.start("coordinator", "fusion_coordinator.cli", serve, self.environment)
        self._wait_for_port(self.address)
        with self._admin() as client:
            client.info()

    def _wait_for_port(self, address: str) -> None:
        deadline_s = time.monotonic() + START_S
        host, _, port = address.rpartition(":")
        while time.monotonic() < deadline_s:
            self._helpers.check()
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise UnreachableError(f"nothing listens at {address} after {START_S:.0f} s")

    def start_nodes(self, routes: Mapping[str, Path]) -> None:
        """Start the daemons, each with a join token of its own; `routes` are files for --routes, by node name."""
        with self._admin() as client:
            for name, address in self.nodes.items():
                arguments = ["start", _join_string(client), "--name", name, "--home", str(self._directory / name)]
                arguments += ["--listen", address, "--advertise", address, *self._made[name].options()]
                if name in routes:
                    arguments += ["--routes", str(routes[name])]
                self._helpers.start(name, "fusion_node.cli", arguments, self.environment)

    def wait_for_nodes(self) -> None:
        """Return when every node has registered; JobError if one has ended, UnreachableError after a minute."""
        deadline_s = time.monotonic() + START_S
        with self._admin() as client:
            while (here := _registered(client)) < len(self.nodes):
                self._helpers.check()
                if time.monotonic() > deadline_s:
                    raise UnreachableError(f"only {here} of {len(self.nodes)} nodes have registered in {START_S:.0f} s")
                time.sleep(0.1)

    def seen(self) -> Cluster:
        """Return the cluster as the coordinator plans with it at this moment."""
        with Client(self.address, self.credentials) as client:
            return client.cluster()

    def wait_for_links(self) -> Cluster:
        """Return the cluster as the coordinator plans with it, once all links between nodes are measured.

        UnreachableError if that takes more than PROBES_S. Above 16 nodes not all are measured: don't wait for that.
        """
        deadline_s = time.monotonic() + PROBES_S
        seen, since_s = Cluster(()), time.monotonic()
        with Client(self.address, self.credentials) as client:
            while True:
                self._helpers.check()
                found, now_s = client.cluster(), time.monotonic()
                if found != seen:
                    seen, since_s = found, now_s
                pairs, wanted = len(found.links.pairs), len(self.nodes) * (len(self.nodes) - 1)
                if len(found.nodes) == len(self.nodes) and pairs == wanted and now_s - since_s > _QUIET_S:
                    return found
                if now_s > deadline_s:
                    raise UnreachableError(f"only {pairs} of {wanted} links were measured in {PROBES_S:.0f} s")
                time.sleep(0.25)

    def _admin(self) -> Client:
        return Client(self.address, self._directory / "coordinator" / "admin")


def _admin_stub(client: Client) -> Any:
    return coordinator_pb2_grpc.AdminStub(client.channel)  # type: ignore[no-untyped-call]


def _join_string(client: Client) -> str:
    request = coordinator_pb2.CreateTokenRequest(request_id=random_id("req-", 20), role="node", valid_s=600.0)
    return str(_admin_stub(client).CreateToken(request, timeout=10.0).join_string)


def _registered(client: Client) -> int:
    answer = _admin_stub(client).ListNodes(coordinator_pb2.ListNodesRequest(), timeout=10.0)
    return sum(node.state == "idle" for node in answer.nodes)


def _environment(directory: Path) -> dict[str, str]:
    """Return the helpers' environment: ours, with a home of its own and single-threaded mathematics."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_")}
    kept = ours | {name: value for name, value in os.environ.items() if name == "FUSION_STATE_DIR"}
    return kept | {"FUSION_HOME": str(directory), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody uses at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()
