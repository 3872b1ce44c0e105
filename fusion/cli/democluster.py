"""A whole cluster on this machine for the demo: coordinator and node daemons as processes of their own, on loopback."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion.base.errors import UnreachableError
from fusion.base.ids import random_id
from fusion.cli.helpers import Helpers, run_once
from fusion.job.client import Client
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

START_S = 60.0
NODE_FLOPS = 2e9  #: stated instead of measured: the demo's nodes are equal, and measuring would only take time
NODE_MEMORY = "2GiB"


class DemoCluster:
    """Runs until `helpers` are stopped. Everything lies below `directory`."""

    def __init__(self, helpers: Helpers, directory: Path, node_count: int) -> None:
        self._helpers, self._directory = helpers, directory
        self.environment = _environment(directory)
        ports = free_ports(2 + node_count)
        self.address = f"127.0.0.1:{ports[0]}"
        self._enrol_address = f"127.0.0.1:{ports[1]}"
        #: data-plane address of each node, by its name
        self.nodes = {f"node-{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports[2:])}

    @property
    def credentials(self) -> Path:
        """The owner's credentials."""
        return self._directory / "owner"

    def start_coordinator(self) -> None:
        """Make the cluster and start its coordinator; returns when it answers."""
        listen = ["--listen", self.address]
        run_once("fusion-coordinator init", "fusion_coordinator.cli", ["init", *listen], self.environment)
        serve = ["serve", *listen, "--enrol-listen", self._enrol_address]
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
                arguments += ["--listen", address, "--advertise", address, "--device", "cpu", "--threads", "1"]
                arguments += ["--speed", str(NODE_FLOPS), "--max-memory", NODE_MEMORY]
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_")}
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
