"""What every transport keeps, run against the in-memory one and against gRPC over mutual TLS."""

from __future__ import annotations

import threading
import time

import pytest

from fusion.base.errors import UnreachableError, WireError
from fusion.base.ids import StageIndex
from fusion.base.layout import TensorLayout
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.transport.base import Outgoing
from fusion.transport.memory import MemoryNetwork
from tests.support.transport import (
    GrpcLab,
    MemoryLab,
    Recorder,
    grpc_transport,
    header,
    no_thread_left,
    node_credentials,
    outgoing,
    tensor_header,
    wait_until,
)

MIB = 1 << 20


@pytest.fixture(params=[MemoryLab, GrpcLab], ids=["memory", "grpc"])
def lab(request):
    """Builds a lab of the given transport; closes all of them, and no thread may be left behind."""
    labs = []

    def build(*args, **settings):
        labs.append(request.param(*args, **settings))
        return labs[-1]

    with no_thread_left():
        yield build
        for each in labs:
            each.close()


def test_messages_of_one_class_arrive_in_the_order_they_were_sent(lab):
    two = lab()
    for edge in range(200):
        two.transports[0].send(1, outgoing(edge, bytes([edge]) * (edge * 7)))
    two.recorders[1].wait_messages(200)
    assert two.recorders[1].edges() == list(range(200))
    assert two.recorders[1].payloads == [bytes([edge]) * (edge * 7) for edge in range(200)]


def test_a_header_arrives_as_it_was_sent(lab):
    two = lab()
    sent = MessageHeader(
        kind=MessageKind.GRADIENT,
        step=123456,
        micro_batch=7,
        edge=3,
        layout=TensorLayout("bfloat16", (2, 3, 4), (1, 8, 2), 5),
        requires_grad=True,
        codec="none",
    )
    two.transports[1].send(0, Outgoing(prepare=lambda: (sent, b"x" * 48)))
    two.recorders[0].wait_messages(1)
    message = two.recorders[0].messages[0]
    assert message.header == sent
    assert message.source == 1
    assert bytes(message.payload) == b"x" * 48


def test_an_urgent_message_overtakes_a_bulk_message_that_is_under_way(lab):
    two = lab(window_bytes=64 * MIB)

    def prepare():
        two.transports[0].send(1, outgoing(2, b"verdict", urgent=True))
        return header(1), bytes(20 * MIB)

    two.transports[0].send(1, Outgoing(prepare=prepare))
    two.recorders[1].wait_messages(2)
    assert two.recorders[1].edges() == [2, 1]


def test_urgent_messages_keep_their_own_order_and_need_no_credit(lab):
    two = lab(window_bytes=1000, holding={1})
    two.transports[0].send(1, outgoing(1, bytes(1000)))
    two.transports[0].send(1, outgoing(2, bytes(1000)))
    two.recorders[1].wait_messages(1)
    for edge in range(10, 20):
        two.transports[0].send(1, outgoing(edge, bytes(60_000), urgent=True))
    two.recorders[1].wait_messages(11)
    assert two.recorders[1].edges() == [1, *range(10, 20)]
    two.recorders[1].messages[0].release()
    two.recorders[1].wait_messages(12)
    assert two.recorders[1].edges()[-1] == 2


def test_a_large_payload_arrives_whole(lab):
    two = lab(window_bytes=64 * MIB)
    payload = bytes(range(256)) * (10 * MIB // 256) + b"end"
    received = []
    two.recorders[1].on_message = lambda message: received.append(bytes(message.payload))
    two.transports[0].send(1, Outgoing(prepare=lambda: (tensor_header(0, len(payload)), memoryview(payload))))
    wait_until(lambda: received, "the payload")
    assert received == [payload]


def test_messages_without_payload_and_absent_ones_arrive(lab):
    two = lab(window_bytes=10)
    two.transports[0].send(1, outgoing(1, b""))
    two.transports[0].send(1, outgoing(2, b"", absent=True, kind=MessageKind.GRADIENT))
    empty = TensorLayout("float32", (0, 5), (5, 1), 0)
    two.transports[0].send(1, outgoing(3, bytearray(), layout=empty))
    two.recorders[1].wait_messages(3)
    first, second, third = two.recorders[1].messages
    assert (len(first.payload), first.header.absent) == (0, False)
    assert (len(second.payload), second.header.absent) == (0, True)
    assert third.header.layout == empty


def test_many_stages_send_to_each_other_at_once(lab):
    four = lab(4, window_bytes=300_000)

    def send_all(source):
        for edge in range(40):
            for target in range(4):
                if target != source:
                    payload = bytes([source, target, edge]) * 4000
                    four.transports[source].send(target, outgoing(edge, payload, urgent=edge % 10 == 0))

    threads = [threading.Thread(target=send_all, args=(source,)) for source in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target, recorder in enumerate(four.recorders):
        recorder.wait_messages(120)
        for source in set(range(4)) - {target}:
            came = [
                (int(message.header.edge), payload)
                for message, payload in zip(recorder.messages, recorder.payloads, strict=True)
                if message.source == source
            ]
            bulk = [edge for edge, _ in came if edge % 10]
            assert bulk == [edge for edge in range(40) if edge % 10]
            assert sorted(came) == [(edge, bytes([source, target, edge]) * 4000) for edge in range(40)]
    assert four.transports[2].bytes_sent() == {0: 480_000, 1: 480_000, 3: 480_000}


def test_a_receiver_that_does_not_release_stops_the_sender_and_bounds_its_memory(lab):
    two = lab(window_bytes=MIB, holding={1})
    prepared = []

    def make(edge):
        def prepare():
            prepared.append(edge)
            return header(edge), bytes(MIB // 4)

        return Outgoing(prepare=prepare)

    for edge in range(20):
        two.transports[0].send(1, make(edge))
    two.recorders[1].wait_messages(4)
    wait_until(lambda: len(prepared) == 5, "the fifth to be prepared")
    time.sleep(0.2)  # nothing more may come: there is no event to wait for
    assert (two.recorders[1].edges(), prepared) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    two.recorders[1].messages[0].release()
    two.recorders[1].messages[0].release()  # the second time does nothing
    two.recorders[1].wait_messages(5)
    time.sleep(0.2)
    assert two.recorders[1].edges() == [0, 1, 2, 3, 4]
    for number in range(1, 20):
        two.recorders[1].wait_messages(number + 1)
        two.recorders[1].messages[number].release()
    assert two.recorders[1].edges() == list(range(20))


def test_p2_a_message_larger_than_the_whole_window_passes_when_nothing_else_is_outstanding(lab):
    two = lab(window_bytes=MIB, holding={1})
    two.transports[0].send(1, outgoing(0, bytes(1000)))
    two.transports[0].send(1, outgoing(1, bytes(9 * MIB)))
    two.transports[0].send(1, outgoing(2, bytes(1000)))
    two.recorders[1].wait_messages(1)
    time.sleep(0.1)
    assert two.recorders[1].edges() == [0]
    two.recorders[1].messages[0].release()
    two.recorders[1].wait_messages(2)
    assert len(two.recorders[1].messages[1].payload) == 9 * MIB
    assert two.recorders[1].edges() == [0, 1]
    two.recorders[1].messages[1].release()
    two.recorders[1].wait_messages(3)


def test_send_never_blocks_and_prepare_runs_on_another_thread(lab):
    two = lab(window_bytes=1000, holding={1})
    gate, threads = threading.Event(), []

    def prepare():
        threads.append(threading.current_thread())
        assert gate.wait(20)
        return header(0), bytes(1000)

    two.transports[0].send(1, Outgoing(prepare=prepare))
    for edge in range(1, 500):  # neither a slow encoder nor a missing credit holds up the caller
        two.transports[0].send(1, outgoing(edge, bytes(1000)))
    assert two.recorders[1].messages == []
    gate.set()
    two.recorders[1].wait_messages(1)
    assert threads[0] is not threading.current_thread()
    two.recorders[1].hold = False
    two.recorders[1].messages[0].release()
    two.recorders[1].wait_messages(500)


def test_sent_is_called_with_the_bytes_on_the_wire(lab):
    two = lab(window_bytes=8 * MIB)
    sent = []
    two.transports[0].send(1, Outgoing(prepare=lambda: (header(1), bytes(3 * MIB)), sent=sent.append))
    two.transports[0].send(1, Outgoing(prepare=lambda: (header(2), b""), sent=sent.append))
    two.recorders[1].wait_messages(2)
    wait_until(lambda: len(sent) == 2, "both to be reported")
    assert 3 * MIB < sent[0] < 3 * MIB + 1000
    assert 0 < sent[1] < 200


def test_counters_tell_what_went_each_way_and_what_waited_for_credit(lab):
    two = lab(window_bytes=1000, holding={1})
    for edge in range(2):
        two.transports[0].send(1, outgoing(edge, bytes(1000)))
    two.recorders[1].wait_messages(1)
    time.sleep(0.2)
    two.recorders[1].messages[0].release()
    two.recorders[1].wait_messages(2)
    wait_until(lambda: two.transports[0].bytes_sent() == {1: 2000}, "the counters")
    sent, received = two.transports[0].counters()[1][0], two.transports[1].counters()[0][1]
    assert (sent.messages, received.messages) == (2, 2)
    assert received.payload_bytes == 2000
    assert received.wire_bytes == sent.wire_bytes > 2000
    assert sent.blocked_s > 0.1


def test_the_loss_of_a_peer_is_told_once_to_each_of_the_others(lab):
    three = lab(3)
    three.transports[0].send(2, outgoing(0, b"before"))
    three.recorders[2].wait_messages(1)
    three.kill(2)
    three.recorders[0].wait_lost()
    three.recorders[1].wait_lost()
    three.transports[0].send(2, outgoing(1, b"dropped"))
    three.transports[0].send(1, outgoing(2, b"still connected"))
    three.recorders[1].wait_messages(1)
    time.sleep(0.2)
    for survivor in (0, 1):
        assert [peer for peer, _ in three.recorders[survivor].lost] == [2]
        assert "2" in three.recorders[survivor].lost[0][1]
        assert "\n" not in three.recorders[survivor].lost[0][1]
    assert three.recorders[2].edges() == [0]


def test_f37_a_stream_that_breaks_in_a_message_goes_on_and_nothing_is_lost_or_repeated(lab):
    two = lab(window_bytes=64 * MIB)
    payloads = [bytes([edge + 1]) * (3 * MIB + edge) for edge in range(6)]
    seen: list[tuple[int, bytes]] = []
    seen_urgent: list[int] = []

    def on_message(message):
        edge = int(message.header.edge)
        if edge < 100:
            seen.append((edge, bytes(message.payload)))
        else:
            seen_urgent.append(edge)
        message.release()

    two.recorders[1].on_message = on_message
    for edge, payload in enumerate(payloads):
        two.transports[0].send(1, outgoing(edge, payload))
        two.transports[0].send(1, outgoing(100 + edge, b"word", urgent=True))
    for after in (1, 3, 4):
        wait_until(lambda after=after: len(seen) >= after, f"{after} messages")
        two.interrupt(0, 1)
    wait_until(lambda: len(seen) == 6 and len(seen_urgent) == 6, "everything")
    two.transports[1].send(0, outgoing(0, b"the other way stands"))
    two.recorders[0].wait_messages(1)
    assert seen == list(enumerate(payloads))
    assert seen_urgent == list(range(100, 106))
    assert [recorder.lost for recorder in two.recorders] == [[], []]
    wait_until(lambda: two.transports[0].counters()[1][0].payload_bytes == sum(map(len, payloads)) + 24, "counters")


def test_credit_that_was_given_while_the_stream_was_broken_is_not_lost(lab):
    two = lab(window_bytes=1000, holding={1})
    for edge in range(4):
        two.transports[0].send(1, outgoing(edge, bytes(1000)))
    for edge in range(4):
        two.recorders[1].wait_messages(edge + 1)
        two.interrupt(0, 1)
        two.recorders[1].messages[edge].release()
    assert two.recorders[1].edges() == [0, 1, 2, 3]
    assert [recorder.lost for recorder in two.recorders] == [[], []]


def test_a_goodbye_is_no_loss_and_nothing_sent_before_it_is_dropped(lab):
    two = lab(window_bytes=200_000)
    for edge in range(50):
        two.transports[0].send(1, outgoing(edge, bytes(20_000), urgent=edge == 25))
    two.transports[0].close("finished")
    two.recorders[1].wait_messages(50)
    assert sorted(two.recorders[1].edges()) == list(range(50))
    for edge in range(50):
        two.transports[1].send(0, outgoing(edge, bytes(20_000)))
    time.sleep(0.2)
    assert two.recorders[1].lost == []
    assert two.recorders[0].messages == []


def test_both_may_close_at_once_and_both_still_get_everything(lab):
    two = lab()
    for edge in range(30):
        for source in (0, 1):
            two.transports[source].send(1 - source, outgoing(edge, bytes(10_000)))
    two.transports[0].send(1, outgoing(100, b"last word", urgent=True))
    for recorder, number in zip(two.recorders, (30, 31), strict=True):
        recorder.wait_messages(number)
    two.close()
    assert [recorder.lost for recorder in two.recorders] == [[], []]


@pytest.mark.slow
def test_close_does_not_wait_for_ever_for_a_receiver_that_never_releases(lab):
    two = lab(window_bytes=1000, holding={1})
    for edge in range(3):
        two.transports[0].send(1, outgoing(edge, bytes(1000)))
    two.recorders[1].wait_messages(1)
    two.transports[0].close("finished")
    assert two.recorders[1].edges() == [0]


def test_a_message_above_the_limit_ends_the_link_and_names_the_message(lab):
    two = lab(limit=lambda header: 5000 if header.edge == 3 else 100)
    two.transports[0].send(1, outgoing(3, bytes(5000), step=7, micro_batch=2))
    two.transports[0].send(1, outgoing(4, bytes(101), step=7, micro_batch=2))
    for recorder in two.recorders:
        recorder.wait_lost()
        assert len(recorder.lost) == 1
        reason = recorder.lost[0][1]
        assert "edge 4 step 7 micro-batch 2: payload of 101 bytes, allowed: 100" in reason
    assert two.recorders[1].edges() == [3]


def test_b22_a_layout_that_spans_more_than_the_limit_is_refused(lab):
    two = lab(limit=lambda _header: 1000)
    wide = TensorLayout("float32", (2, 2), (10**9, 1), 0)
    two.transports[0].send(1, outgoing(1, bytes(16), layout=wide))
    two.recorders[1].wait_lost()
    assert "layout spans 4000000008 bytes, allowed: 1000" in two.recorders[1].lost[0][1]


def test_an_unknown_edge_ends_the_link_with_the_words_of_the_worker(lab):
    def limit(header):
        if header.edge > 5:
            raise WireError("the plan has edges 0..5")
        return 1000

    two = lab(limit=limit)
    two.transports[0].send(1, outgoing(6, b"x"))
    two.recorders[1].wait_lost()
    assert "activation edge 6 step 1 micro-batch 0: the plan has edges 0..5" in two.recorders[1].lost[0][1]


def test_f22_a_message_that_comes_twice_is_refused(lab):
    two = lab()
    for _ in range(2):
        two.transports[0].send(1, outgoing(1, b"x", step=3, micro_batch=2))
    two.recorders[1].wait_lost()
    assert "activation edge 1 step 3 micro-batch 2: came twice" in two.recorders[1].lost[0][1]
    assert two.recorders[1].edges() == [1]


def test_an_encoder_that_fails_ends_the_link_with_its_error(lab):
    two = lab()

    def prepare():
        raise ZeroDivisionError("no scale")

    two.transports[0].send(1, Outgoing(prepare=prepare))
    two.recorders[0].wait_lost()
    two.recorders[1].wait_lost()
    assert "ZeroDivisionError: no scale" in two.recorders[0].lost[0][1]


def _memory_without_its_peer():
    return MemoryNetwork([StageIndex(0), StageIndex(1)]).transport(StageIndex(0))


def _grpc_without_its_peer():
    return grpc_transport(0, node_credentials(2), routes={"node-1.invalid:7445": "127.0.0.1:1"})


@pytest.mark.parametrize("build", [_memory_without_its_peer, _grpc_without_its_peer], ids=["memory", "grpc"])
def test_p1_a_peer_that_never_comes_up_is_named(build):
    with no_thread_left(), pytest.raises(UnreachableError, match="stage 1"):
        build().start(Recorder(), 0.6)


def test_background_messages_begin_when_no_bulk_waits(lab):
    two = lab(window_bytes=8 * MIB)

    def prepare():
        for edge in (1, 2, 3):
            two.transports[0].send(1, outgoing(edge, bytes(MIB)))
        two.transports[0].send(1, Outgoing(lambda: (replica(2), bytes(MIB)), background=True))
        return replica(1), bytes(MIB)

    two.transports[0].send(1, Outgoing(prepare, background=True))
    two.recorders[1].wait_messages(5)
    headers = [message.header for message in two.recorders[1].messages]
    assert [one.edge for one in headers[:3]] == [1, 2, 3]
    assert [one.micro_batch for one in headers[3:]] == [1, 2]
    assert two.transports[0].bytes_sent() == {1: 3 * MIB}


def test_background_messages_never_take_more_than_a_quarter_of_the_window(lab):
    two = lab(window_bytes=8 * MIB, holding={1})
    for _ in range(8):
        two.transports[0].send(1, Outgoing(lambda: (replica(0), bytes(MIB)), background=True))
    two.recorders[1].wait_messages(2)
    two.transports[0].send(1, outgoing(1, bytes(6 * MIB)))
    two.recorders[1].wait_messages(3)
    assert [message.header.kind for message in two.recorders[1].messages] == [MessageKind.REPLICA] * 2 + [
        MessageKind.ACTIVATION
    ]


def replica(part: int) -> MessageHeader:
    """A part of a kept state."""
    return MessageHeader(kind=MessageKind.REPLICA, step=1, micro_batch=part, edge=0)
