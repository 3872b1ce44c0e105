"""States of stages in this node's keeping, one file each: its own stages' and the copies that it holds for others.

They outlive the worker. A file's name says all about it, and appears only when the file is whole, so what a crash
leaves is understood by whoever comes next. Memory is preferred to a disk: states are rewritten all the time.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fusion.base.digest import BLOB_CHUNK_BYTES, BlobHasher
from fusion.base.units import GIB, MIB, format_bytes
from fusion.protocol.job import BlobRef

MEMORY = Path("/dev/shm")  # noqa: S108  # a directory of our own in it, checked before use
_RESERVE, _MIN_RESERVE_BYTES, _MAX_RESERVE_BYTES = 0.1, 64 * MIB, 2 * GIB  #: share of a place that states leave free
_NAME = re.compile(r"([a-z0-9-]{8,40})\.e(\d{1,18})\.s(\d{1,9})\.t(\d{1,18})\.(\d{1,18})\.([0-9a-f]{64})\.safetensors")
_PART = ".part"


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of one stage after one step."""

    job: str
    epoch: int  #: of the plan whose stage it is
    stage: int
    step: int  #: the last one done
    blob: BlobRef

    @property
    def file_name(self) -> str:
        """Return the name that says all this."""
        blob = self.blob
        return f"{self.job}.e{self.epoch}.s{self.stage}.t{self.step}.{blob.size_bytes}.{blob.digest}.safetensors"

    @staticmethod
    def of_name(name: str) -> Kept | None:
        """Return what a file's name says; None if it is not a whole state's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        job, epoch, stage, step, size, digest = found.groups()
        return Kept(job, int(epoch), int(stage), int(step), BlobRef(digest, int(size)))


def state_directories(cache_dir: Path, identity: str) -> tuple[Path, ...]:
    """Return where this node keeps states, the best place first; FUSION_STATE_DIR names another place than memory."""
    disk = cache_dir / "state"
    if chosen := os.environ.get("FUSION_STATE_DIR"):
        return Path(chosen).expanduser().absolute() / f"fusion-{identity}", disk
    memory = MEMORY / f"fusion-{os.getuid()}-{identity}"
    return (memory, disk) if MEMORY.is_dir() else (disk,)


class StateFiles:
    """The states in a node's keeping. They may vanish at any time, and are verified when they are read."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)

    def begin(self, job: str, size_bytes: int) -> Path:
        """Return an empty file for a state of that size; OSError if no directory has room for it."""
        problem: OSError | None = None
        for directory in self._directories:
            try:
                _prepare(directory)
                _check_room(directory, size_bytes)
                path = directory / f"{job}.{secrets.token_hex(8)}{_PART}"
                path.touch(mode=0o600, exist_ok=False)
            except OSError as error:
                problem = error
                continue
            return path
        assert problem is not None  # there is at least one directory
        raise problem

    def keep(self, part: Path, kept: Kept) -> Path:
        """Give a file that is whole its name."""
        return part.replace(part.with_name(kept.file_name))

    def all(self, job: str | None = None) -> list[Kept]:
        """Return the whole states of a job, or of all jobs, by what their names say."""
        found = [Kept.of_name(path.name) for path in self._paths()]
        return sorted(
            {kept for kept in found if kept is not None and job in (None, kept.job)},
            key=lambda kept: (kept.job, kept.step, kept.epoch, kept.stage),
        )

    def path(self, kept: Kept) -> Path | None:
        """Return a state's file, if it is here; its content is not verified."""
        for directory in self._directories:
            path = directory / kept.file_name
            if path.exists():
                return path
        return None

    def find(self, job: str, blob: BlobRef) -> Path | None:
        """Return the file with a blob's content, verified; None if it is not here."""
        for path in self._paths():
            kept = Kept.of_name(path.name)
            if kept is None or kept.job != job or kept.blob != blob:
                continue
            try:
                if path.stat().st_size == blob.size_bytes and file_digest(path) == blob.digest:
                    return path
            except OSError:
                continue
        return None

    def delete(self, kept: Kept) -> None:
        """Delete a state."""
        for directory in self._directories:
            _unlink(directory / kept.file_name)

    def clear(self, job: str | None = None) -> None:
        """Delete the states of a job, or of all jobs, unfinished ones too, and directories that are empty then."""
        for path in self._paths():
            if job is None or path.name.startswith(f"{job}."):
                _unlink(path)
        for directory in self._directories:
            try:
                directory.rmdir()
            except OSError:
                continue

    def clear_unfinished(self) -> None:
        """Delete what was never finished. While no worker runs, nobody will."""
        for path in self._paths():
            if path.name.endswith(_PART):
                _unlink(path)

    def _paths(self) -> Iterator[Path]:
        for directory in self._directories:
            if _is_ours(directory):
                yield from sorted(directory.glob("*"))


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_ours(directory):
        raise OSError(errno.EPERM, f"{directory} is not this user's own")


def _is_ours(directory: Path) -> bool:
    """Whether it is a directory of this user: anybody may make one in a place that all share."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _check_room(directory: Path, size_bytes: int) -> None:
    found = os.statvfs(directory)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if directory.parent == MEMORY:
        memory = psutil.virtual_memory()
        free, total = min(free, memory.available), min(total, memory.total)
    needed = size_bytes + min(_MAX_RESERVE_BYTES, max(_MIN_RESERVE_BYTES, int(_RESERVE * total)))
    if free < needed:
        raise OSError(errno.ENOSPC, f"no space in {directory}: need {format_bytes(needed)}, free {format_bytes(free)}")


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


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


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, as the blob store names it."""
    hasher = BlobHasher()
    with path.open("rb") as file:
        while data := file.read(BLOB_CHUNK_BYTES):
            hasher.update(data)
    return hasher.hexdigest()
