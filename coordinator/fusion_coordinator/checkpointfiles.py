"""Checkpoints as folders: one safetensors file per stage, and a manifest, readable without this package.

    checkpoints/JOB/step-N/stage-K.safetensors    tensors by the model's own parameter names
    checkpoints/JOB/step-N/MANIFEST.json

A folder is made beside its place, synced, and renamed: what has the name `step-N` is whole. The files share their bytes
with the blobs of the same content where the file system can do that. Everything here blocks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from fusion import __version__
from fusion.base.digest import BlobHasher
from fusion.base.errors import ConfigError, DataError
from fusion.base.ids import random_id
from fusion.base.units import MIB, format_bytes
from fusion.observe import failpoints
from fusion_coordinator.blobs import BlobFiles

FORMAT = 1
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 16 * MIB
_READ_BYTES = MIB


class FileEntry(msgspec.Struct, frozen=True):
    """One stage's file."""

    name: str
    size_bytes: int
    digest: str  #: sha256 over the concatenated sha256 of each MiB: its name in the blob store
    sha256: str  #: of the whole file, as sha256sum prints it


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    format: int
    job: str
    name: str
    step: int  #: the last one done
    epoch: int
    graph: str  #: digest of the model's graph
    initial_weights: str  #: digest of what the job began with: frozen parameters and constants are only there
    torch_version: str
    package_version: str
    files: tuple[FileEntry, ...]  #: by stage


class DiskFullError(ConfigError):
    """There is no room for a checkpoint."""


class CheckpointFiles:
    """The directory of all jobs' checkpoints."""

    def __init__(self, directory: Path, blobs: BlobFiles) -> None:
        self._directory, self._blobs = directory, blobs
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, job: str, step: int) -> Path:
        """Return where a job's checkpoint lies, or would."""
        return self._directory / job / f"step-{step}"

    def tidy(self, known: Collection[tuple[str, int]]) -> None:
        """Remove what a crash left: folders that were not finished, and those of which nobody knows."""
        for path in self._directory.glob("*/*"):
            step = path.name.removeprefix("step-")
            if not step.isdecimal() or (path.parent.name, int(step)) not in known:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self, job: str, step: int) -> None:
        """Delete a checkpoint; its blobs are another matter."""
        shutil.rmtree(self.path(job, step), ignore_errors=True)

    def write(self, about: Manifest, digests: Sequence[str]) -> Manifest:
        """Make a checkpoint of blobs, read each again and verify it; return the whole manifest.

        DiskFullError if it does not fit; DataError names a file that is not what its digest says.
        """
        target = self.path(about.job, about.step)
        making = target.with_name(f".tmp-step-{about.step}-{random_id()}")
        try:
            failpoints.reach("checkpoint.begin", step=about.step)
            making.mkdir(parents=True, mode=0o700)
            files = tuple(self._add(making, about.step, stage, digest) for stage, digest in enumerate(digests))
            manifest = msgspec.structs.replace(about, files=files, package_version=__version__)
            _write_synced(making / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            _sync(making)
            if target.exists():  # of a process that died between the rename and the commit
                shutil.rmtree(target)
            failpoints.reach("checkpoint.before_rename", step=about.step)
            making.rename(target)
            _sync(target.parent)
            failpoints.reach("checkpoint.after_rename", step=about.step)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskFullError(_no_room(self._directory, self._blobs, digests)) from None
            raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return manifest

    def _add(self, making: Path, step: int, stage: int, digest: str) -> FileEntry:
        failpoints.reach("checkpoint.stage", stage=stage, step=step)
        source, path = self._blobs.path(digest), making / f"stage-{stage}.safetensors"
        try:
            os.link(source, path)
        except FileNotFoundError:
            raise DataError(f"blob {digest} is not on the disk any more") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.copyfile(source, path)  # another file system, or one without links
            _sync(path)
        return _verified(path, digest)

    def check(self, job: str, step: int, graph: str, digests: Sequence[str]) -> Manifest:
        """Read a checkpoint again as a whole; DataError names what is not as it was, with both digests."""
        folder = self.path(job, step)
        manifest = read_manifest(folder)
        if manifest.graph != graph:
            raise DataError(f"{folder}: it is of graph {manifest.graph}, the job's graph is {graph}")
        found = [file.digest for file in manifest.files]
        if (manifest.job, manifest.step, found) != (job, step, list(digests)):
            raise DataError(
                f"{folder / MANIFEST}: it tells of {manifest.job} after step {manifest.step} with digests "
                f"{', '.join(found)}, expected are {job}, step {step} and {', '.join(digests)}"
            )
        for file in manifest.files:
            _verified(folder / file.name, file.digest)
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; DataError if it is missing, damaged, or of a format that we do not know."""
    path = folder / MANIFEST
    try:
        body = path.read_bytes()[:MAX_MANIFEST_BYTES]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if manifest.format != FORMAT:
        raise DataError(f"{path} has format {manifest.format}, this program reads {FORMAT}; use the one that wrote it")
    for file in manifest.files:
        if Path(file.name).name != file.name or not file.name.endswith(".safetensors"):
            raise DataError(f"{path} names {file.name[:80]!r}, which is no file of a checkpoint")
    return manifest


def _verified(path: Path, digest: str) -> FileEntry:
    hasher, whole = BlobHasher(), hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                hasher.update(part)
                whole.update(part)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    if hasher.hexdigest() != digest:
        raise DataError(f"{path} is damaged: its digest is {hasher.hexdigest()}, expected is {digest}")
    return FileEntry(path.name, hasher.size_bytes, digest, whole.hexdigest())


def _no_room(directory: Path, blobs: BlobFiles, digests: Sequence[str]) -> str:
    needed = sum(path.stat().st_size for digest in digests if (path := blobs.path(digest)).exists())
    free = shutil.disk_usage(directory).free
    return f"no space on {directory} (need {format_bytes(needed)}, free {format_bytes(free)})"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
