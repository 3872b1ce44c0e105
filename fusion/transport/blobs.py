"""Bulk to and from the coordinator's content-addressed store: resumable, verified chunk by chunk, in flat memory."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc

from fusion.base.digest import BLOB_CHUNK_BYTES, BlobHasher
from fusion.base.errors import ConfigError, DataError, NotFoundError, UnreachableError, WireError
from fusion.base.units import format_bytes
from fusion.protocol.job import BlobRef
from fusion.protocol.status import from_rpc_error
from fusion.transport.channels import backoff_s, check_server
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

__all__ = ["BlobClient", "BlobReader", "Progress"]

Progress = Callable[[int, int], None]  #: bytes done, bytes in all

_DIGEST_BYTES = 32
_STREAM_S = 480.0  #: below the grace that a server gives streams when a connection has aged
_CALL_S = 20.0
_TRIES_PER_CHUNK = 3


class _Source(Protocol):
    """Bytes to upload, which can be read more than once."""

    size_bytes: int

    def pieces(self, offset: int) -> Iterator[bytes]:
        """Yield everything from `offset` on in pieces of at most one chunk."""
        ...


class _FileSource:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.size_bytes = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error

    def pieces(self, offset: int) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(offset)
            left = self.size_bytes - offset
            while left:
                data = file.read(min(left, BLOB_CHUNK_BYTES))
                if not data:
                    raise DataError(f"{self._path} became shorter while it was read; leave it alone and try again")
                left -= len(data)
                yield data


class _BytesSource:
    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")
        self.size_bytes = len(self._view)

    def pieces(self, offset: int) -> Iterator[bytes]:
        for start in range(offset, self.size_bytes, BLOB_CHUNK_BYTES):
            yield bytes(self._view[start : start + BLOB_CHUNK_BYTES])


class _Patience:
    """Decides after a failure whether to go on: as long as something moved within the last `limit_s` seconds."""

    def __init__(self, limit_s: float, what: str) -> None:
        self._limit_s, self._what = limit_s, what
        self.moved()

    def moved(self) -> None:
        """Progress was made."""
        self._since_s, self._attempt = time.monotonic(), 0

    def wait(self, error: grpc.RpcError | None = None) -> None:
        """Sleep before the next try; raise instead when the error is final or nothing has moved for too long.

        Without an error the other side stopped early and said nothing.
        """
        pause_s = backoff_s(self._attempt)
        late = time.monotonic() + pause_s - self._since_s > self._limit_s
        if error is not None:
            check_server(error, self._what)
            ours = from_rpc_error(error, self._what)
            if late or not isinstance(ours, UnreachableError):
                raise ours from error
        if late:
            raise UnreachableError(
                f"{self._what}: nothing has moved for {self._limit_s:.0f} s; is the coordinator well?"
            )
        self._attempt += 1
        time.sleep(pause_s)


class BlobClient:
    """Uploads and downloads over a channel to the coordinator, which stays the caller's. Use it in one thread.

    A broken stream continues where it stopped. Only when nothing has moved for `patience_s` seconds, or when the
    coordinator refuses for good, does a call raise: an error of our tree that names the blob.
    """

    def __init__(self, channel: grpc.Channel, patience_s: float = 30.0) -> None:
        make_stub: Callable[[grpc.Channel], Any] = coordinator_pb2_grpc.BlobsStub
        self._stub = make_stub(channel)
        self._patience_s = patience_s

    def upload_file(self, path: Path, progress: Progress | None = None) -> BlobRef:
        """Store the file's content and return its name; nothing is sent that the store already holds.

        Reads the file twice: once for its digest. ConfigError where it cannot be read, DataError where it changes.
        """
        return self._upload(_FileSource(path), str(path), progress)

    def upload_bytes(self, data: bytes | bytearray | memoryview, progress: Progress | None = None) -> BlobRef:
        """Store `data` and return its name."""
        return self._upload(_BytesSource(data), f"{len(data)} bytes", progress)

    def _upload(self, source: _Source, name: str, progress: Progress | None) -> BlobRef:
        hasher = BlobHasher()
        for piece in source.pieces(0):
            hasher.update(piece)
        ref = BlobRef(hasher.hexdigest(), source.size_bytes)
        patience = _Patience(self._patience_s, f"upload of {name}")
        furthest = -1
        while True:
            requests: _PutRequests | None = None
            try:
                stat = self._stat(ref)
                if stat.complete:
                    break
                if stat.received_bytes > furthest:
                    furthest = stat.received_bytes
                    patience.moved()
                requests = _PutRequests(ref, source, stat.received_bytes, progress)
                if self._stub.Put(iter(requests), timeout=_STREAM_S).complete:
                    break
                requests.check()
                patience.wait()
            except grpc.RpcError as error:
                if requests is not None:
                    requests.check()
                patience.wait(error)
        if progress is not None:
            progress(ref.size_bytes, ref.size_bytes)
        return ref

    def _stat(self, ref: BlobRef, with_chunk_digests: bool = False) -> coordinator_pb2.StatBlobResponse:
        request = coordinator_pb2.StatBlobRequest(
            digest=ref.digest, size_bytes=ref.size_bytes, with_chunk_digests=with_chunk_digests
        )
        answer: coordinator_pb2.StatBlobResponse = self._stub.Stat(request, timeout=_CALL_S)
        if answer.received_bytes > ref.size_bytes or answer.received_bytes % BLOB_CHUNK_BYTES:
            raise WireError(f"blob {ref.digest}: the store claims to hold {answer.received_bytes} bytes of it")
        return answer

    def download_file(self, ref: BlobRef, path: Path, progress: Progress | None = None) -> None:
        """Write the blob to `path`, which appears only when it is whole and verified. NotFoundError if unknown."""
        reader = self.reader(ref)
        part = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
        try:
            with part.open("xb") as file:
                for chunk in reader.chunks(0, reader.chunk_count):
                    file.write(chunk)
                    if progress is not None:
                        progress(file.tell(), ref.size_bytes)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path} ({format_bytes(ref.size_bytes)}): {error.strerror}; free space or choose another"
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def download_bytes(self, ref: BlobRef, limit_bytes: int) -> bytes:
        """Return the blob's content; WireError, before anything is fetched, if it is larger than `limit_bytes`."""
        if ref.size_bytes > limit_bytes:
            raise WireError(f"blob {ref.digest}: {ref.size_bytes} bytes, allowed here: {limit_bytes}")
        reader = self.reader(ref)
        return b"".join(bytes(chunk) for chunk in reader.chunks(0, reader.chunk_count))

    def reader(self, ref: BlobRef) -> BlobReader:
        """Return random access to the blob; NotFoundError if the store does not hold all of it."""
        return BlobReader(self._stub, ref, self._digests(ref), self._patience_s)

    def _digests(self, ref: BlobRef) -> bytes:
        patience = _Patience(self._patience_s, f"blob {ref.digest}")
        while True:
            try:
                stat = self._stat(ref, with_chunk_digests=True)
                break
            except grpc.RpcError as error:
                patience.wait(error)
        if not stat.complete:
            raise NotFoundError(f"blob {ref.digest} is not in the coordinator's store")
        digests = bytes(stat.chunk_digests)
        chunks = -(-ref.size_bytes // BLOB_CHUNK_BYTES)
        if len(digests) != chunks * _DIGEST_BYTES or hashlib.sha256(digests).hexdigest() != ref.digest:
            raise WireError(f"blob {ref.digest}: the store's list of chunks does not match its name and size")
        return digests


class _PutRequests:
    """The messages of one Put from an offset on. grpc takes them on a thread of its own; `check` raises its errors."""

    def __init__(self, ref: BlobRef, source: _Source, offset: int, progress: Progress | None) -> None:
        self._ref, self._source, self._offset, self._progress = ref, source, offset, progress
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise the error that ended the messages early, if one did."""
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[coordinator_pb2.PutBlobRequest]:
        digest, size_bytes, offset = self._ref.digest, self._ref.size_bytes, self._offset
        message = coordinator_pb2.PutBlobRequest(digest=digest, size_bytes=size_bytes, offset=offset)
        if offset == size_bytes:  # an empty blob, or one of which only the store's last word is missing
            yield message
            return
        try:
            for data in self._source.pieces(offset):
                message.data = data
                yield message
                offset += len(data)
                if self._progress is not None:
                    self._progress(offset, size_bytes)
                message = coordinator_pb2.PutBlobRequest(offset=offset)
        except Exception as error:  # noqa: BLE001 - on grpc's thread it would only be logged; `check` raises it
            self._error = error


class BlobReader:
    """Random access to one blob. Every byte that it hands out has been verified against the blob's name."""

    def __init__(self, stub: Any, ref: BlobRef, chunk_digests: bytes, patience_s: float) -> None:
        self._stub, self._ref, self._digests, self._patience_s = stub, ref, chunk_digests, patience_s
        self._cached_index, self._cached = -1, b""

    @property
    def size_bytes(self) -> int:
        """Size of the blob."""
        return self._ref.size_bytes

    @property
    def chunk_count(self) -> int:
        """Number of chunks of 1 MiB, the last one smaller."""
        return len(self._digests) // _DIGEST_BYTES

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the blob's bytes from `offset` on. Ascending reads fetch every chunk once."""
        view = view.cast("B")
        end = offset + len(view)
        if not 0 <= offset <= end <= self.size_bytes:
            raise DataError(f"blob {self._ref.digest}: bytes {offset}..{end} asked for, it has {self.size_bytes}")
        if not view:
            return
        index, end_index = offset // BLOB_CHUNK_BYTES, -(-end // BLOB_CHUNK_BYTES)
        if index == self._cached_index:
            self._copy(index, self._cached, offset, view)
            index += 1
        for chunk in self.chunks(index, end_index):
            self._copy(index, chunk, offset, view)
            self._cached_index, self._cached = index, chunk
            index += 1

    @staticmethod
    def _copy(index: int, chunk: bytes, offset: int, view: memoryview) -> None:
        """Copy the part of a chunk that falls into `view`, which begins at `offset` of the blob."""
        start = index * BLOB_CHUNK_BYTES
        low, high = max(offset, start), min(offset + len(view), start + len(chunk))
        view[low - offset : high - offset] = memoryview(chunk)[low - start : high - start]

    def chunks(self, first: int, end: int) -> Iterator[bytes]:
        """Yield the verified chunks `first`..`end`-1; reopens a broken stream, and fetches a damaged chunk again."""
        patience = _Patience(self._patience_s, f"download of blob {self._ref.digest}")
        damaged = 0
        while first < end:
            try:
                for chunk in self._stream(first, end):
                    if hashlib.sha256(chunk).digest() != self._digest(first):
                        damaged += 1
                        break
                    yield chunk
                    first, damaged = first + 1, 0
                    patience.moved()
                else:
                    if first < end:
                        patience.wait()
            except grpc.RpcError as error:
                patience.wait(error)
            if damaged >= _TRIES_PER_CHUNK:
                raise WireError(
                    f"blob {self._ref.digest}: checksum mismatch in chunk {first}, {damaged} times in a row"
                )

    def _digest(self, index: int) -> bytes:
        return self._digests[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]

    def _stream(self, first: int, end: int) -> Iterator[bytes]:
        """Yield chunks as the store sends them, in one stream."""
        position = first * BLOB_CHUNK_BYTES
        stop = min(end * BLOB_CHUNK_BYTES, self.size_bytes)
        request = coordinator_pb2.GetBlobRequest(digest=self._ref.digest, offset=position, length=stop - position)
        call = self._stub.Get(request, timeout=_STREAM_S)
        pending = bytearray()
        try:
            for message in call:
                if message.offset != position or not message.data or position + len(message.data) > stop:
                    raise WireError(
                        f"blob {self._ref.digest}: {len(message.data)} bytes for offset {message.offset}, "
                        f"expected offset {position} and an end at {stop}"
                    )
                position += len(message.data)
                pending += message.data
                while len(pending) >= BLOB_CHUNK_BYTES or (pending and position == stop):
                    yield bytes(pending[:BLOB_CHUNK_BYTES])
                    del pending[:BLOB_CHUNK_BYTES]
        finally:
            call.cancel()
