"""The gRPC transport against peers that are late, dead, frozen, from another run, someone else, or hostile."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from fusion.base.errors import AuthError, FusionError, StateError, UnreachableError
from fusion.base.ids import ClusterId, Epoch, Incarnation, JobId, StageIndex
from fusion.protocol.header import header_to_proto
from fusion.protocol.messages import Session
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role
from fusion.security.tls import node_server_name, server_credentials
from fusion.transport import dialling, streams
from fusion.transport.channels import DATA_PLANE_CLIENT_OPTIONS, DATA_PLANE_SERVER_OPTIONS, open_channel
from fusion.transport.frames import chunk_frame, frame, hello, parse_frame
from fusion.transport.streams import METHOD
from fusion.transport.striping import StreamCount
from fusion.wire.v1 import peer_pb2
from tests.support.transport import (
    CLUSTER,
    EPOCH,
    JOB,
    GrpcLab,
    Recorder,
    grpc_transport,
    header,
    no_thread_left,
    node_credentials,
    nominal,
    outgoing,
    wait_until,
)

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def start_two(first: dict, second: dict) -> list[BaseException | None]:
    """Start two stages with these settings; returns what each `start` raised. Both are closed."""
    credentials = first.pop("everybody", None) or node_credentials(2)
    routes: dict[str, str] = {}
    transports = [
        grpc_transport(number, credentials, routes=routes, **settings)
        for number, settings in enumerate((first, second))
    ]
    for number, transport in enumerate(transports):
        routes[nominal(number)] = f"127.0.0.1:{transport.listen()}"
    errors: list[BaseException | None] = [None, None]

    def start(number):
        try:
            transports[number].start(Recorder(), 20)
        except FusionError as error:
            errors[number] = error

    threads = [threading.Thread(target=start, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(errors), "a refusal")
    threads[errors.index(None) if None in errors else 0].join(0.7)
    for transport in transports:
        transport.close("the test is over")
    for thread in threads:
        thread.join()
    return errors


def test_f16_a_stale_epoch_is_refused_at_once_with_both_epochs():
    with no_thread_left():
        stale, _ = start_two({"epoch": Epoch(6)}, {"epoch": Epoch(7)})
    assert isinstance(stale, StateError)
    assert "stage 1 (node-1 at node-1.invalid:7445) refused: stale epoch 6, current 7" in str(stale)


def test_a_peer_of_an_older_epoch_gets_time_to_make_room_before_the_start_fails(monkeypatch):
    monkeypatch.setattr(dialling, "_OTHER_RUN_S", 0.5)
    _, newer = start_two({"epoch": Epoch(6)}, {"epoch": Epoch(7)})
    assert isinstance(newer, StateError | UnreachableError)


def test_a_worker_of_another_job_is_waited_for_and_then_named(monkeypatch):
    monkeypatch.setattr(dialling, "_OTHER_RUN_S", 0.5)
    errors = start_two({"job": JobId("job-bbbbbbbbbb")}, {})
    assert all(isinstance(error, StateError | UnreachableError) for error in errors)
    assert any("is not trained here; this worker trains" in str(error) for error in errors)


def test_another_incarnation_than_the_plan_names_is_refused():
    errors = start_two({"incarnation": Incarnation(99)}, {})
    assert any("stage 0 has incarnation 99, the plan names 100" in str(error) for error in errors)
    assert any(isinstance(error, StateError) for error in errors)


@pytest.mark.parametrize("same_cluster", [True, False])
def test_f21_a_peer_that_is_another_machine_than_the_plan_names_is_not_talked_to(same_cluster):
    everybody = node_credentials(3)
    wrong = everybody[2] if same_cluster else node_credentials(1)[0]
    errors = start_two({"everybody": everybody[:2]}, {"server_tls": server_credentials(wrong)})
    assert isinstance(errors[0], AuthError)
    assert "stage 1 (node-1 at node-1.invalid:7445) is another machine than the plan names" in str(errors[0])


def test_a_node_of_the_cluster_cannot_pass_for_another_stage():
    authority = CertificateAuthority.create(CLUSTER, time.time())
    one, two, third = (authority.new_credentials(Role.NODE, f"node-{number}", "", time.time()) for number in range(3))
    code, details = talk([one, two], [hello_frame()], caller=third)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == f"stage 1 is node {two.identity} by the plan, you are {third.identity}"


def test_an_owner_of_jobs_may_not_send_tensors():
    authority = CertificateAuthority.create(CLUSTER, time.time())
    one, two = (authority.new_credentials(Role.NODE, f"node-{number}", "", time.time()) for number in range(2))
    owner = authority.new_credentials(Role.OWNER, "somebody", "", time.time())
    code, _ = talk([one, two], [hello_frame()], caller=owner)
    assert code is grpc.StatusCode.PERMISSION_DENIED
    code, details = talk([one, two], [hello_frame()], caller=owner, interceptors=[])
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "only nodes of cluster testcluster exchange tensors" in details


def test_b33_a_certificate_of_another_cluster_gets_no_connection():
    stranger = node_credentials(1, ClusterId("othercluster"))[0]
    ours = node_credentials(2)
    trusting_us = type(stranger)(
        ours[0].cluster,
        stranger.identity,
        stranger.role,
        "x",
        "",
        stranger.key_pem,
        stranger.certificate_pem,
        ours[0].ca_pem,
    )
    code, _ = talk(ours, [hello_frame()], caller=trusting_us)
    assert code is grpc.StatusCode.UNAVAILABLE


# --- hostile or broken frames from a real peer -----------------------------------------------------------------


class Victim:
    """Stage 0 with its window and limit, to which the test itself plays stage 1."""

    def __init__(self, credentials, **settings):
        self.recorder = Recorder(hold=True)
        self.transport = grpc_transport(0, credentials, routes={nominal(1): "127.0.0.1:1"}, **settings)
        self.port = self.transport.listen()
        self._thread = threading.Thread(target=self._start)
        self._thread.start()

    def _start(self):
        with pytest.raises((UnreachableError, AuthError, StateError)):
            self.transport.start(self.recorder, 20)

    def close(self):
        self.transport.close("the test is over")
        self._thread.join()


def talk(credentials, frames, caller=None, options=DATA_PLANE_CLIENT_OPTIONS, compression=None, **settings):
    """Send frames as stage 1 would; returns the status that the stream ends with."""
    with no_thread_left():
        victim = Victim(credentials, **settings)
        channel = open_channel(
            f"127.0.0.1:{victim.port}",
            caller or credentials[1],
            node_server_name(CLUSTER, credentials[0].identity),
            options,
        )
        done = threading.Event()

        def requests():
            yield from frames
            done.wait(10)

        try:
            call = channel.stream_stream(METHOD)(requests(), compression=compression)
            with pytest.raises(grpc.RpcError):
                deque(map(parse_frame, call), maxlen=0)
            return call.code(), call.details()
        finally:
            done.set()
            channel.close()
            victim.close()


SESSION = Session(JOB, EPOCH, StageIndex(1), StageIndex(0), Incarnation(101), Incarnation(100))


def hello_frame() -> bytes:
    return frame(hello=hello(SESSION, answer=False))


def header_frame(number: int, size: int, *, edge: int = 3, urgent: bool = False, **changes) -> bytes:
    message = header_to_proto(
        SESSION, header(edge, step=7, micro_batch=2), message=number, sequence=number, payload_bytes=size, urgent=urgent
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return frame(header=message)


def chunk(number: int, offset: int, size: int) -> bytes:
    return chunk_frame(number, offset, memoryview(bytes(size)))


ABOUT = "activation edge 3 step 7 micro-batch 2"
HOSTILE = {
    "b13 random bytes": ([b"\xff\x00\x9c garbage"], "frame of 11 bytes is not a PeerFrame"),
    "b13 an empty frame": ([b""], "frame has no body"),
    "no hello": ([header_frame(1, 10)], "the first frame must be a hello"),
    "hello twice": ([hello_frame(), hello_frame()], "hello is not a frame that may come now"),
    "credit to the receiver": ([hello_frame(), frame(credit=10)], "credit is not a frame"),
    "b17 unknown kind": ([hello_frame(), header_frame(1, 10, kind=999)], "kind 999 edge 3 step 7 micro-batch 2: kind"),
    "f22 other job": ([hello_frame(), header_frame(1, 10, job_id="job-zzzzzzzzzz")], f"{ABOUT}: belongs to job"),
    "other incarnation": ([hello_frame(), header_frame(1, 10, incarnation=5)], f"{ABOUT}: incarnation 5"),
    "huge payload": ([hello_frame(), header_frame(1, 1 << 62)], f"{ABOUT}: payload of {1 << 62} bytes"),
    "wrong number": ([hello_frame(), header_frame(2, 10)], f"{ABOUT}: message number 2 follows 0"),
    "sequence goes back": (
        [hello_frame(), header_frame(1, 0), header_frame(2, 0, edge=4, sequence=1)],
        "sequence 1 follows 1",
    ),
    "b18 gap": ([hello_frame(), header_frame(1, 100), chunk(1, 0, 10), chunk(1, 20, 10)], f"{ABOUT}: chunk of 10"),
    "b18 overlap": ([hello_frame(), header_frame(1, 100), chunk(1, 0, 10), chunk(1, 5, 10)], f"{ABOUT}: chunk of 10"),
    "b18 offset beyond": ([hello_frame(), header_frame(1, 100), chunk(1, (1 << 64) - 1, 10)], f"{ABOUT}: chunk of 10"),
    "b18 too long": ([hello_frame(), header_frame(1, 100), chunk(1, 0, 101)], f"{ABOUT}: chunk of 101 bytes"),
    "b18 empty chunk": ([hello_frame(), header_frame(1, 100), chunk(1, 0, 0)], f"{ABOUT}: chunk of 0 bytes"),
    "b18 chunk of nothing": ([hello_frame(), chunk(1, 0, 10)], "chunk of message 1, which is not under way"),
    "b18 second header": (
        [hello_frame(), header_frame(1, 100), header_frame(2, 100, edge=4)],
        f"begins before {ABOUT} has ended",
    ),
    "goodbye too early": ([hello_frame(), header_frame(1, 100), frame(goodbye="x")], "goodbye in the middle"),
    "after goodbye": ([hello_frame(), frame(goodbye="x"), header_frame(1, 0)], "header is not a frame that may come"),
    "b22 rank 17": (
        [hello_frame(), frame(header=peer_pb2.Header(
            message=1, kind=1, job_id=JOB, epoch=EPOCH, incarnation=101, step=7, micro_batch=2, edge=3, sequence=1,
            codec="none", layout=peer_pb2.Layout(dtype="float32", shape=[1] * 17, strides=[1] * 17),
        ))],
        f"{ABOUT}: layout: 17 dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_b13_to_b22_what_breaks_the_protocol_ends_the_stream_with_invalid_argument(name):
    frames, words = HOSTILE[name]
    code, details = talk(node_credentials(2), frames, limit=lambda _header: 1000)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


def test_f22_a_header_of_an_older_epoch_is_refused_as_a_failed_precondition():
    code, details = talk(node_credentials(2), [hello_frame(), header_frame(1, 10, epoch=6)])
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, f"{ABOUT}: stale epoch 6, current 7")


def test_t26_a_flood_without_credit_is_stopped():
    frames = [hello_frame()]
    for number in range(1, 12):
        frames += [header_frame(number, 100, edge=number), chunk(number, 0, 100)]
    code, details = talk(node_credentials(2), frames, window_bytes=1000)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "edge 11 step 7 micro-batch 2: 100 bytes without credit; 1000 of 1000 are outstanding" in details


def test_b14_and_t11_a_message_beyond_4_mib_is_refused_also_when_it_is_compressed():
    options = (*DATA_PLANE_CLIENT_OPTIONS, ("grpc.max_send_message_length", 128 * MIB))
    options = tuple(item for item in options if item != ("grpc.max_send_message_length", 4 * MIB))
    bomb = chunk_frame(1, 0, memoryview(bytes(64 * MIB)))
    for compression in (None, grpc.Compression.Gzip):
        code, _ = talk(node_credentials(2), [hello_frame(), bomb], options=options, compression=compression)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_that_never_says_hello_is_ended(monkeypatch):
    monkeypatch.setattr(streams, "_HELLO_S", 0.2)
    code, details = talk(node_credentials(2), [])
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no hello" in details


# --- several streams for one link -------------------------------------------------------------------------------


def test_a_link_of_several_streams_loses_nothing_and_keeps_the_order_also_when_it_breaks():
    payloads = [bytes([edge + 1]) * (5 * MIB + edge) for edge in range(8)]
    seen: list[tuple[int, bytes]] = []
    with no_thread_left():
        two = GrpcLab(2, window_bytes=64 * MIB)
        outbox = two.transports[0]._peers[StageIndex(1)].outbox
        outbox.streams = FourStreams()
        assembler = two.transports[1]._peers[StageIndex(0)].assembler
        striped = threading.Event()

        def on_message(message):
            seen.append((int(message.header.edge), bytes(message.payload)))
            if assembler.striped:
                striped.set()
            message.release()

        two.recorders[1].on_message = on_message
        for edge, payload in enumerate(payloads):
            two.transports[0].send(1, outgoing(edge, payload))
            if edge == 4:
                wait_until(striped.is_set, "more than one stream") if seen else wait_until(lambda: seen, "the first")
                two.interrupt(0, 1)
        wait_until(lambda: len(seen) == 8, "everything")
        assert striped.wait(20)
        assert seen == list(enumerate(payloads))
        assert [recorder.lost for recorder in two.recorders] == [[], []]
        two.close()


class FourStreams(StreamCount):
    """Wants four streams from the first acknowledgement on."""

    def sample(self, count, seconds, now_s, trip_s=0.0):
        return self.streams

    def restart(self):
        self.streams = 4

    def __init__(self):
        super().__init__()
        self.streams = 4


# --- late, killed and frozen peers ------------------------------------------------------------------------------


def test_p1_a_peer_that_comes_up_later_is_met():
    credentials, routes = node_credentials(2), {}
    recorders = [Recorder(), Recorder()]
    with no_thread_left():
        early, late = (grpc_transport(number, credentials, routes=routes) for number in (0, 1))
        routes[nominal(0)] = f"127.0.0.1:{early.listen()}"
        placeholder = grpc_transport(1, credentials, routes=routes)
        port = placeholder.listen()
        placeholder.close("its port is all that was wanted")
        late = grpc_transport(1, credentials, routes=routes, listen=f"127.0.0.1:{port}")
        routes[nominal(1)] = f"127.0.0.1:{port}"
        starting = threading.Thread(target=early.start, args=(recorders[0], 30))
        starting.start()
        time.sleep(1.2)
        late.start(recorders[1], 30)
        starting.join()
        early.send(StageIndex(1), outgoing(1, b"there you are"))
        recorders[1].wait_messages(1)
        early.close("done")
        late.close("done")


def test_a_daemon_that_holds_the_port_until_its_worker_begins_is_waited_for():
    credentials, routes = node_credentials(2), {}
    recorders = [Recorder(), Recorder()]
    with no_thread_left():
        daemon = grpc.server(ThreadPoolExecutor(1))
        port = daemon.add_secure_port("127.0.0.1:0", server_credentials(credentials[1]))
        daemon.start()
        early = grpc_transport(0, credentials, routes=routes)
        routes |= {nominal(0): f"127.0.0.1:{early.listen()}", nominal(1): f"127.0.0.1:{port}"}
        errors: list[FusionError] = []

        def start():
            try:
                early.start(recorders[0], 30)
            except FusionError as error:
                errors.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        time.sleep(1.0)
        daemon.stop(None).wait()
        late = grpc_transport(1, credentials, routes=routes, listen=f"127.0.0.1:{port}")
        assert errors == []
        late.start(recorders[1], 30)
        starting.join()
        assert errors == []
        early.close("done")
        late.close("done")


def test_two_workers_cannot_listen_on_one_port():
    first, second = node_credentials(2)
    one = grpc_transport(0, [first, second])
    port = one.listen()
    other = grpc_transport(1, [first, second], listen=f"127.0.0.1:{port}")
    with pytest.raises(Exception, match=f"cannot listen on 127.0.0.1:{port}"):
        other.listen()
    one.close("done")


PEER = """
import sys, json, time
from pathlib import Path
from fusion.security.credentials import Credentials
from fusion.base.ids import NodeId, StageIndex
from tests.support.transport import Recorder, grpc_transport, nominal, outgoing
from fusion.transport.channels import DATA_PLANE_SERVER_OPTIONS
root, other = Path(sys.argv[1]), sys.argv[2]
credentials = [Credentials.load(root / name) for name in ("0", "1")]
transport = grpc_transport(1, credentials, routes={nominal(0): other})
print(transport.listen(), flush=True)
transport.start(Recorder(), 60)
transport.send(StageIndex(0), outgoing(1, b"ready"))
time.sleep(600)
"""

QUICK_CLIENT = (
    *(item for item in DATA_PLANE_CLIENT_OPTIONS if "keepalive_t" not in item[0] and "ping_timeout" not in item[0]),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
)


@pytest.fixture
def pair(tmp_path):
    """Stage 0 here, stage 1 in a process of its own."""
    credentials = node_credentials(2)
    for number, each in enumerate(credentials):
        each.save(tmp_path / str(number))
    recorder, routes = Recorder(), {}
    transport = grpc_transport(0, credentials, routes=routes, client_options=QUICK_CLIENT)
    command = [sys.executable, "-c", PEER, str(tmp_path), f"127.0.0.1:{transport.listen()}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        routes[nominal(1)] = f"127.0.0.1:{int(process.stdout.readline())}"
        transport.start(recorder, 60)
        recorder.wait_messages(1)
        yield transport, recorder, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        transport.close("the test is over")


def test_a_killed_process_is_lost_once(pair):
    transport, recorder, process = pair
    process.kill()
    recorder.wait_lost()
    transport.send(StageIndex(1), outgoing(2, b"dropped"))
    time.sleep(0.7)
    assert [peer for peer, _ in recorder.lost] == [1]
    assert "stage 1 (node-1 at node-1.invalid:7445): the connection broke" in recorder.lost[0][1]


@pytest.mark.slow
def test_a_frozen_process_is_lost_by_keepalive(pair):
    _, recorder, process = pair
    process.send_signal(signal.SIGSTOP)
    recorder.wait_lost()
    assert [peer for peer, _ in recorder.lost] == [1]


@pytest.mark.slow
def test_p3_an_idle_stream_survives_a_long_compute():
    """Keepalive 20 times as fast as in production, on both sides, idle for as many pings as 80 s would see."""
    quick_server = (
        *(item for item in DATA_PLANE_SERVER_OPTIONS if "keepalive_time" not in item[0] and "interval" not in item[0]),
        ("grpc.keepalive_time_ms", 1500),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    )
    credentials, routes = node_credentials(2), {}
    recorders = [Recorder(), Recorder()]
    transports = [
        grpc_transport(number, credentials, routes=routes, client_options=QUICK_CLIENT, server_options=quick_server)
        for number in (0, 1)
    ]
    for number, transport in enumerate(transports):
        routes[nominal(number)] = f"127.0.0.1:{transport.listen()}"
    threads = [
        threading.Thread(target=transport.start, args=(recorder, 30))
        for transport, recorder in zip(transports, recorders, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(5)
    for source in (0, 1):
        transports[source].send(StageIndex(1 - source), outgoing(1, b"still there"))
        recorders[1 - source].wait_messages(1)
    assert [recorder.lost for recorder in recorders] == [[], []]
    for transport in transports:
        transport.close("done")


def test_p3_our_server_takes_pings_as_often_as_our_clients_send_them():
    server, client = dict(DATA_PLANE_SERVER_OPTIONS), dict(DATA_PLANE_CLIENT_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_time_ms"] + client["grpc.http2.ping_timeout_ms"] <= 30_000


def test_p5_nothing_forks():
    """grpc and fork deadlock. Every process of ours is started afresh."""
    for path in [*ROOT.glob("fusion/**/*.py"), *ROOT.glob("node/**/*.py"), *ROOT.glob("coordinator/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in {"fork", "forkpty"}, path
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] == "multiprocessing" for module in modules), path


def test_a_broken_connection_ends_the_message_that_was_under_way():
    with no_thread_left():
        two = GrpcLab(window_bytes=256 * MIB)
        begun = threading.Event()

        def prepare():
            begun.set()
            return header(1), memoryview(bytearray(200 * MIB))

        two.transports[0].send(1, type(outgoing(1))(prepare=prepare))
        begun.wait(10)
        wait_until(lambda: two.transports[1].counters()[0][1].wire_bytes > MIB, "the first chunks")
        two.kill(1)
        two.recorders[0].wait_lost()
        two.recorders[1].wait_lost()
        assert two.recorders[1].messages == []
        two.close()


def test_a_sender_that_ends_waits_until_its_peer_has_used_what_a_slow_link_still_carries():
    with no_thread_left():
        two = GrpcLab(holding=(1,))
        go = threading.Event()

        def prepare():
            go.wait(10)  # stands for a link that has not come to it yet
            return header(1), memoryview(bytearray(MIB))

        two.transports[0].send(1, type(outgoing(1))(prepare=prepare))
        asked: list[int] = []

        def impatient() -> bool:
            asked.append(1)
            return len(asked) > 3

        two.transports[0].drain(10.0, impatient)
        assert len(asked) == 4
        assert two.recorders[1].messages == []
        two.transports[0].drain(0.1, lambda: False)  # nothing moves
        drained = threading.Thread(target=two.transports[0].drain, args=(10.0, lambda: False))
        drained.start()
        go.set()
        two.recorders[1].wait_messages(1)
        assert drained.is_alive()  # it has come, and is not used yet
        two.recorders[1].messages[0].release()
        drained.join(10)
        assert not drained.is_alive()
        two.close()
