"""The emulated WAN: no link is ever faster than it says, and every byte arrives. Slower is never a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from fusion.base.errors import ConfigError
from fusion.cli.wan import Machine, WanConfig, WanLink, WanRelay, default_topology
from tests.support.loops import run

ROOT = Path(__file__).parents[2]
CLOCK_S = 0.002  #: what clocks and rounding may take off a delay


def both_ways(rate: float, delay_s: float) -> list[WanLink]:
    return [WanLink("here", "there", rate, delay_s), WanLink("there", "here", rate, delay_s)]


async def relay_to(server, links) -> tuple[WanRelay, int]:
    """A relay from machine a, which is here, to machine b there, which `server` is; with the port to dial."""
    port = server.sockets[0].getsockname()[1]
    machines = [Machine("a", "here", "127.0.0.1:1"), Machine("b", "there", f"127.0.0.1:{port}")]
    relay = WanRelay(links, machines)
    routes = await relay.start()
    assert set(routes) == {"a", "b"}
    return relay, int(routes["a"][f"127.0.0.1:{port}"].rsplit(":")[1])


async def echo(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def sink_into(received: list[bytes]):
    async def sink(reader, writer):
        received.append(await reader.read(-1))
        writer.close()

    return sink


def test_a_byte_takes_the_delay_each_way():
    async def scenario():
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            links = [WanLink("here", "there", 0, 0.05), WanLink("there", "here", 0, 0.03)]
            relay, port = await relay_to(server, links)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                began_s = time.monotonic()
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                assert time.monotonic() - began_s >= 0.08 - CLOCK_S
            writer.close()
            await relay.close()

    run(scenario)


@pytest.mark.parametrize("connections", [1, 3])
def test_connections_over_one_link_share_its_rate(connections):
    async def scenario():
        received: list[bytes] = []
        rate, size = 2_000_000, 1_500_000
        async with await asyncio.start_server(sink_into(received), "127.0.0.1", 0) as server:
            relay, port = await relay_to(server, both_ways(rate, 0.02))
            data = bytes(range(250)) * (size // connections // 250)
            began_s = time.monotonic()

            async def send():
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                writer.write_eof()
                await writer.drain()
                return writer

            writers = await asyncio.gather(*(send() for _ in range(connections)))
            while len(received) < connections:
                await asyncio.sleep(0.001)
            taken_s = time.monotonic() - began_s
            assert received == [data] * connections
            assert connections * len(data) / taken_s <= 1.1 * rate
            assert taken_s >= 0.02
            assert relay.report() == {"a": {"b": connections * len(data)}, "b": {"a": 0}}
            for writer in writers:
                writer.close()
            await relay.close()

    run(scenario)


def test_a_sender_is_held_back_when_the_far_end_does_not_read():
    async def scenario():
        held = asyncio.Event()

        async def deaf(reader, writer):
            await held.wait()
            writer.transport.abort()

        async with await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1) as server:
            relay, port = await relay_to(server, both_ways(0, 0.001))
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.set_write_buffer_limits(high=1)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 64:
                    writer.write(bytes(1 << 20))
                    await asyncio.wait_for(writer.drain(), 0.5)
                    sent += 1
            assert sent < 64  # far below what unbounded buffers would take in that time
            held.set()
            writer.transport.abort()
            await relay.close()

    run(scenario)


def test_links_through_one_uplink_share_its_rate():
    async def scenario():
        received: list[bytes] = []
        uplink, size = 1_000_000, 500_000
        async with (
            await asyncio.start_server(sink_into(received), "127.0.0.1", 0) as one,
            await asyncio.start_server(sink_into(received), "127.0.0.1", 0) as other,
        ):
            places = {"a": "127.0.0.1:1"}
            for name, server in (("b", one), ("c", other)):
                places[name] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            links = [
                WanLink(source, target, 10_000_000, 0, ("up",) if source == "a" else ())
                for source in "abc"
                for target in "abc"
                if source != target
            ]
            machines = [Machine(name, name, address) for name, address in places.items()]
            relay = WanRelay(links, machines, {"up": uplink})
            routes = (await relay.start())["a"]
            began_s = time.monotonic()

            async def send(name):
                _, writer = await asyncio.open_connection("127.0.0.1", int(routes[places[name]].rsplit(":")[1]))
                writer.write(bytes(size))
                writer.write_eof()
                await writer.drain()
                return writer

            writers = await asyncio.gather(send("b"), send("c"))
            while len(received) < 2:
                await asyncio.sleep(0.001)
            assert 2 * size / (time.monotonic() - began_s) <= 1.1 * uplink
            for writer in writers:
                writer.close()
            await relay.close()

    run(scenario)


def test_a_link_that_does_not_exist_refuses_connections():
    async def scenario():
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            absent = [WanLink("here", "there", 0, 0, connects=False), WanLink("there", "here", 0, 0, connects=False)]
            relay, port = await relay_to(server, absent)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            await relay.close()

    run(scenario)


def test_both_directions_end_in_order_and_a_dead_target_ends_the_connection():
    async def scenario():
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            relay, port = await relay_to(server, both_ways(0, 0.01))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"last words")
            writer.write_eof()
            assert await reader.read(-1) == b"last words"
            writer.close()
            server.close()
            await server.wait_closed()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read(1) == b""
            writer.close()
            await relay.close()

    run(scenario)


def test_the_default_topology_is_a_wan_of_three_places():
    names = [f"node-{number}" for number in range(7)]
    topology = default_topology(names)
    assert topology == default_topology(names)
    assert [topology.place_of[name] for name in names] == ["Amsterdam"] * 3 + ["Toronto"] * 2 + ["Singapore"] * 2
    for source in names:
        for target in names:
            link = topology.link(source, target)
            if topology.place_of[source] == topology.place_of[target]:
                assert (link.rate_bytes_per_s, link.delay_s) == (125e6, 0.00025)
            else:
                assert 20e6 / 8 <= link.rate_bytes_per_s <= 200e6 / 8
                assert 0.020 <= 2 * link.delay_s <= 0.080
                assert topology.link(target, source).delay_s == link.delay_s
    assert topology.describe() == [
        "Amsterdam - Singapore: 20 Mbit/s, 80 ms round trip",
        "Amsterdam - Toronto: 200 Mbit/s, 20 ms round trip",
        "Singapore - Toronto: 50 Mbit/s, 60 ms round trip",
    ]
    assert list(default_topology(names[:2]).place_of.values()) == ["Amsterdam", "Toronto"]
    assert list(default_topology(names[:4]).place_of.values()) == ["Amsterdam", "Amsterdam", "Toronto", "Singapore"]


@pytest.mark.parametrize(
    ("links", "machines", "words"),
    [
        ([WanLink("x", "y", -1, 0)], [], "rate -1"),
        ([WanLink("x", "y", float("nan"), 0)], [], "rate nan"),
        ([WanLink("x", "y", 1, 61)], [], "delay 61"),
        ([], [Machine("a", "x", "h:1"), Machine("a", "x", "h:2")], "same name"),
        ([WanLink("x", "y", 1, 0, ("up",))], [], "no shared pipe 'up'"),
        ([], [Machine("a", "x", "nowhere")], "'nowhere' is not host:port"),
        ([], [Machine("a", "x", "h:70000")], "'h:70000' is not host:port"),
        ([WanLink("x", "y", 0, 0)], [Machine("a", "x", "h:1"), Machine("b", "y", "h:2")], "no link y -> x"),
    ],
)
def test_a_wrong_configuration_is_named(links, machines, words):
    with pytest.raises(ConfigError, match=words):
        WanRelay(links, machines)


@pytest.fixture
def process(tmp_path):
    """Starts the relay's process on a configuration; kills what is left."""
    processes = []

    def start(text: bytes):
        (tmp_path / "wan.json").write_bytes(text)
        command = [sys.executable, "-m", "fusion.cli.wan", str(tmp_path / "wan.json")]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.wait()
        for stream in (each.stdin, each.stdout, each.stderr):
            stream.close()


@pytest.mark.parametrize("end", ["SIGTERM", "end of its input"])
def test_the_process_states_its_routes_reports_and_ends(process, end):
    async def talk(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"12345")
        assert await reader.readexactly(5) == b"12345"
        writer.close()

    async def scenario():
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            machines = (Machine("a", "here", "127.0.0.1:1"), Machine("b", "there", address))
            relay = process(msgspec.json.encode(WanConfig(tuple(both_ways(0, 0.001)), machines)))
            routes = json.loads(await asyncio.to_thread(relay.stdout.readline))["routes"]
            assert set(routes["b"]) == {"127.0.0.1:1"}
            await talk(int(routes["a"][address].rsplit(":")[1]))
            relay.stdin.write("report\n")
            relay.stdin.flush()
            expected = {"bytes": {"a": {"b": 5}, "b": {"a": 5}}}
            assert json.loads(await asyncio.to_thread(relay.stdout.readline)) == expected
            if end == "SIGTERM":
                relay.send_signal(signal.SIGTERM)
            else:
                relay.stdin.close()
            assert json.loads(await asyncio.to_thread(relay.stdout.readline)) == expected
            assert await asyncio.to_thread(relay.wait, 20) == 0
            assert relay.stderr.read() == ""

    run(scenario)


@pytest.mark.parametrize("text", [b"{", b"{}", b'{"links": [], "machines": [], "more": 1}'])
def test_the_process_refuses_a_configuration_it_cannot_read(process, text):
    relay = process(text)
    assert relay.wait(20) == 10
    assert relay.stderr.read().startswith("wan: ")
