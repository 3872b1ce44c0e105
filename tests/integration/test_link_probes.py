"""Daemons measure the links between them, over real sockets, TLS and an emulated WAN, as the coordinator orders."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from fusion.cli.wan import Machine, WanLink, WanRelay
from fusion.job.client import live_cluster
from fusion.plan.types import Cluster
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Credentials, Role
from fusion.security.tls import node_server_name
from fusion.transport.channels import open_aio_channel
from fusion.wire.v1 import node_pb2, probe_pb2, probe_pb2_grpc
from fusion_node import daemon, probes
from fusion_node.probes import ProbePort, measure
from tests.support.coordinator import CoordinatorProcess
from tests.support.node import CLUSTER, ScriptedCoordinator, free_port, running, serve, until

MBIT = 125_000.0


# ---- one node dials another ----


class Two:
    """A node that holds its port, and one that may dial it."""

    def __init__(self) -> None:
        self.ca = CertificateAuthority.create(CLUSTER, time.time())
        self.here, self.there = self.node("here"), self.node("there")
        self.address = f"127.0.0.1:{free_port()}"
        self.port = ProbePort(CLUSTER, self.there)

    def node(self, name: str) -> Credentials:
        return self.ca.new_credentials(Role.NODE, name, "127.0.0.1:1", time.time())

    async def __aenter__(self) -> Two:
        self.port.want(self.address)
        await self.port.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.port.release()

    def target(self, size: int, node: str = "") -> node_pb2.ProbeTarget:
        return node_pb2.ProbeTarget(node_id=node or self.there.identity, address=self.address, bytes=size)

    async def call(self, who: Credentials, method: str, request: Any) -> Any:
        channel = open_aio_channel(self.address, who, node_server_name(CLUSTER, self.there.identity))
        try:
            stub: Any = probe_pb2_grpc.ProbeStub(channel)
            call = getattr(stub, method)(request, timeout=10)
            return [item async for item in call] if method == "Download" else await call
        finally:
            await channel.close(None)


def run(scenario: Any) -> None:
    async def inside() -> None:
        async with Two() as two:
            await scenario(two)

    asyncio.run(inside())


def test_a_named_node_measures_both_directions_and_the_round_trip():
    async def scenario(two: Two) -> None:
        two.port.service.let_in([two.here.identity])
        found = await measure(two.target(1_000_000), two.here, {})
        assert found.reachable
        assert 0 < found.round_trip_s < 0.5
        assert found.there_bytes_per_s > 1e6  # loopback, whatever else the machine does
        assert found.back_bytes_per_s > 1e6
        assert found.bytes == 1_000_000
        only_latency = await measure(two.target(0), two.here, {})
        assert (only_latency.reachable, only_latency.there_bytes_per_s, only_latency.bytes) == (True, 0.0, 0)

    run(scenario)


def test_a_node_that_nobody_named_is_reachable_to_itself_and_learns_nothing_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "_NOT_YET_PAUSE_S", 0.01)

    async def scenario(two: Two) -> None:
        found = await measure(two.target(100_000), two.here, {})
        assert found.reachable
        assert found.round_trip_s > 0
        assert (found.there_bytes_per_s, found.back_bytes_per_s) == (0.0, 0.0)

    run(scenario)


def test_t26_probes_are_bounded_each_and_together():
    async def scenario(two: Two) -> None:
        two.port.service.let_in([two.here.identity])

        async def refusal(method: str, request: Any) -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await two.call(two.here, method, request)
            return caught.value.code()

        too_much = probe_pb2.ProbeDownloadRequest(bytes=probes.MAX_BYTES + 1)
        assert await refusal("Download", too_much) is grpc.StatusCode.INVALID_ARGUMENT
        large_chunk = iter([probe_pb2.ProbeChunk(data=bytes(probes.MAX_CHUNK_BYTES + 1))])
        assert await refusal("Upload", large_chunk) is grpc.StatusCode.INVALID_ARGUMENT
        endless = (probe_pb2.ProbeChunk(data=bytes(2**16)) for _ in range(1000))
        # a call that ends while its client still writes may look to that like a reset connection
        assert await refusal("Upload", endless) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        all_of_it = probe_pb2.ProbeDownloadRequest(bytes=probes.MAX_BYTES)
        for _ in range(3):
            chunks = await two.call(two.here, "Download", all_of_it)
            assert sum(len(chunk.data) for chunk in chunks) == probes.MAX_BYTES
        assert await refusal("Download", all_of_it) is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario)


def test_only_nodes_of_the_cluster_are_answered():
    async def scenario(two: Two) -> None:
        owner = two.ca.new_credentials(Role.OWNER, "owner", "127.0.0.1:1", time.time())
        two.port.service.let_in([owner.identity])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await two.call(owner, "Ping", probe_pb2.ProbePing())
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stranger = CertificateAuthority.create(CLUSTER, time.time()).new_credentials(Role.NODE, "x", "", time.time())
        foreign = replace(stranger, ca_pem=two.here.ca_pem)
        found = await measure(two.target(0), replace(foreign, coordinator="127.0.0.1:1"), {})
        assert not found.reachable

    run(scenario)


def test_what_cannot_be_reached_is_told_with_the_reason():
    async def scenario(two: Two) -> None:
        wrong = await measure(two.target(0, two.here.identity), two.here, {})
        assert not wrong.reachable  # another node answers there than the one that is meant
        assert "Verification" in wrong.reason
        await two.port.release()
        gone = await measure(two.target(0), two.here, {})
        assert not gone.reachable
        assert "refused" in gone.reason
        remote = replace(two.here, coordinator="10.0.0.1:7443")
        local = await measure(two.target(0), remote, {})
        assert "reach" in local.reason  # 127.0.0.1 is whoever dials it

    run(scenario)


def test_the_port_is_free_as_soon_as_it_is_given_back_and_can_be_taken_again():
    async def scenario(two: Two) -> None:
        host, port = two.address.split(":")
        for _ in range(3):
            await two.port.release()
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind((host, int(port)))
                other.listen()
                two.port.want(two.address)
                await two.port.settle()
                assert not two.port.settled  # taken by the other program: no harm, it is tried again
            await two.port.settle()
            assert two.port.settled

    run(scenario)


# ---- the daemon ----


def listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_the_daemon_holds_its_port_but_not_while_it_has_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    coordinator, at = ScriptedCoordinator(), f"127.0.0.1:{free_port()}"

    async def scenario(address: str) -> None:
        node = coordinator.make_node(tmp_path, address)
        async with running(tmp_path, node, "run", listen=at) as task:
            await until(lambda: bool(coordinator.heartbeats) and listens(at), task)
            coordinator.assign(epoch=1)
            await until(lambda: "running" in coordinator.states(), task)
            assert not await asyncio.to_thread(listens, at)
            coordinator.stop(epoch=1)
            await until(lambda: "stopped" in coordinator.states() and listens(at), task)
        assert not listens(at)

    with serve(coordinator) as address:
        asyncio.run(scenario(address))


# ---- the whole: coordinator, daemons, a WAN ----


@pytest.mark.slow
def test_a_cluster_learns_its_links_and_sites_over_a_wan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """a and b are at one place; c is 80 ms and 20 Mbit/s away, with 8 Mbit/s on its way out; c and b cannot connect."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    names = ("a", "b", "c")
    at = {name: f"127.0.0.1:{free_port()}" for name in names}
    links = (
        WanLink("here", "here", 200 * MBIT, 0.0005),
        WanLink("there", "there", 200 * MBIT, 0.0005),
        WanLink("here", "there", 20 * MBIT, 0.040),
        WanLink("there", "here", 8 * MBIT, 0.040),
    )
    machines = [Machine(name, "there" if name == "c" else "here", at[name]) for name in names]

    async def scenario(coordinator: CoordinatorProcess) -> Cluster:
        relay = WanRelay(links, machines)
        async with AsyncExitStack() as stack:
            routes = await relay.start()
            stack.push_async_callback(relay.close)
            routes["c"][at["b"]] = routes["b"][at["c"]] = f"127.0.0.1:{free_port()}"
            tasks = []
            for name in names:
                credentials = coordinator.credentials("node", name)
                credentials.save(tmp_path / name)
                context = running(tmp_path / name, credentials, listen=at[name], routes=routes[name])
                tasks.append(await stack.enter_async_context(context))
            found: list[Cluster] = []

            def complete() -> bool:
                found[:] = [live_cluster(coordinator.address, coordinator.admin())]
                return len(found[0].links.pairs) == 6 and any(link is None for link in found[0].links.pairs.values())

            await until(complete, tasks[0], 40, 0.2)
            await asyncio.sleep(2.0)  # the second, longer probes of fast links
            return await asyncio.to_thread(live_cluster, coordinator.address, coordinator.admin())

    settings = {"probes": True, "probe_s": 0.1, "relay_bytes_per_s": 0.0}
    with CoordinatorProcess(tmp_path / "coordinator", settings) as coordinator:
        cluster = asyncio.run(scenario(coordinator))
    node = {one.name: one for one in cluster.nodes}
    assert node["a"].site == node["b"].site != node["c"].site
    between = {
        (one, other): cluster.links.between(node[one], node[other]) for one in names for other in names if one != other
    }
    assert between["c", "b"] is between["b", "c"] is None
    for source, target, megabits in (("a", "c", 20), ("c", "a", 8)):
        link = between[source, target]
        assert link is not None
        assert 0.6 * megabits * MBIT < link.rate_bytes_per_s < 1.3 * megabits * MBIT, (source, target, link)
        assert 0.039 < link.delay_s < 0.060, (source, target, link)
    inside = between["a", "b"]
    assert inside is not None
    assert inside.rate_bytes_per_s > 40 * MBIT
    assert inside.delay_s < 0.01
    assert (node["a"].flops, node["a"].memory_bytes) == (1e9, 2**30)
