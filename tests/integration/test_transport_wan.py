"""Workers' streams over links with a WAN's rate and delay."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fusion.cli.wan import Machine, WanLink, WanRelay
from tests.support.transport import (
    Recorder,
    grpc_transport,
    no_thread_left,
    node_credentials,
    nominal,
    outgoing,
    start_all,
    wait_until,
)

RATE, DELAY_S = 4_000_000.0, 0.03


class RelayThread:
    """A relay between two machines on an event loop of its own."""

    def __init__(self, ports: list[int]) -> None:
        links = [WanLink("here", "there", RATE, DELAY_S), WanLink("there", "here", RATE, DELAY_S)]
        places = ("here", "there")
        machines = [Machine(f"node-{k}", places[k], f"127.0.0.1:{port}") for k, port in enumerate(ports)]
        self._relay = WanRelay(links, machines)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.routes = self._call(self._relay.start())

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def close(self) -> dict[str, dict[str, int]]:
        self._call(self._relay.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return self._relay.report()


@pytest.mark.parametrize("most_bytes", [8_000_000, 150_000])
def test_a_window_grows_to_fill_a_long_link_within_the_memory_for_it(most_bytes: int) -> None:
    credentials, recorders = node_credentials(2), [Recorder(), Recorder()]
    routes: list[dict[str, str]] = [{}, {}]
    transports = [
        grpc_transport(number, credentials, routes=routes[number], window_bytes=100_000, most_window_bytes=most_bytes)
        for number in (0, 1)
    ]
    ports = [transport.listen() for transport in transports]
    relay = RelayThread(ports)
    for number in (0, 1):
        other = 1 - number
        routes[number][nominal(other)] = relay.routes[f"node-{number}"][f"127.0.0.1:{ports[other]}"]
    start_all(transports, recorders)
    recorders[1].on_message = lambda message: message.release()
    sent = 0
    path = 2 * DELAY_S * RATE  # 240 kB
    while transports[1].windows()[0] < min(most_bytes, 100_000 + 2 * path) and sent < 400:
        for _ in range(20):
            transports[0].send(1, outgoing(sent, bytes(50_000)))
            sent += 1
        wait_until(lambda count=sent: transports[1].counters()[0][1].messages == count, "the messages")
    window = transports[1].windows()[0]
    for transport in transports:
        transport.close("done")
    relay.close()
    if most_bytes == 150_000:
        assert window == most_bytes
    else:
        assert 100_000 + 2 * path <= window <= most_bytes


def test_tensors_and_verdicts_cross_a_slow_link():
    credentials, recorders = node_credentials(2), [Recorder(), Recorder()]
    routes: list[dict[str, str]] = [{}, {}]
    with no_thread_left():
        transports = [grpc_transport(number, credentials, routes=routes[number]) for number in (0, 1)]
        ports = [transport.listen() for transport in transports]
        relay = RelayThread(ports)
        for number in (0, 1):
            other = 1 - number
            routes[number][nominal(other)] = relay.routes[f"node-{number}"][f"127.0.0.1:{ports[other]}"]
        start_all(transports, recorders)
        began_s = time.monotonic()
        transports[0].send(1, outgoing(1, bytes(2_000_000)))
        transports[0].send(1, outgoing(2, b"verdict", urgent=True))
        transports[1].send(0, outgoing(3, bytes(500_000)))
        recorders[1].wait_messages(2)
        recorders[0].wait_messages(1)
        taken_s = time.monotonic() - began_s
        _, got = transports[1].counters()[0]
        _, back = transports[0].counters()[1]
        transports[0].close("done")
        transports[1].close("done")
        carried = relay.close()
    assert taken_s >= 2_000_000 / RATE / 1.1 + DELAY_S
    assert recorders[1].edges() == [2, 1]
    assert 2_000_000 < carried["node-0"]["node-1"] < 2_200_000
    assert 500_000 < carried["node-1"]["node-0"] < 700_000
    for counters, size in ((got, 2_000_000), (back, 500_000)):  # the receivers see the link's goodput
        assert 0 < size - counters.timed_bytes < 65_536
        assert 0.6 * RATE < counters.timed_bytes / counters.busy_s < 1.5 * RATE
    assert [recorder.lost for recorder in recorders] == [[], []]
