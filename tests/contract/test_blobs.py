"""The client of the blob store against a store that follows the contract, and one that breaks off, lies or is full."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import pytest

from fusion.base.digest import BlobHasher
from fusion.base.errors import ConfigError, DataError, NotFoundError, UnreachableError, WireError
from fusion.protocol.job import BlobRef
from fusion.protocol.status import ERROR_KEY
from fusion.transport import blobs
from fusion.transport.blobs import BlobClient
from fusion.transport.channels import CLIENT_OPTIONS, SERVER_OPTIONS, backoff_s, with_retries
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.transport import no_thread_left

MIB = 1 << 20


def name_of(data: bytes) -> BlobRef:
    """A blob's name by its definition, without the code under test."""
    chunks = b"".join(hashlib.sha256(data[at : at + MIB]).digest() for at in range(0, len(data), MIB))
    return BlobRef(hashlib.sha256(chunks).hexdigest(), len(data))


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@dataclass
class Store(coordinator_pb2_grpc.BlobsServicer):
    """A store in memory, with faults to order."""

    complete: dict[str, bytes] = field(default_factory=dict)
    partial: dict[str, bytearray] = field(default_factory=dict)
    puts: list[int] = field(default_factory=list)  #: the offset of each Put
    gets: list[tuple[int, int]] = field(default_factory=list)  #: offset and length of each Get
    messages_until_break: list[int] = field(default_factory=list)  #: for each stream to come
    damage: list[int] = field(default_factory=list)  #: offsets at which one byte is wrong, once each
    refuse: grpc.StatusCode | None = None
    drop_answer: bool = False
    stat_answer: coordinator_pb2.StatBlobResponse | None = None  #: said instead of the truth
    get_answers: list[coordinator_pb2.GetBlobResponse] = field(default_factory=list)
    piece: int = MIB

    def _fault(self, context):
        if self.refuse is not None:
            context.set_trailing_metadata(((ERROR_KEY, "ConfigError"),))
            context.abort(self.refuse, "the disk is full; free space there")

    def Stat(self, request, context):  # noqa: N802
        if self.stat_answer is not None:
            return self.stat_answer
        data = self.complete.get(request.digest)
        if data is None:
            received = len(self.partial.get(request.digest, b""))
            return coordinator_pb2.StatBlobResponse(received_bytes=received, size_bytes=request.size_bytes)
        digests = b"".join(hashlib.sha256(data[at : at + MIB]).digest() for at in range(0, len(data), MIB))
        return coordinator_pb2.StatBlobResponse(
            complete=True,
            received_bytes=len(data) // MIB * MIB,
            size_bytes=len(data),
            chunk_digests=digests if request.with_chunk_digests else b"",
        )

    def Put(self, requests, context):  # noqa: N802
        self._fault(context)
        first = next(requests)
        self.puts.append(first.offset)
        data = self.partial.setdefault(first.digest, bytearray())
        left = self.messages_until_break.pop(0) if self.messages_until_break else 1 << 30
        message = first
        while message is not None:
            assert message.offset == len(data)
            assert len(message.data) <= MIB
            data += message.data
            left -= 1
            if left == 0:
                del data[len(data) // MIB * MIB :]
                context.abort(grpc.StatusCode.UNAVAILABLE, "max connection age")
            message = next(requests, None)
        if len(data) == first.size_bytes:
            assert name_of(bytes(data)).digest == first.digest
            self.complete[first.digest] = bytes(self.partial.pop(first.digest))
            if self.drop_answer:
                self.drop_answer = False
                context.abort(grpc.StatusCode.UNAVAILABLE, "the answer got lost")
            return coordinator_pb2.PutBlobResponse(received_bytes=first.size_bytes, complete=True)
        return coordinator_pb2.PutBlobResponse(received_bytes=len(data))

    def Get(self, request, context):  # noqa: N802
        self._fault(context)
        self.gets.append((request.offset, request.length))
        if self.get_answers:
            yield self.get_answers.pop()
            return
        data = self.complete[request.digest]
        end = request.offset + request.length if request.length else len(data)
        left = self.messages_until_break.pop(0) if self.messages_until_break else 1 << 30
        for at in range(request.offset, end, self.piece):
            piece = bytearray(data[at : min(at + self.piece, end)])
            for wrong in [offset for offset in self.damage if at <= offset < at + len(piece)]:
                piece[wrong - at] ^= 1
                self.damage.remove(wrong)
            yield coordinator_pb2.GetBlobResponse(offset=at, data=bytes(piece))
            left -= 1
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    def add(self, data: bytes) -> BlobRef:
        ref = name_of(data)
        self.complete[ref.digest] = data
        return ref


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(blobs, "backoff_s", lambda _attempt: 0.01)
    return Store()


@pytest.fixture
def client(store):
    with no_thread_left(), futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=list(SERVER_OPTIONS))
        coordinator_pb2_grpc.add_BlobsServicer_to_server(store, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=list(CLIENT_OPTIONS))
        yield BlobClient(channel, patience_s=1.0)
        channel.close()
        server.stop(0).wait()


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, 5 * MIB + 17])
def test_a_blob_comes_back_as_it_went_in(store, client, tmp_path, size):
    data = some_bytes(size)
    (tmp_path / "in").write_bytes(data)
    ref = client.upload_file(tmp_path / "in")
    assert ref == name_of(data)
    assert store.complete[ref.digest] == data
    client.download_file(ref, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert client.download_bytes(ref, size) == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_bytes_of_any_kind_are_stored_under_the_same_name(client):
    data = some_bytes(100_000)
    assert client.upload_bytes(data) == client.upload_bytes(bytearray(data)) == client.upload_bytes(memoryview(data))
    hasher = BlobHasher()
    hasher.update(data)
    assert hasher.hexdigest() == name_of(data).digest


def test_what_the_store_holds_is_not_sent_again(store, client):
    data = some_bytes(2 * MIB)
    first, second = client.upload_bytes(data), client.upload_bytes(data)
    assert first == second
    assert store.puts == [0]


def test_f37_a_broken_upload_goes_on_where_stat_says(store, client, tmp_path):
    data = some_bytes(6 * MIB + 5)
    store.messages_until_break = [3, 2]
    (tmp_path / "in").write_bytes(data)
    seen = []
    ref = client.upload_file(tmp_path / "in", lambda done, total: seen.append((done, total)))
    assert store.complete[ref.digest] == data
    assert store.puts == [0, 3 * MIB, 5 * MIB]
    assert seen[-1] == (len(data), len(data))
    assert all(total == len(data) for _, total in seen)


def test_an_upload_whose_answer_got_lost_is_not_made_twice(store, client):
    store.drop_answer = True
    ref = client.upload_bytes(some_bytes(2 * MIB))
    assert store.puts == [0]
    assert ref.digest in store.complete


def test_f37_a_broken_download_goes_on_after_the_last_whole_chunk(store, client, tmp_path):
    ref = store.add(data := some_bytes(5 * MIB + 9))
    store.piece = 300_000
    store.messages_until_break = [8, 1, 1]
    seen = []
    client.download_file(ref, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "out").read_bytes() == data
    assert [offset for offset, _ in store.gets] == [0, 2 * MIB, 2 * MIB, 2 * MIB]
    assert seen == [(min(count * MIB, len(data)), len(data)) for count in range(1, 7)]


def test_b19_a_damaged_chunk_is_fetched_again(store, client):
    ref = store.add(data := some_bytes(3 * MIB))
    store.damage = [MIB + 5, MIB + 6]
    assert client.download_bytes(ref, 3 * MIB) == data
    assert [offset for offset, _ in store.gets] == [0, MIB]


def test_b19_a_chunk_that_stays_damaged_is_an_error_and_leaves_no_file(store, client, tmp_path):
    ref = store.add(data := some_bytes(3 * MIB))
    store.stat_answer = store.Stat(coordinator_pb2.StatBlobRequest(digest=ref.digest, with_chunk_digests=True), None)
    store.complete[ref.digest] = data[:MIB] + bytes(MIB) + data[2 * MIB :]
    with pytest.raises(WireError, match=f"blob {ref.digest}: checksum mismatch in chunk 1, 3 times in a row"):
        client.download_file(ref, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lie", ["other digests", "too few", "none"])
def test_a_list_of_chunks_that_does_not_match_the_name_is_refused(store, client, lie):
    ref = store.add(some_bytes(2 * MIB))
    digests = {"other digests": bytes(64), "too few": bytes(32), "none": b""}[lie]
    store.stat_answer = coordinator_pb2.StatBlobResponse(complete=True, chunk_digests=digests)
    with pytest.raises(WireError, match="does not match its name"):
        client.download_bytes(ref, 2 * MIB)


def test_b18_bytes_for_another_offset_or_beyond_the_end_are_refused(store, client):
    ref = store.add(some_bytes(2 * MIB))
    for offset, size in ((5, MIB), (0, 2 * MIB + 1), (0, 0)):
        store.get_answers = [coordinator_pb2.GetBlobResponse(offset=offset, data=bytes(size))]
        with pytest.raises(WireError, match="expected offset 0 and an end at 2097152"):
            client.download_bytes(ref, 2 * MIB)


def test_a_reader_reads_any_range_and_fetches_ascending_ranges_once(store, client):
    ref = store.add(data := some_bytes(5 * MIB + 100))
    reader = client.reader(ref)
    assert (reader.size_bytes, reader.chunk_count) == (len(data), 6)
    out = bytearray(len(data))
    position, chooser = 0, random.Random(1)
    while position < len(data):
        size = min(chooser.choice([1, 1000, 400_000, 2_500_000]), len(data) - position)
        reader.read_into(position, memoryview(out)[position : position + size])
        position += size
    assert out == data
    assert sum(length for _, length in store.gets) == len(data)
    for offset, size in ((0, 0), (len(data), 0), (3 * MIB - 5, 10), (len(data) - 1, 1)):
        part = bytearray(size)
        reader.read_into(offset, memoryview(part))
        assert part == data[offset : offset + size]
    for offset, size in ((-1, 1), (len(data), 1), (0, len(data) + 1)):
        with pytest.raises(DataError, match=f"it has {len(data)}"):
            reader.read_into(offset, memoryview(bytearray(size)))


def test_p2_memory_stays_flat_whatever_the_size(store, client, tmp_path):
    with (tmp_path / "in").open("wb") as file:
        file.truncate(64 * MIB)
    ref = client.upload_file(tmp_path / "in")
    tracemalloc.start()
    reader = client.reader(ref)
    for _ in reader.chunks(0, reader.chunk_count):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * MIB  # the store's own pieces included


def test_a_blob_that_is_not_there_is_not_found(client):
    with pytest.raises(NotFoundError, match="is not in the coordinator's store"):
        client.reader(name_of(b"nobody has this"))


def test_a_blob_above_the_limit_is_not_fetched(store, client):
    ref = store.add(bytes(1000))
    with pytest.raises(WireError, match="1000 bytes, allowed here: 999"):
        client.download_bytes(ref, 999)
    assert store.gets == []


def test_a_store_that_is_full_says_so_at_once(store, client):
    store.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(ConfigError, match="the disk is full; free space there"):
        client.upload_bytes(b"x")


def test_a_store_that_is_away_is_given_up_on(store, client):
    ref = store.add(some_bytes(100))
    store.messages_until_break = [1] * 10_000
    store.piece = 10
    with pytest.raises(UnreachableError, match=f"blob {ref.digest}"):
        client.download_bytes(ref, 100)
    assert len(store.gets) > 3


def test_a_file_that_cannot_be_read_or_shrinks_is_named(store, client, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        client.upload_file(tmp_path / "missing")
    path = tmp_path / "shrinking"
    path.write_bytes(some_bytes(3 * MIB))

    def shrink(_done, _total):
        path.write_bytes(b"")

    with pytest.raises(DataError, match="became shorter"):
        client.upload_file(path, shrink)


def test_a_target_that_cannot_be_written_is_named(store, client, tmp_path):
    ref = store.add(b"x")
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere"):
        client.download_file(ref, tmp_path / "nowhere" / "out")


# --- retries ----------------------------------------------------------------------------------------------------


class Failure(grpc.RpcError):
    def __init__(self, code, metadata=()):
        self._code, self._metadata = code, metadata

    def code(self):
        return self._code

    def details(self):
        return "words"

    def trailing_metadata(self):
        return self._metadata


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED]
)
def test_calls_that_may_succeed_later_are_made_again(monkeypatch, code):
    monkeypatch.setattr("time.sleep", lambda _s: None)
    outcomes, timeouts = [Failure(code), Failure(code), "answer"], []

    def call(timeout_s):
        timeouts.append(timeout_s)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert with_retries(call, 100.0, "asking") == "answer"
    assert timeouts == [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (Failure(grpc.StatusCode.INVALID_ARGUMENT), ConfigError),
        (Failure(grpc.StatusCode.NOT_FOUND), NotFoundError),
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, ((ERROR_KEY, "ConfigError"),)), ConfigError),
    ],
)
def test_calls_that_were_refused_are_made_once(failure, error):
    calls = []

    def call(timeout_s):
        calls.append(timeout_s)
        raise failure

    with pytest.raises(error, match="words"):
        with_retries(call, 100.0, "asking")
    assert len(calls) == 1


def test_p6_retries_end_with_the_deadline():
    def call(timeout_s):
        assert 0 < timeout_s <= 0.3
        raise Failure(grpc.StatusCode.UNAVAILABLE)

    with pytest.raises(UnreachableError, match="asking"):
        with_retries(call, 0.3, "asking")


def test_backoff_grows_to_a_bound_and_is_spread():
    for attempt, longest in ((0, 0.5), (1, 1.0), (3, 4.0), (10, 15.0), (10_000, 15.0)):
        pauses = [backoff_s(attempt) for _ in range(400)]
        assert longest / 2 < max(pauses) <= longest
        assert min(pauses) < longest / 4


def test_backoff_leaves_the_random_numbers_of_the_users_program_alone():
    before = random.getstate()
    backoff_s(3)
    assert random.getstate() == before
