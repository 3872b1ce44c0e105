"""Where a node says that it can be reached, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from fusion.base.errors import ConfigError
from fusion.wire.v1 import node_pb2
from fusion_node.reachability import Reachability, check_advertised, find_out, is_loopback
from tests.support.node import free_port

FAR = "203.0.113.9:7443"
NEAR = "127.0.0.1:7443"


class Coordinator:
    """Answers probes; connects to where it is told to, unless it has a fixed answer."""

    def __init__(self, seen_host: str, fixed: bool | None = None, dial: str = "", relays: float = 0.0) -> None:
        self.seen_host, self.fixed, self.dial, self.relays = seen_host, fixed, dial, relays
        self.asked: list[str] = []

    async def probe(self, address: str, nonce: bytes) -> node_pb2.ProbeResponse:
        self.asked.append(address)
        if not address:
            return node_pb2.ProbeResponse(seen_host=self.seen_host)
        if self.fixed is not None:
            detail = "connection timed out"
            return node_pb2.ProbeResponse(reachable=self.fixed, detail=detail, relay_bytes_per_s=self.relays)
        host, _, port = (self.dial or address).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        got = await reader.readexactly(len(nonce))
        assert await reader.read() == b""  # and nothing else
        writer.close()
        return node_pb2.ProbeResponse(reachable=got == nonce)


def found(coordinator: Coordinator, listen: str, advertise: str = "", address: str = FAR) -> Reachability:
    return asyncio.run(find_out(listen, advertise, address, coordinator.probe))


def test_p1_the_coordinator_reads_the_nonce_where_the_node_says_that_it_is():
    port = free_port()
    result = found(Coordinator("127.0.0.1"), f"127.0.0.1:{port}", address=NEAR)
    assert result == Reachability(f"127.0.0.1:{port}", f"127.0.0.1:{port}", True, "")
    with pytest.raises(OSError, match="refused"):  # the listener is gone: nothing listens while nothing trains
        socket.create_connection(("127.0.0.1", port), 1)


def test_p1_a_node_that_nobody_reaches_says_what_to_open():
    port = free_port()
    result = found(Coordinator("198.51.100.7", fixed=False), f"0.0.0.0:{port}")
    assert not result.reachable
    for words in (f"198.51.100.7:{port}", "connection timed out", f"TCP connections to 198.51.100.7 port {port}"):
        assert words in result.detail
    assert "--advertise" in result.detail
    assert result.detail.endswith("as the coordinator relays nothing")


def test_a_node_that_nobody_reaches_says_that_it_will_be_relayed_and_how_fast_at_most():
    result = found(Coordinator("198.51.100.7", fixed=False, relays=12.5e6), f"0.0.0.0:{free_port()}")
    assert result.detail.endswith("reach it through the coordinator, at most 100 Mbit/s for all together")


def test_p22_the_address_that_the_coordinator_sees_is_advertised_never_the_wildcard():
    port = free_port()
    coordinator = Coordinator("198.51.100.7", dial=f"127.0.0.1:{port}")
    assert found(coordinator, f"0.0.0.0:{port}").address == f"198.51.100.7:{port}"
    assert coordinator.asked == ["", f"198.51.100.7:{port}"]


def test_p22_loopback_is_never_advertised_to_a_coordinator_elsewhere():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ means the machine that dials it"):
        found(Coordinator("127.0.0.1"), f"0.0.0.0:{free_port()}", address=FAR)
    with pytest.raises(ConfigError, match="means the machine that dials it"):
        found(Coordinator("198.51.100.7"), f"0.0.0.0:{free_port()}", "localhost:7445")


@pytest.mark.parametrize("coordinator", ["127.0.0.1:7443", "localhost:7443", "[::1]:7443"])
def test_p22_loopback_is_right_when_all_is_one_machine(coordinator: str):
    assert check_advertised("127.0.0.1:7445", coordinator) == "127.0.0.1:7445"


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7445", "[::]:7445", "169.254.169.254:80", "[fe80::1]:7445", "224.0.0.1:1"]
)
def test_t15_addresses_that_nobody_can_dial_are_refused(address: str):
    with pytest.raises(ConfigError, match="no address to dial"):
        check_advertised(address, FAR)


@pytest.mark.parametrize("address", ["", "host with spaces:1", "host:70000", "host:abc", "host:0", "a" * 300 + ":1"])
def test_b9_addresses_that_are_none_are_refused(address: str):
    with pytest.raises(ConfigError):
        check_advertised(address, FAR)


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [("gpu.example.org", "gpu.example.org:{port}"), ("gpu.example.org:9", "gpu.example.org:9")],
)
def test_what_is_stated_is_advertised(advertise: str, expected: str):
    port = free_port()
    coordinator = Coordinator("198.51.100.7", dial=f"127.0.0.1:{port}")
    assert found(coordinator, f"0.0.0.0:{port}", advertise).address == expected.format(port=port)
    assert "" not in coordinator.asked


def test_port_zero_is_settled_once():
    result = found(Coordinator("127.0.0.1"), "127.0.0.1:0", address=NEAR)
    assert result.reachable
    assert result.listen == result.address
    assert not result.listen.endswith(":0")


def test_p1_a_taken_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--listen: port of {taken} is taken"):
            found(Coordinator("127.0.0.1"), taken, address=NEAR)


@pytest.mark.parametrize("listen", ["203.0.113.77:7445", "no-such-host.invalid:7445"])
def test_b9_an_address_of_another_machine_cannot_be_listened_on(listen: str):
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        found(Coordinator("127.0.0.1"), listen)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.3.2.1", True), ("::1", True), ("LOCALHOST", True), ("10.0.0.1", False), ("a.org", False)],
)
def test_loopback_is_known_by_its_names(host: str, expected: Any):
    assert is_loopback(host) is expected
