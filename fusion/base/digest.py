"""Names of blobs: a digest over chunks, so that any range of a blob can be verified by itself."""

from __future__ import annotations

import hashlib

from fusion.base.units import MIB

BLOB_CHUNK_BYTES = MIB  #: every chunk but the last has this size


class BlobHasher:
    """Feed a blob in any pieces; its digest is sha256 over the concatenated sha256 of each 1 MiB chunk."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._current = hashlib.sha256()
        self._filled = 0
        self.size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        while view:
            part = view[: BLOB_CHUNK_BYTES - self._filled]
            self._current.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOB_CHUNK_BYTES:
                self._close_chunk()

    def _close_chunk(self) -> None:
        self._chunks.append(self._current.digest())
        self._current, self._filled = hashlib.sha256(), 0

    def chunk_digests(self) -> bytes:
        """Return the sha256 of each chunk so far, concatenated; an empty blob has none."""
        tail = [self._current.digest()] if self._filled else []
        return b"".join([*self._chunks, *tail])

    def hexdigest(self) -> str:
        """Return the blob's digest in lower-case hex."""
        return digest_of_chunks(self.chunk_digests())


def digest_of_chunks(chunk_digests: bytes) -> str:
    """Return, in lower-case hex, the digest of the blob whose chunks have these concatenated sha256."""
    return hashlib.sha256(chunk_digests).hexdigest()
