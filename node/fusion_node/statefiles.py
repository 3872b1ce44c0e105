"""States of held stages on this node's disk: what a stage saved here, it need not fetch when it goes on here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fusion.base.digest import BLOB_CHUNK_BYTES, BlobHasher
from fusion.base.ids import JobId
from fusion.protocol.job import BlobRef


class StateFiles:
    """The states in a node's cache, by job and digest. They are copies of uploaded blobs and may vanish at any time."""

    def __init__(self, cache_dir: Path) -> None:
        self._directory = cache_dir / "state"

    def unfinished(self, job: JobId) -> Path:
        """Return where to write a state before its digest is known; `keep` or `clear` ends that."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._directory / f"{job}-unfinished.part"

    def keep(self, job: JobId, blob: BlobRef) -> None:
        """Keep what was written as the blob that it was uploaded as."""
        self.unfinished(job).replace(self._path(job, blob))

    def find(self, job: JobId, blob: BlobRef) -> Path | None:
        """Return the file with a blob's content, verified; None if it is not here."""
        path = self._path(job, blob)
        try:
            if path.stat().st_size != blob.size_bytes or _digest(path) != blob.digest:
                return None
        except OSError:
            return None
        return path

    def clear(self, job: str | None = None) -> None:
        """Delete the states of a job, or of all jobs."""
        for path in self._directory.glob("*"):
            if job is None or path.name.startswith(f"{job}-"):
                path.unlink(missing_ok=True)

    def _path(self, job: JobId, blob: BlobRef) -> Path:
        return self._directory / f"{job}-{blob.digest}.safetensors"


class FileSource:
    """A file in place of a blob's reader. Open it only once `StateFiles.find` has verified it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = path.stat().st_size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset` on."""
        with self._path.open("rb") as file:
            file.seek(offset)
            if file.readinto(view) != len(view):
                raise OSError(f"{self._path} became shorter while it was read")

    def chunks(self, first: int, end: int) -> Iterator[bytes]:
        """Yield the chunks `first` up to, without, `end`."""
        with self._path.open("rb") as file:
            file.seek(first * BLOB_CHUNK_BYTES)
            for _ in range(first, end):
                yield file.read(BLOB_CHUNK_BYTES)


def _digest(path: Path) -> str:
    hasher = BlobHasher()
    with path.open("rb") as file:
        while data := file.read(BLOB_CHUNK_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
