"""Keeps versions of a stage's state while it trains: a copy in memory at once, a file and a replica by and by.

The thread that computes only copies. A thread of its own writes the file, computes its digest and hands it to the
holder of the replica; checkpoints are uploaded on another. A disk that is full never stops training: it is said once,
and tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from fusion.base.digest import BlobHasher
from fusion.base.errors import FusionError, UnreachableError
from fusion.observe import failpoints
from fusion.protocol.job import BlobRef
from fusion.runtime.tensorfile import file_pieces
from fusion_node.statefiles import Kept, StateFiles

AGAIN_S = 15.0  #: after a disk was full
COPY_SHARE = 0.02  #: of the time that training may wait for copies
WRITE_SHARE = 0.25  #: of the time that one core may spend on writing and digests
MAX_WAITING = 2  #: versions that wait to be written: one, and a checkpoint's

Select = Callable[[int, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
Log = Callable[[Literal["info", "warning"], str], None]
Upload = Callable[[Path], BlobRef]


class Replicator(Protocol):
    """Brings a file to the node that holds a copy of this stage's states."""

    def send(self, kept: Kept, path: Path) -> None:
        """Send a state in the background; what was under way before goes on."""
        ...

    def settled(self, kept: Kept) -> bool:
        """Whether the holder has it, or has said that it cannot."""
        ...


@dataclass(slots=True)
class _Version:
    """A copy of the state in this process's memory."""

    step: int
    checkpoint: bool
    tensors: dict[str, torch.Tensor]
    at_s: float
    copy_s: float


class HostCopies:
    """Copies into memory that is used again: fresh pages would cost more than the copy itself."""

    def __init__(self) -> None:
        self._free: list[dict[str, torch.Tensor]] = []
        self._lock = threading.Lock()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a copy of all these tensors in this machine's memory."""
        with self._lock:
            old = self._free.pop() if self._free else {}
        return {name: _copied(tensor.detach(), old.get(name)) for name, tensor in tensors.items()}

    def give_back(self, copies: dict[str, torch.Tensor]) -> None:
        """Let a copy's memory be used again."""
        with self._lock:
            if len(self._free) < MAX_WAITING:
                self._free.append(copies)


def _copied(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
        old = torch.empty(tensor.shape, dtype=tensor.dtype)
    return old.copy_(tensor)


class StateKeeper:
    """The `Keeper` of a worker. `keep`, `safe_step` and `stable` belong to the thread that computes."""

    def __init__(
        self,
        files: StateFiles,
        job: str,
        epoch: int,
        stage: int,
        start_step: int,
        *,
        select: Select,
        log: Log,
        upload: Upload,
        uploaded: Callable[[Kept], None],
        replicator: Replicator | None = None,
    ) -> None:
        """`select` picks what is kept of a stage's tensors; `uploaded` hears of every checkpoint in the blob store."""
        self._files, self._job, self._epoch, self._stage = files, job, epoch, stage
        self._select, self._log, self._upload, self._uploaded = select, log, upload, uploaded
        self._replicator = replicator
        self._copies = HostCopies()
        self._changed = threading.Condition()
        self._waiting: list[_Version] = []
        self._writing: _Version | None = None
        self._written: Kept | None = None  #: the newest in a file
        self._rest_until_s = 0.0  #: no version is called safe before: the next would follow too soon
        self._stable = self._deleted_below = start_step
        self._uploads: list[Kept] = []
        self._uploading: Kept | None = None
        self._complained = False
        self._closing = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("keep-states", self._write_all), ("upload-states", self._upload_all))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the thread that computes ----

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor], *, checkpoint: bool) -> None:
        """Copy the state after `step`; a version that still waits to be written is given up unless a checkpoint's."""
        began_s = time.monotonic()
        copies = self._copies.take(self._select(step, tensors))
        version = _Version(step, checkpoint, copies, began_s, time.monotonic() - began_s)
        with self._changed:
            given_up = [old for old in self._waiting if not old.checkpoint]
            self._waiting = [old for old in self._waiting if old.checkpoint]
            if len(self._waiting) >= MAX_WAITING:
                given_up.append(self._waiting.pop())
            self._waiting.append(version)
            self._changed.notify_all()
        for old in given_up:
            self._copies.give_back(old.tensors)
            if old.checkpoint:
                self._log("warning", f"checkpoint of step {old.step} given up: the last ones are not written yet")

    def safe_step(self) -> int:
        """Return the newest step that is written and settled with the holder."""
        written = self._written
        if written is None or time.monotonic() < self._rest_until_s:
            return -1
        settled = self._replicator is None or self._replicator.settled(written)
        return written.step if settled else -1

    def stable(self, step: int) -> None:
        """Let what is older than `step` go."""
        with self._changed:
            self._stable = step
            self._changed.notify_all()

    # ---- writing ----

    def _write_all(self) -> None:
        while (version := self._next()) is not None:
            try:
                self._write(version)
            except OSError as error:
                self._no_room(version, error)
                continue
            finally:
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()
            self._copies.give_back(version.tensors)

    def _next(self) -> _Version | None:
        """Return the next version to write; deletes old ones meanwhile. None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._stable > self._deleted_below)
                stable, version = self._stable, None
                if self._waiting:
                    version = self._writing = self._waiting.pop(0)
                elif self._closing:
                    return None
            if stable > self._deleted_below:
                self._delete_older(stable)
            if version is not None:
                return version

    def _write(self, version: _Version) -> None:
        began_s = time.monotonic()
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in version.tensors.values())
        part = self._files.begin(self._job, size_bytes)
        try:
            hasher = BlobHasher()
            with part.open("wb") as file:
                for piece in file_pieces(version.tensors):
                    failpoints.reach("disk.write", what="state", stage=self._stage, step=version.step)
                    file.write(piece)
                    hasher.update(piece)
            blob = BlobRef(hasher.hexdigest(), hasher.size_bytes)
            kept = Kept(self._job, self._epoch, self._stage, version.step, blob)
            failpoints.reach("keep.before_rename", stage=self._stage, step=version.step)
            path = self._files.keep(part, kept)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        failpoints.reach("keep.after_rename", stage=self._stage, step=version.step)
        write_s = time.monotonic() - began_s
        self._rest_until_s = version.at_s + max(version.copy_s / COPY_SHARE, write_s / WRITE_SHARE)
        if self._replicator is not None:
            self._replicator.send(kept, path)
        with self._changed:
            self._written, self._complained = kept, False
            if version.checkpoint:
                self._uploads.append(kept)
            self._changed.notify_all()

    def _no_room(self, version: _Version, error: OSError) -> None:
        """Say it once, and keep the version until there is room or a newer one takes its place."""
        if not self._complained:
            self._complained = True
            what = "checkpoint" if version.checkpoint else "state"
            reason = error.strerror or str(error)
            self._log("warning", f"{what} of step {version.step} not written: {reason}; training goes on without it")
        with self._changed:
            if self._closing:
                return
            if not self._waiting or version.checkpoint:
                self._waiting.insert(0, version)
            self._changed.wait_for(lambda: self._closing or self._waiting[0] is not version, AGAIN_S)

    def _delete_older(self, stable: int) -> None:
        """Delete this job's states below `stable`, of all stages that are kept here; checkpoints once they are sent."""
        with self._changed:
            needed = {*self._uploads, self._uploading}
            self._deleted_below = stable
        for kept in self._files.all(self._job):
            if kept.step < stable and kept not in needed:
                self._files.delete(kept)

    # ---- checkpoints ----

    def _upload_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._uploads or (self._closing and not self._unwritten()))
                if not self._uploads:
                    return
                kept = self._uploading = self._uploads.pop(0)
            done = self._upload_one(kept)
            with self._changed:
                self._uploading = None
                again = not done and not self._uploads and not self._closing
                if again:
                    self._uploads.append(kept)
                old = not again and kept.step < self._stable
                self._changed.notify_all()
                if again:
                    self._changed.wait_for(lambda: self._closing or len(self._uploads) > 1, AGAIN_S)
                    if len(self._uploads) > 1:  # a newer one takes its place
                        self._uploads.remove(kept)
            if old:
                self._files.delete(kept)

    def _upload_one(self, kept: Kept) -> bool:
        """Upload a checkpoint; whether that is over, for better or worse."""
        path = self._files.path(kept)
        try:
            if path is None:
                raise FileNotFoundError(f"{kept.file_name} is gone")
            failpoints.reach("checkpoint.upload", stage=self._stage, step=kept.step)
            blob = self._upload(path)
            if blob != kept.blob:
                raise OSError(f"its digest is {blob.digest} instead of {kept.blob.digest}")
        except (FusionError, OSError) as error:
            self._log("warning", f"checkpoint of step {kept.step} not uploaded: {error}; training goes on")
            return not isinstance(error, UnreachableError)
        self._uploaded(kept)
        return True

    def _unwritten(self) -> bool:
        return bool(self._waiting) or self._writing is not None

    @property
    def owes_checkpoint(self) -> bool:
        """Whether a checkpoint is still to be uploaded."""
        with self._changed:
            return self._owes()

    def _owes(self) -> bool:
        writing = [*self._waiting, *([self._writing] if self._writing is not None else [])]
        unwritten = not self._complained and any(version.checkpoint for version in writing)
        return unwritten or bool(self._uploads) or self._uploading is not None

    # ---- the end ----

    def finish(self, until: Callable[[], bool]) -> None:
        """Return once all checkpoints are uploaded or given up, or once `until()` says so."""
        with self._changed:
            while self._owes() and not until():
                self._changed.wait(0.2)

    def close(self, timeout_s: float) -> None:
        """Write what is only in memory, for at most `timeout_s`; uploads and replicas are left to others."""
        with self._changed:
            self._closing = True
            self._uploads.clear()
            self._changed.notify_all()
        self._threads[0].join(timeout_s)
