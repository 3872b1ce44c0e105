"""Blobs as files, named by their content. Uploads go to a partial file and appear only when whole and verified.

Everything here blocks and is called on worker threads. Memory stays flat: one chunk at a time, and 32 bytes for each.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import grpc

from fusion.base.digest import BLOB_CHUNK_BYTES, digest_of_chunks
from fusion.base.errors import ConfigError, WireError
from fusion.base.units import format_bytes
from fusion.protocol.status import RefusalError

MAX_BLOB_BYTES = 2**46
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PARTIALS_IN_MEMORY = 256
_PARTIAL_KEPT_S = 7 * 86_400.0


def check_digest(digest: str) -> str:
    """Return `digest` if it is one; WireError otherwise. Only such text becomes part of a path."""
    if not _DIGEST.fullmatch(digest):
        raise WireError(f"digest {digest[:80]!r} is not 64 characters of 0-9 a-f")
    return digest


class Partial:
    """An upload under way, of one caller. Chunks come in order; what is there already is taken as done."""

    def __init__(self, path: Path, digest: str, size_bytes: int) -> None:
        self.path, self.digest, self.size_bytes = path, digest, size_bytes
        self._chunks: list[bytes] = []
        self._lock = threading.Lock()
        self._done = False
        self._recover()

    def _recover(self) -> None:
        """Hash what an earlier upload left behind; its last chunk may be incomplete and is dropped."""
        try:
            with self.path.open("rb") as file:
                while len(chunk := file.read(BLOB_CHUNK_BYTES)) == BLOB_CHUNK_BYTES:
                    self._chunks.append(hashlib.sha256(chunk).digest())
        except FileNotFoundError:
            return
        if self.chunks > self.chunk_count:
            self._chunks.clear()

    @property
    def chunk_count(self) -> int:
        """Number of chunks that the whole blob has."""
        return -(-self.size_bytes // BLOB_CHUNK_BYTES)

    @property
    def chunks(self) -> int:
        """Number of chunks that are there."""
        return len(self._chunks)

    @property
    def received_bytes(self) -> int:
        """Where the upload goes on: always a multiple of the chunk size."""
        return min(self.chunks, self.size_bytes // BLOB_CHUNK_BYTES) * BLOB_CHUNK_BYTES

    def add(self, index: int, chunk: bytes | bytearray) -> bool:
        """Write chunk number `index`; False if an earlier one is still missing. ConfigError when the disk is full."""
        with self._lock:
            if index > len(self._chunks):
                return False
            if index < len(self._chunks):
                return True
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(descriptor, chunk, index * BLOB_CHUNK_BYTES)
            finally:
                os.close(descriptor)
            self._chunks.append(hashlib.sha256(chunk).digest())
            return True

    def finish(self, target: Path) -> bytes:
        """Verify the digest and move the file to `target`, durably; return the chunk digests.

        Content that is not what its name says is removed: RefusalError with DATA_LOSS.
        """
        with self._lock:
            digests = b"".join(self._chunks)
            if digest_of_chunks(digests) != self.digest or self.chunks != self.chunk_count:
                self.path.unlink(missing_ok=True)
                self._chunks.clear()
                error = WireError(
                    f"blob {self.digest}: its content has another digest; the upload was dropped, try again"
                )
                raise RefusalError(grpc.StatusCode.DATA_LOSS, error)
            if not self._done:
                create = 0 if self._chunks else os.O_CREAT  # an empty blob has no chunk that made the file
                descriptor = os.open(self.path, os.O_RDWR | create | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    os.ftruncate(descriptor, self.size_bytes)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                self.path.replace(target)
                _sync_directory(target.parent)
                self._done = True
            return digests


class BlobFiles:
    """The directory that holds all blobs and uploads."""

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self.directory, self._reserve_bytes = directory, reserve_bytes
        self._partials: OrderedDict[tuple[str, str], Partial] = OrderedDict()
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def drop_stale(self) -> None:
        """Remove uploads that nobody has gone on with for a week."""
        oldest = time.time() - _PARTIAL_KEPT_S
        for path in self.directory.glob("*/*.part"):
            if path.lstat().st_mtime < oldest:
                path.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Return where the blob lies, or would."""
        return self.directory / check_digest(digest)[:2] / digest

    def partial(self, digest: str, caller: str, size_bytes: int, *, create: bool) -> Partial | None:
        """Return the caller's upload of a blob; None if there is none and `create` is not set."""
        path = self.path(digest)
        path = path.with_name(f"{digest}.{caller}.part")
        with self._lock:
            found = self._partials.get((digest, caller))
            if found is not None and found.size_bytes != size_bytes:
                found = None
            if found is None:
                if not create and not path.exists():
                    return None
                path.parent.mkdir(exist_ok=True, mode=0o700)
                found = Partial(path, digest, size_bytes)
            self._partials[(digest, caller)] = found
            self._partials.move_to_end((digest, caller))
            while len(self._partials) > _PARTIALS_IN_MEMORY:
                self._partials.popitem(last=False)
            return found

    def received(self, digest: str, caller: str, size_bytes: int) -> int:
        """Return how many bytes of a blob the caller has uploaded so far; 0 if it has not begun."""
        partial = self.partial(digest, caller, size_bytes, create=False)
        return 0 if partial is None else partial.received_bytes

    def finish(self, partial: Partial, caller: str) -> bytes:
        """End an upload: verified, durable and in its place. Returns the chunk digests."""
        with self._lock:
            self._partials.pop((partial.digest, caller), None)
        return partial.finish(self.path(partial.digest))

    def remove(self, digests: Iterable[str]) -> None:
        """Delete complete blobs that nobody needs any more; whoever reads one now is told that it is lost."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)

    def check_space(self, digest: str, missing_bytes: int) -> None:
        """Refuse an upload that would fill the disk beyond its reserve."""
        free = shutil.disk_usage(self.directory).free
        if free - missing_bytes < self._reserve_bytes:
            raise _no_space(
                f"blob {digest}: {format_bytes(missing_bytes)} more are needed and {format_bytes(self._reserve_bytes)} "
                f"kept in reserve, but only {format_bytes(free)} are free on the coordinator; free space there"
            )

    def read(self, digest: str, offset: int, count: int) -> bytes:
        """Return `count` bytes of a complete blob from `offset`; DATA_LOSS if the file is not what it was."""
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _lost(digest, error.strerror or "it cannot be opened") from None
        try:
            data = os.pread(descriptor, count, offset)
        finally:
            os.close(descriptor)
        if len(data) != count:
            raise _lost(digest, "it is shorter than it was")
        return data


def _write_all(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise _no_space("the coordinator's disk is full; free space there") from None
        raise


def _no_space(message: str) -> RefusalError:
    return RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, ConfigError(message))


def _lost(digest: str, why: str) -> RefusalError:
    error = WireError(f"blob {digest} is damaged on the coordinator: {why}; upload it again")
    return RefusalError(grpc.StatusCode.DATA_LOSS, error)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
