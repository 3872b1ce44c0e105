"""Whatever a peer sends, in any order: messages come out as they went in, or nothing does."""

from __future__ import annotations

import threading
import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fusion.base.errors import FusionError, StateError, WireError
from fusion.base.ids import EdgeId, Epoch, Incarnation, JobId, StageIndex
from fusion.base.layout import TensorLayout
from fusion.graph.dag import DTYPE_BYTES
from fusion.protocol.header import header_from_proto, header_to_proto, span_bytes
from fusion.protocol.messages import MessageHeader, MessageKind, Session
from fusion.transport.assembler import Assembler
from fusion.transport.base import Outgoing
from fusion.transport.frames import chunk_frame, chunk_of, frame, parse_frame
from fusion.transport.goodput import Goodput
from fusion.transport.outbox import Outbox
from fusion.wire.v1 import peer_pb2

SESSION = Session(JobId("job-aaaaaaaaaa"), Epoch(7), StageIndex(1), StageIndex(0), Incarnation(5), Incarnation(6))
WINDOW = 1000
LIMIT = 3000

layouts = st.integers(0, 5).flatmap(
    lambda rank: st.builds(
        TensorLayout,
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 1000), min_size=rank, max_size=rank).map(tuple),
        st.lists(st.integers(0, 10**6), min_size=rank, max_size=rank).map(tuple),
        st.integers(0, 7),
    )
)
headers = st.builds(
    MessageHeader,
    st.sampled_from(list(MessageKind)),
    st.integers(0, 10**9),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1).map(EdgeId),
    st.none() | layouts,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "topk-16", "int8.z"]),
)


def to_proto(header: MessageHeader, **changes) -> peer_pb2.Header:
    settings = {"message": 1, "sequence": 1, "payload_bytes": 0, "urgent": False} | changes
    return header_to_proto(SESSION, header, **settings)


@given(headers)
def test_a_header_survives_the_wire(header):
    again = peer_pb2.Header.FromString(to_proto(header).SerializeToString())
    assert header_from_proto(again, SESSION) == header


@given(st.binary(max_size=200))
def test_b13_any_bytes_are_a_frame_or_a_wire_error(data):
    chunk = chunk_of(data)
    if chunk is not None:
        same = peer_pb2.PeerFrame.FromString(data).chunk
        assert (same.message, same.offset, same.data) == (chunk.message, chunk.offset, bytes(chunk.data))
    try:
        parsed = parse_frame(data)
    except WireError:
        return
    try:
        header_from_proto(parsed.header, SESSION)
    except (WireError, StateError):
        return


@given(headers, st.data())
def test_b13_a_header_cut_or_changed_at_any_byte_is_a_header_or_an_error_of_ours(header, data):
    whole = frame(header=to_proto(header))
    position = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (
        whole[:position],
        whole[:position] + bytes([data.draw(st.integers(0, 255))]) + whole[position + 1 :],
    ):
        assembler = Assembler(SESSION, WINDOW, lambda _header: LIMIT, lambda _count: None)
        try:
            arrived = assembler.header(parse_frame(damaged).header)
        except FusionError:
            assert assembler.outstanding_bytes == 0
            continue
        assert all(len(message.payload) == 0 for message in arrived)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float3"}, "is not one of"),
        ({"dtype": ""}, "is not one of"),
        ({"shape": [-1, 2]}, "outside 0"),
        ({"shape": [2, 2**63 - 1]}, "outside 0"),
        ({"shape": [0, 2**62]}, "outside 0"),
        ({"shape": [0, 2**48], "strides": [2**48, 1]}, None),
        ({"shape": [2**40, 2**40]}, "more than"),
        ({"strides": [-1, 1]}, "outside 0"),
        ({"strides": [1]}, "one stride each"),
        ({"shape": [1] * 17, "strides": [1] * 17}, "17 dimensions"),
        ({"alignment_offset": 16}, "less than 64 bytes"),
        ({"shape": [], "strides": []}, None),
    ],
)
def test_b22_a_layout_is_checked_by_exact_numbers(change, words):
    settings = {"dtype": "float32", "shape": [2, 2], "strides": [2, 1], "alignment_offset": 0} | change
    message = to_proto(MessageHeader(MessageKind.ACTIVATION, 7, 2, EdgeId(3)))
    message.layout.CopyFrom(peer_pb2.Layout(**settings))
    if words is None:
        assert header_from_proto(message, SESSION).layout is not None
        return
    with pytest.raises(WireError, match=words) as caught:
        header_from_proto(message, SESSION)
    assert str(caught.value).startswith("activation edge 3 step 7 micro-batch 2: ")


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), 4),
        ((3, 4), (4, 1), 48),
        ((3, 4), (1, 3), 48),
        ((2, 2), (100, 1), 408),
        ((5, 0), (1, 1), 0),
        ((9,), (0,), 4),
    ],
)
def test_a_layouts_span_reaches_from_the_first_to_the_last_element(shape, strides, expected):
    assert span_bytes(TensorLayout("float32", shape, strides)) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))
def test_our_encoding_of_a_chunk_is_protobufs(message, offset, data):
    expected = peer_pb2.PeerFrame(chunk=peer_pb2.Chunk(message=message, offset=offset, data=data))
    encoded = chunk_frame(message, offset, memoryview(data))
    assert peer_pb2.PeerFrame.FromString(encoded) == expected
    again = chunk_of(encoded)
    if data and max(message, offset) < 2**63:
        assert (again.message, again.offset, bytes(again.data)) == (message, offset, data)
    else:
        assert again is None


def test_a_message_that_is_being_encoded_is_sent_before_the_goodbye():
    outbox = Outbox(SESSION, iter(range(1, 1000)).__next__)
    outbox.open(WINDOW)
    begun, may_end = threading.Event(), threading.Event()

    def prepare() -> tuple[MessageHeader, bytes]:
        begun.set()
        assert may_end.wait(10)
        return MessageHeader(MessageKind.ACTIVATION, 1, 0, EdgeId(0)), b""

    outbox.put(Outgoing(prepare))
    assert begun.wait(10)
    outbox.finish("done")
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    came = []
    for data in outbox.frames():
        came.append(parse_frame(data).WhichOneof("body"))
        if came[-1] == "header":
            outbox.acknowledge(0, [1])
    timer.join()
    assert came == ["header", "goodbye"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * WINDOW)), max_size=20))
def test_what_goes_into_an_outbox_comes_out_of_the_assembler(messages):
    outbox = Outbox(SESSION, iter(range(1, 1000)).__next__)
    assembler = Assembler(SESSION, WINDOW, lambda _header: LIMIT, outbox.credit)
    outbox.open(WINDOW)
    for number, (urgent, size) in enumerate(messages):
        header = MessageHeader(MessageKind.ACTIVATION, 1, 0, EdgeId(number))
        outbox.put(Outgoing(prepare=lambda h=header, n=number, s=size: (h, bytes([n]) * s), urgent=urgent))
    outbox.finish("done")
    came = []
    for data in outbox.frames():
        parsed = parse_frame(data)
        body = parsed.WhichOneof("body")
        if body == "goodbye":
            break
        arrived = assembler.header(parsed.header) if body == "header" else assembler.chunk(parsed.chunk)
        for message in arrived:
            came.append((int(message.header.edge), bytes(message.payload)))
            message.release()
        outbox.acknowledge(*assembler.acknowledgement())
    order = [number for number, (urgent, _) in enumerate(messages) if urgent]
    order += [number for number, (urgent, _) in enumerate(messages) if not urgent]
    assert came == [(number, bytes([number]) * messages[number][1]) for number in order]
    assert assembler.outstanding_bytes == 0


@given(
    st.lists(st.tuples(st.sampled_from(["urgent", "bulk", "background"]), st.integers(0, WINDOW)), max_size=12),
    st.lists(st.integers(0, 6), max_size=8),
    st.data(),
)
@settings(deadline=None)
def test_f37_streams_may_break_after_any_frame(messages, breaks, data):
    """Of what was under way any part may have arrived; acknowledgements and credit may have got lost."""
    outbox = Outbox(SESSION, iter(range(1, 10_000)).__next__)
    outbox.goodput = SmallChunks()
    assembler = Assembler(SESSION, 2**30, lambda _header: LIMIT, lambda _count: None)
    for number, (kind, size) in enumerate(messages):
        header = MessageHeader(MessageKind.ACTIVATION, 1, 0, EdgeId(number))
        outbox.put(
            Outgoing(
                prepare=lambda h=header, n=number, s=size: (h, bytes([n + 1]) * s),
                urgent=kind == "urgent",
                background=kind == "background",
            )
        )
    came = []
    told = 0
    total = len(messages)
    while len(came) < total:
        generation, standing = assembler.attach()
        told = standing.credited_bytes
        frames_left = breaks.pop() if breaks else 10_000
        for content in outbox.frames(outbox.open(2**30, standing)):
            if frames_left == 0:
                outbox.suspend()
                break
            frames_left -= 1
            chunk = chunk_of(content)
            if chunk is not None:
                arrived = assembler.chunk(chunk, generation)
            else:
                arrived = assembler.header(parse_frame(content).header, generation)
            for message in arrived:
                came.append((int(message.header.edge), bytes(message.payload)))
                message.release()
            if frames_left > 10 or data.draw(st.booleans()):  # else this answer gets lost with the stream
                outbox.acknowledge(*assembler.acknowledgement())
                outbox.credit(assembler.credited_bytes - told)
                told = assembler.credited_bytes
            if len(came) == total:
                break
    outbox.abort()
    for kind in ("urgent", "bulk", "background"):
        expected = [number for number, (each, _) in enumerate(messages) if each == kind]
        assert [number for number, _ in came if messages[number][0] == kind] == expected
    assert sorted(came) == [(number, bytes([number + 1]) * size) for number, (_, size) in enumerate(messages)]
    assert assembler.outstanding_bytes == 0


class SmallChunks(Goodput):
    """Cuts even small payloads into several chunks."""

    def chunk_bytes(self, most):
        return 100


class Reassembly(RuleBasedStateMachine):
    """Chunks in any order, two classes at once, and releases at any time, against a model of a few lines."""

    @initialize()
    def begin(self):
        self.credit = 0
        self.assembler = Assembler(SESSION, WINDOW, lambda _header: LIMIT, self._returned)
        self.number = 0
        self.open: dict[int, tuple[bool, bytes, int]] = {}  # number -> urgent, payload, sent; ascending
        self.held = []  # (incoming, cost)
        self.charged = 0
        self.dead = False

    def _returned(self, count):
        self.credit += count

    alive = precondition(lambda self: not self.dead)

    @alive
    @rule(urgent=st.booleans(), size=st.integers(0, LIMIT + 10))
    def announce(self, urgent, size):
        self.number += 1
        cost = 0 if urgent else size  # all sizes are below what is free for urgent messages
        alone = all(kind != urgent for kind, _, _ in self.open.values())
        allowed = alone and size <= LIMIT and (not cost or not self.charged or self.charged + cost <= WINDOW)
        message = to_proto(
            MessageHeader(MessageKind.ACTIVATION, 1, 0, EdgeId(self.number)),
            message=self.number, sequence=self.number, payload_bytes=size, urgent=urgent,
        )  # fmt: skip
        if not allowed:
            with pytest.raises(WireError):
                self.assembler.header(message)
            self.dead = True
            return
        arrived = self.assembler.header(message)
        self.charged += cost
        self.open[self.number] = (urgent, bytes((self.number + i) % 256 for i in range(size)), 0)
        self._check(arrived, urgent)

    @alive
    @precondition(lambda self: any(sent < len(payload) for _, payload, sent in self.open.values()))
    @rule(data=st.data(), size=st.integers(0, 1000), shift=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1, -1]))
    def send_chunk(self, data, size, shift):
        unfinished = sorted(number for number, (_, payload, sent) in self.open.items() if sent < len(payload))
        number = data.draw(st.sampled_from(unfinished))
        urgent, payload, sent = self.open[number]
        part = payload[sent : sent + size]
        message = peer_pb2.Chunk(message=number, offset=max(0, sent + shift), data=part)
        if not part or message.offset != sent:
            with pytest.raises(WireError):
                self.assembler.chunk(message)
            self.dead = True
            return
        arrived = self.assembler.chunk(message)
        self.open[number] = (urgent, payload, sent + len(part))
        self._check(arrived, urgent)

    @alive
    @rule(number=st.integers(0, 50))
    def chunk_of_a_message_that_is_not_under_way(self, number):
        if number not in self.open:
            with pytest.raises(WireError):
                self.assembler.chunk(peer_pb2.Chunk(message=number, data=b"x"))
            self.dead = True

    @precondition(lambda self: self.dead)
    @rule()
    def a_new_stream(self):
        self.begin()

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data):
        arrived, cost = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        before = self.credit
        arrived.release()
        arrived.release()
        assert self.credit == before + cost
        self.charged -= cost

    def _check(self, arrived, urgent):
        """Of one class everything that is whole up to the first that is not, in the order of the numbers."""
        expected = []
        for number, (kind, payload, sent) in list(self.open.items()):
            if kind != urgent:
                continue
            if sent < len(payload):
                break
            expected.append(payload)
            del self.open[number]
        assert [bytes(message.payload) for message in arrived] == expected
        for message in arrived:
            assert message.source == 1
            self.held.append((message, 0 if urgent else len(message.payload)))

    @invariant()
    def credit_is_accounted_for(self):
        assert self.assembler.outstanding_bytes == self.charged


TestReassembly = Reassembly.TestCase
TestReassembly.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_f38_a_payload_with_one_bit_changed_is_refused_by_its_checksum(payload: bytes, data: st.DataObject):
    assembler = Assembler(SESSION, 4096, lambda header: 4096, lambda count: None)
    header = MessageHeader(MessageKind.ACTIVATION, 3, 0, EdgeId(0))
    message = to_proto(header, payload_bytes=len(payload), checksum=zlib.crc32(payload))
    assert assembler.header(message) in (None, [])
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match="checksum mismatch"):
        assembler.chunk(peer_pb2.Chunk(message=message.message, offset=0, data=bytes(damaged)))
