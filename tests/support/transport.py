"""Stages in one process over either transport, with real TLS and sockets for gRPC, and cables that can be cut."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fusion.base.ids import ClusterId, EdgeId, Epoch, Incarnation, JobId, NodeId, StageIndex
from fusion.base.layout import TensorLayout
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Credentials, Role
from fusion.security.roles import Access, Authorizer
from fusion.transport.base import Incoming, Outgoing, Transport
from fusion.transport.grpc import GrpcTransport, PeerInfo
from fusion.transport.memory import MemoryNetwork

JOB, EPOCH, CLUSTER = JobId("job-aaaaaaaaaa"), Epoch(7), ClusterId("testcluster")
WAIT_S = 20.0  #: a test gives up after that; nothing is expected to take nearly as long


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Return when `condition` holds; fail the test if it does not within the time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


class Recorder:
    """A receiver that keeps what it gets; releases payloads at once unless told to hold them."""

    def __init__(self, *, hold: bool = False) -> None:
        self.messages: list[Incoming] = []
        self.payloads: list[bytes] = []
        self.lost: list[tuple[int, str]] = []
        self.hold = hold
        self._changed = threading.Condition()

    def on_message(self, message: Incoming) -> None:
        with self._changed:
            self.messages.append(message)
            self.payloads.append(bytes(message.payload) if len(message.payload) <= 1 << 20 else b"")
            self._changed.notify_all()
        if not self.hold:
            message.release()

    def on_lost(self, peer: StageIndex, reason: str) -> None:
        with self._changed:
            self.lost.append((int(peer), reason))
            self._changed.notify_all()

    def edges(self) -> list[int]:
        """Edge numbers of the messages so far, in their order of arrival."""
        with self._changed:
            return [int(message.header.edge) for message in self.messages]

    def wait_messages(self, number: int) -> None:
        self._wait(lambda: len(self.messages) >= number, f"{number} messages, {len(self.messages)} came")

    def wait_lost(self, number: int = 1) -> None:
        self._wait(lambda: len(self.lost) >= number, f"{number} losses")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), f"waited for {what}"


def header(edge: int, *, step: int = 1, micro_batch: int = 0, kind: MessageKind = MessageKind.ACTIVATION, **more):
    return MessageHeader(kind=kind, step=step, micro_batch=micro_batch, edge=EdgeId(edge), **more)


def tensor_header(edge: int, elements: int, **more) -> MessageHeader:
    return header(edge, layout=TensorLayout("uint8", (elements,), (1,), 0), requires_grad=True, **more)


def outgoing(edge: int, payload: bytes | bytearray | memoryview = b"", *, urgent: bool = False, **more) -> Outgoing:
    return Outgoing(prepare=lambda: (header(edge, **more), payload), urgent=urgent)


class Cable:
    """A TCP forwarder on loopback for one target; `cut` resets every connection, as a dead machine's kernel does."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._cut = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                if self._cut:
                    return
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Break the connections that stand; new ones get through."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._cut = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()


class MemoryLab:
    """Stages that talk through memory."""

    kind = "memory"

    def __init__(self, stages: int = 2, *, window_bytes: int = 1 << 20, limit=lambda _header: 1 << 40, holding=()):
        self.recorders = [Recorder(hold=number in holding) for number in range(stages)]
        names = [StageIndex(number) for number in range(stages)]
        self._network = MemoryNetwork(names, window_bytes=window_bytes, limit=limit)
        self.transports: list[Transport] = [self._network.transport(name) for name in names]
        start_all(self.transports, self.recorders)

    def kill(self, stage: int) -> None:
        self._network.kill(StageIndex(stage))

    def interrupt(self, source: int, target: int) -> None:
        self._network.interrupt(StageIndex(source), StageIndex(target))

    def close(self) -> None:
        for transport in self.transports:
            transport.close("the test is over")


class GrpcLab:
    """Stages that talk over mutual TLS on loopback, every connection through a cable of its own."""

    kind = "grpc"

    def __init__(self, stages: int = 2, *, window_bytes: int = 1 << 20, limit=lambda _header: 1 << 40, holding=()):
        self.recorders = [Recorder(hold=number in holding) for number in range(stages)]
        self.credentials = node_credentials(stages)
        self.routes: list[dict[str, str]] = [{} for _ in range(stages)]
        self.transports = [
            grpc_transport(number, self.credentials, routes=self.routes[number], window_bytes=window_bytes, limit=limit)
            for number in range(stages)
        ]
        self._cables: dict[tuple[int, int], Cable] = {}
        for target, transport in enumerate(self.transports):
            port = transport.listen()
            for source in range(stages):
                if source != target:
                    cable = self._cables[source, target] = Cable(("127.0.0.1", port))
                    self.routes[source][nominal(target)] = cable.address
        start_all(self.transports, self.recorders)

    def interrupt(self, source: int, target: int) -> None:
        self._cables[source, target].reset()

    def kill(self, stage: int) -> None:
        for pair, cable in self._cables.items():
            if stage in pair:
                cable.cut()

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.transports)) as pool:
            list(pool.map(lambda transport: transport.close("the test is over"), self.transports))
        for cable in self._cables.values():
            cable.cut()


def start_all(transports: Sequence[Transport], recorders: Sequence[Recorder]) -> None:
    with ThreadPoolExecutor(len(transports)) as pool:
        list(pool.map(lambda pair: pair[0].start(pair[1], WAIT_S), zip(transports, recorders, strict=True)))


def nominal(stage: int) -> str:
    """The address that the plan names for a stage; routes lead from it to where the stage really listens."""
    return f"node-{stage}.invalid:7445"


def node_credentials(stages: int, cluster: ClusterId = CLUSTER) -> list[Credentials]:
    authority = CertificateAuthority.create(cluster, time.time())
    return [
        authority.new_credentials(Role.NODE, f"node-{number}", "127.0.0.1:1", time.time()) for number in range(stages)
    ]


def peers_of(stage: int, credentials: Sequence[Credentials]) -> dict[StageIndex, PeerInfo]:
    return {
        StageIndex(number): PeerInfo(NodeId(each.identity), each.name, nominal(number), Incarnation(100 + number))
        for number, each in enumerate(credentials)
        if number != stage
    }


def grpc_transport(stage: int, everybody: Sequence[Credentials], **more) -> GrpcTransport:
    settings = {
        "job": JOB,
        "epoch": EPOCH,
        "incarnation": Incarnation(100 + stage),
        "peers": peers_of(stage, everybody),
        "credentials": everybody[stage],
        "interceptors": [Authorizer(Access(everybody[stage].cluster))],
        "limit": lambda _header: 1 << 40,
        "listen": "127.0.0.1:0",
    } | more
    return GrpcTransport(stage=StageIndex(stage), **settings)


@contextlib.contextmanager
def no_thread_left(timeout_s: float = 10.0) -> Iterator[None]:
    """Fail if threads that began inside are still there some time after the end."""
    before = set(threading.enumerate())
    yield
    end_s = time.monotonic() + timeout_s
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < end_s, f"threads left: {left}"
        time.sleep(0.02)
