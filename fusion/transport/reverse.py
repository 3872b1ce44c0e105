"""Connections to peers that this end cannot dial, over calls that they make to us.

The peer keeps a call of Relay.Accept waiting here. Whoever dials the peer here connects to a port of its own on the
loopback interface, and comes out, over that call, at the peer's data plane: the end that can dial has dialled, and the
connection carries what goes the other way. What passes is the same TLS as on a connection that we dialled.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc

from fusion.base.address import join_address
from fusion.base.units import KIB
from fusion.security.tls import caller
from fusion.wire.v1 import relay_pb2

__all__ = ["WAITING_CALLS", "ReverseDoor"]

WAITING_CALLS = 2  #: that a peer keeps here, at most, beside those in use
_SERVICE, _METHOD = "fusion.wire.v1.Relay", "Accept"
_LOOK_S = 0.1  #: between two looks whether a waiting call is still wanted
_PIECE_BYTES = 128 * KIB
_ENDED = (grpc.RpcError, OSError)


class ReverseDoor:
    """One loopback port for each of the nodes named; `close` ends everything."""

    def __init__(self, nodes: Collection[str]) -> None:
        self._closed = threading.Event()
        self._listeners = {node: socket.create_server(("127.0.0.1", 0)) for node in nodes}
        self._arrived: dict[str, queue.Queue[socket.socket]] = {node: queue.Queue() for node in nodes}
        for node, listener in self._listeners.items():
            threading.Thread(target=self._listen, args=(node, listener), name="fusion-reverse", daemon=True).start()

    def address(self, node: str) -> str | None:
        """Return where to dial instead of the node's own address; None for one that can be dialled."""
        listener = self._listeners.get(node)
        return None if listener is None else join_address("127.0.0.1", listener.getsockname()[1])

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the service that the peers call."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._accept, relay_pb2.RelayFrame.FromString, relay_pb2.RelayFrame.SerializeToString
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})

    def close(self) -> None:
        """Listen no more, and let the calls end that wait."""
        self._closed.set()
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _listen(self, node: str, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arrived[node].put(connection)

    def _accept(self, requests: Iterator[relay_pb2.RelayFrame], context: Any) -> Iterator[relay_pb2.RelayFrame]:
        node = caller(context).identity
        if node not in self._arrived:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"node {node} is dialled from here, or is no peer")
        connection = self._next(node, context.is_active)
        if connection is None:
            return
        try:
            yield relay_pb2.RelayFrame(opened=relay_pb2.RelayOpened())
            feeding = threading.Thread(target=_feed, args=(requests, connection), name="fusion-reverse", daemon=True)
            feeding.start()
            yield from _pieces(connection)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _next(self, node: str, wanted: Callable[[], bool]) -> socket.socket | None:
        """Return the next connection that somebody here makes to the node; None once nobody waits for it."""
        while wanted() and not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                return self._arrived[node].get(timeout=_LOOK_S)
        return None


def _pieces(connection: socket.socket) -> Iterator[relay_pb2.RelayFrame]:
    with contextlib.suppress(OSError):
        while data := connection.recv(_PIECE_BYTES):
            yield relay_pb2.RelayFrame(data=data)


def _feed(requests: Iterator[relay_pb2.RelayFrame], connection: socket.socket) -> None:
    with contextlib.suppress(*_ENDED):
        for frame in requests:
            if frame.WhichOneof("body") == "data":  # the first one only says that it waits
                connection.sendall(frame.data)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
