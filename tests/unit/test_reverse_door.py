"""Peers that cannot be dialled call, and are reached over their call; others are sent away."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.base.address import split_address
from fusion.transport import reverse
from fusion.transport.reverse import ReverseDoor
from fusion.wire.v1.relay_pb2 import RelayFrame


class RefusedError(Exception):
    pass


class Call:
    """A call of a node, as its server sees it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._requests: queue.Queue[RelayFrame | None] = queue.Queue()
        self.send(RelayFrame(connection=""))

    def is_active(self) -> bool:
        return True

    def abort(self, code: Any, words: str) -> None:
        raise RefusedError(f"{code.name}: {words}")

    def send(self, frame: RelayFrame | None) -> None:
        self._requests.put(frame)

    def requests(self) -> Iterator[RelayFrame]:
        while (frame := self._requests.get()) is not None:
            yield frame


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReverseDoor]:
    monkeypatch.setattr(reverse, "caller", lambda context: SimpleNamespace(identity=context.node))
    made = ReverseDoor(["hidden"])
    yield made
    made.close()


def test_what_is_dialled_here_comes_out_at_the_peer_that_has_called(door: ReverseDoor):
    assert door.address("other") is None
    address = door.address("hidden")
    assert address is not None
    call = Call("hidden")
    answers = door._accept(call.requests(), call)
    with socket.create_connection(split_address("address", address), 5) as dialled:
        assert next(answers).WhichOneof("body") == "opened"
        dialled.sendall(b"there")
        assert next(answers).data == b"there"
        call.send(RelayFrame(data=b"and back"))
        threading.Thread(target=list, args=(answers,)).start()
        assert dialled.recv(100) == b"and back"
        call.send(None)  # the peer has closed
        assert dialled.recv(100) == b""


def test_only_the_peers_that_cannot_be_dialled_may_call(door: ReverseDoor):
    call = Call("stranger")
    with pytest.raises(RefusedError, match="PERMISSION_DENIED: node stranger"):
        next(door._accept(call.requests(), call))


def test_a_call_that_waits_ends_when_the_stage_does(door: ReverseDoor):
    call = Call("hidden")
    answers = door._accept(call.requests(), call)
    threading.Timer(0.05, door.close).start()
    assert list(answers) == []
