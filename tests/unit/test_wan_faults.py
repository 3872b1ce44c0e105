"""Links of the emulated WAN fail on demand: what each fault lets through, and what not."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from fusion.base.errors import ConfigError
from fusion.cli.wan import Machine, WanLink, WanRelay
from fusion.cli.wanfaults import Fault
from tests.support.loops import run

QUIET_S = 0.15  #: nothing that would come takes so long on loopback
THERE, BACK = ("a", "b"), ("b", "a")


class Far:
    """A server that keeps its connections' ends, so that tests see what arrives there."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def connected(self, reader, writer) -> None:
        await self.ends.put((reader, writer))


@asynccontextmanager
async def relayed():
    """A relay from machine a to machine b, the port to dial, and b's server."""
    far = Far()
    async with await asyncio.start_server(far.connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        links = [WanLink("x", "x", 0, 0)]
        relay = WanRelay(links, [Machine("a", "x", "127.0.0.1:1"), Machine("b", "x", f"127.0.0.1:{port}")])
        routes = await relay.start()
        yield relay, int(routes["a"][f"127.0.0.1:{port}"].rsplit(":")[1]), far
        await relay.close()
        while not far.ends.empty():
            far.ends.get_nowait()[1].close()


async def connect(port: int, far: Far):
    near = await asyncio.open_connection("127.0.0.1", port)
    near[1].write(b"hello")
    end = await far.ends.get()
    assert await end[0].readexactly(5) == b"hello"
    return near, end


async def nothing_comes(reader: asyncio.StreamReader) -> bool:
    try:
        return not await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(_peek(reader))), QUIET_S)
    except TimeoutError:
        return True


async def _peek(reader: asyncio.StreamReader) -> bool:
    """True once there is a byte, an end or an error."""
    while not (reader._buffer or reader.at_eof() or reader.exception()):  # type: ignore[attr-defined]
        await asyncio.sleep(0.005)
    return True


def test_a_stalled_way_holds_bytes_and_the_other_direction_goes_on():
    async def scenario():
        async with relayed() as (relay, port, far):
            (near_in, near_out), (far_in, far_out) = await connect(port, far)
            relay.apply(Fault("stall", (THERE,)))
            near_out.write(b"ping")
            far_out.write(b"pong")
            assert await near_in.readexactly(4) == b"pong"
            assert await nothing_comes(far_in)
            relay.apply(Fault("heal", (THERE,)))
            assert await far_in.readexactly(4) == b"ping"
            near_out.close()
            far_out.close()

    run(scenario)


def test_the_end_of_a_connection_does_not_get_through_a_partition():
    async def scenario():
        async with relayed() as (relay, port, far):
            (_, near_out), (far_in, far_out) = await connect(port, far)
            relay.apply(Fault("stall", (THERE, BACK)))
            near_out.transport.abort()
            assert await nothing_comes(far_in)
            relay.apply(Fault("heal", (THERE, BACK)))
            assert await far_in.read() == b""
            far_out.close()

    run(scenario)


def test_half_open_the_target_is_reset_and_the_dialler_hears_nothing():
    async def scenario():
        async with relayed() as (relay, port, far):
            (near_in, near_out), (far_in, far_out) = await connect(port, far)
            relay.apply(Fault("half-open", (THERE,)))
            with pytest.raises(ConnectionResetError):
                await far_in.read()
            near_out.write(b"anybody?")
            assert await nothing_comes(near_in)
            far_out.close()
            near_out.close()

    run(scenario)


def test_a_reset_breaks_both_ends_and_a_new_connection_works():
    async def scenario():
        async with relayed() as (relay, port, far):
            (near_in, near_out), (far_in, far_out) = await connect(port, far)
            relay.apply(Fault("reset", (THERE,)))
            for reader in (near_in, far_in):
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            (_, again), (_, end) = await connect(port, far)
            for writer in (near_out, far_out, again, end):
                writer.close()

    run(scenario)


def test_a_link_that_refuses_resets_new_connections_until_it_is_healed():
    async def scenario():
        async with relayed() as (relay, port, far):
            relay.apply(Fault("refuse", (THERE,)))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            writer.close()
            assert far.ends.empty()
            relay.apply(Fault("heal", (THERE,)))
            (_, near_out), (_, far_out) = await connect(port, far)
            near_out.close()
            far_out.close()

    run(scenario)


def test_a_shaped_way_has_its_own_rate_until_it_is_healed():
    async def scenario():
        async with relayed() as (relay, port, far):
            (_, near_out), (far_in, far_out) = await connect(port, far)
            loop = asyncio.get_running_loop()
            relay.apply(Fault("shape", (THERE,), rate_bytes_per_s=100_000, delay_s=0.02, jitter_s=0.01))
            began_s = loop.time()
            near_out.write(b"x" * 30_000)
            await far_in.readexactly(30_000)
            assert loop.time() - began_s >= 0.3
            relay.apply(Fault("heal", (THERE,)))
            near_out.write(b"y")
            assert await far_in.readexactly(1) == b"y"
            near_out.close()
            far_out.close()

    run(scenario)


def test_a_fault_between_unknown_machines_is_refused():
    async def scenario():
        async with relayed() as (relay, _, _):
            with pytest.raises(ConfigError, match="no way a -> z"):
                relay.apply(Fault("stall", (("a", "z"),)))

    run(scenario)
