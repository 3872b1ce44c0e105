"""Who is joined by the relay, how fast, and what ends a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fusion.base.errors import AuthError, NotFoundError, StateError, UnreachableError, WireError
from fusion.base.ids import NodeId
from fusion_coordinator import relay
from fusion_coordinator.relay import MAX_CONNECTIONS_OF_A_PAIR, MAX_DATA_BYTES, Budget, RelayHub

A, B, C = NodeId("node-a"), NodeId("node-b"), NodeId("node-c")


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Scene:
    """A hub whose pairs A-B may be joined, with what it told which node."""

    def __init__(self, rate: float = 1e12) -> None:
        self.clock = Clock()
        self.called: asyncio.Queue[tuple[NodeId, str]] = asyncio.Queue()
        self.friends = {A, B}
        self.hub = RelayHub(rate, self.clock, lambda *pair: set(pair) <= self.friends, self._call)

    def _call(self, node: NodeId, name: str) -> None:
        self.called.put_nowait((node, name))


class End:
    """One end of a connection: what it sends, and a task that collects what it gets."""

    def __init__(self, open_call: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes | None]]) -> None:
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.got: list[bytes | None] = []
        self._heard = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(open_call(self._data())))

    async def _data(self) -> AsyncIterator[bytes]:
        while (item := await self._sent.get()) is not None:
            yield item

    async def _run(self, answers: AsyncIterator[bytes | None]) -> None:
        async for item in answers:
            self.got.append(item)
            self._heard.set()

    def send(self, *items: bytes | None) -> None:
        for item in items:
            self._sent.put_nowait(item)

    async def hears(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.got) < count:
                self._heard.clear()
                await self._heard.wait()

    async def fails(self, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            async with asyncio.timeout(5):
                await self.task


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scene())  # type: ignore[arg-type]


async def joined(scene: Scene) -> tuple[End, End]:
    dialling = End(lambda data: scene.hub.connect(A, B, data))
    node, name = await scene.called.get()
    assert node == B
    answering = End(lambda data: scene.hub.accept(B, name, data))
    await dialling.hears(1)
    await answering.hears(1)
    assert dialling.got == answering.got == [None]  # nothing but that both are there
    return dialling, answering


def test_bytes_pass_both_ways_in_order_and_are_counted():
    async def scene():
        made = Scene()
        one, other = await joined(made)
        one.send(b"hello", b"again")
        other.send(b"yes")
        await other.hears(3)
        await one.hears(2)
        assert (one.got[1:], other.got[1:]) == ([b"yes"], [b"hello", b"again"])
        standing = made.hub.standing()
        assert list(standing) == [(A, B)]
        assert (standing[A, B].connections, standing[A, B].bytes) == (1, 13)
        one.send(b"last", None)  # closes behind it
        await asyncio.wait_for(asyncio.gather(one.task, other.task), 5)
        assert other.got[-1] == b"last"
        assert made.hub.standing() == {}

    play(scene)


def test_only_pairs_that_may_be_joined_are_and_nobody_takes_a_connection_that_is_for_another():
    async def scene():
        made = Scene()
        await End(lambda data: made.hub.connect(A, C, data)).fails(AuthError, "no peer of yours")
        await End(lambda data: made.hub.connect(A, A, data)).fails(AuthError, "no peer of yours")
        assert made.called.empty()
        End(lambda data: made.hub.connect(A, B, data))
        _, name = await made.called.get()
        for node, wrong in ((C, name), (A, name), (B, "relay-of-nobody")):
            await End(lambda data, n=node, w=wrong: made.hub.accept(n, w, data)).fails(NotFoundError, "waits for this")
        right = End(lambda data: made.hub.accept(B, name, data))
        await right.hears(1)
        await End(lambda data: made.hub.accept(B, name, data)).fails(NotFoundError, "waits for this")

    play(scene)


def test_a_pair_whose_job_has_ended_is_parted(monkeypatch):
    async def scene():
        monkeypatch.setattr(relay, "LOOK_S", -1.0)
        made = Scene()
        one, other = await joined(made)
        one.send(b"while it lasts")
        await other.hears(2)
        made.friends.clear()
        one.send(b"too late")
        await one.fails(AuthError, "no job in common")
        await asyncio.wait_for(other.task, 5)
        assert other.got == [None, b"while it lasts"]
        assert made.hub.standing() == {}

    play(scene)


def test_what_is_no_piece_of_data_ends_the_connection():
    async def scene():
        made = Scene()
        one, other = await joined(made)
        other.send(bytes(MAX_DATA_BYTES + 1))
        await other.fails(WireError, "data must have")
        await asyncio.wait_for(one.task, 5)

    play(scene)


def test_a_relay_without_a_rate_joins_nobody_and_a_node_that_does_not_come_is_not_waited_for_long(monkeypatch):
    async def scene():
        monkeypatch.setattr(relay, "ACCEPT_S", 0.01)
        made = Scene(rate=0)
        await End(lambda data: made.hub.connect(A, B, data)).fails(StateError, "relays nothing")
        made = Scene()
        await End(lambda data: made.hub.connect(A, B, data)).fails(UnreachableError, "did not come")

    play(scene)


def test_one_pair_has_a_limited_number_of_connections():
    async def scene():
        made = Scene()
        ends = [End(lambda data: made.hub.connect(A, B, data)) for _ in range(MAX_CONNECTIONS_OF_A_PAIR)]
        for _ in ends:
            await made.called.get()
        await End(lambda data: made.hub.connect(A, B, data)).fails(UnreachableError, "too many")
        End(lambda data: made.hub.connect(B, A, data))
        assert (await made.called.get())[0] == A

    play(scene)


def test_all_that_passes_together_is_no_faster_than_the_rate(monkeypatch):
    async def scene():
        clock = Clock()
        monkeypatch.setattr(relay.asyncio, "sleep", clock.sleep)
        budget = Budget(1000.0, clock)
        for _ in range(20):
            await budget.take(100)
        assert clock.now_s - 100.0 == pytest.approx(2.0, abs=0.1)  # 2,000 bytes at 1,000 bytes/s
        clock.now_s += 3600  # nothing is saved up meanwhile
        began_s = clock.now_s
        for _ in range(20):
            await budget.take(100)
        assert clock.now_s - began_s == pytest.approx(2.0, abs=0.1)

    play(scene)
