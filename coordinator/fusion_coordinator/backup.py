"""Copies of the state directory: all of it on demand, also of a running coordinator, and the database every hour."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fusion.base.errors import ConfigError
from fusion_coordinator.statedir import StateDir

KEPT = 24  #: hourly copies of the database
_SINGLE = ("config.json", "ca.pem", "ca-key.pem")
_FOLDERS = ("admin", "own")
_BULK = ("blobs", "checkpoints")


@dataclass(frozen=True, slots=True)
class Copied:
    """What a backup did."""

    files: int  #: copied this time; what was there from an earlier backup stayed
    size_bytes: int


def copy_database(source: Path, target: Path) -> None:
    """Copy a database that may be in use, whole and checked; `target` appears only then."""
    making = target.with_name(f".{target.name}.tmp")
    making.unlink(missing_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
            closing(sqlite3.connect(making)) as copy,
        ):
            making.chmod(0o600)
            live.backup(copy)
            found = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        making.unlink(missing_ok=True)
        raise ConfigError(f"{source} cannot be copied to {target}: {error}") from None
    if found != "ok":
        making.unlink(missing_ok=True)
        raise ConfigError(f"{source} is damaged ({found}); it was not copied")
    making.replace(target)


def hourly(state: StateDir, now_wall_s: float) -> Path:
    """Put a copy of the database into the directory `backups`, and keep the last `KEPT`."""
    directory = state.path / "backups"
    directory.mkdir(mode=0o700, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_wall_s))
    target = directory / f"coordinator-{stamp}.db"
    copy_database(state.database, target)
    for old in sorted(directory.glob("coordinator-*.db"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return target


def backup(state: StateDir, target: Path) -> Copied:
    """Copy everything that a coordinator needs to `target`, which may hold an earlier backup; ConfigError if it cannot.

    A running coordinator is not disturbed. Blobs and checkpoints never change, so only new ones are copied; they come
    before the database and after it, so that none is missing that the copied database names.
    """
    config = state.config()
    earlier = target / "config.json"
    if target.resolve() == state.path.resolve() or state.path.resolve() in target.resolve().parents:
        raise ConfigError(f"{target} is in the state directory itself; choose another disk")
    if target.exists() and any(target.iterdir()) and not earlier.exists():
        raise ConfigError(f"{target} is not empty and no backup; name a new folder")
    if earlier.exists() and StateDir(target).config().cluster != config.cluster:
        raise ConfigError(f"{target} is a backup of cluster {StateDir(target).config().cluster}, not {config.cluster}")
    try:
        return _backup(state, target)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: {error.strerror}; the backup is not complete") from None


def _backup(state: StateDir, target: Path) -> Copied:
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = _bulk_of(state.path)
    copied = [_copy_new(state.path, target, known)]
    for name in _SINGLE:
        if (state.path / name).exists():
            _replace(state.path / name, target / name)
    for name in _FOLDERS:
        (target / name).mkdir(exist_ok=True, mode=0o700)
        for file in (state.path / name).glob("*"):
            _replace(file, target / name / file.name)
    copy_database(state.database, target / "coordinator.db")
    after = _bulk_of(state.path)
    copied.append(_copy_new(state.path, target, after))
    for path in _bulk_of(target) - known - after:
        (target / path).unlink(missing_ok=True)
    return Copied(sum(one.files for one in copied), sum(one.size_bytes for one in copied))


def _bulk_of(directory: Path) -> set[Path]:
    """Return the finished files of blobs and checkpoints, relative to `directory`."""
    return {
        path.relative_to(directory)
        for name in _BULK
        for path in (directory / name).glob("**/*")
        if path.is_file() and not path.name.endswith((".part", ".tmp")) and not path.parent.name.startswith(".")
    }


def _copy_new(source: Path, target: Path, paths: set[Path]) -> Copied:
    files = size_bytes = 0
    for path in sorted(paths):
        if (target / path).exists():
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            _replace(source / path, target / path)
        except FileNotFoundError:
            continue  # it was needed no more
        files, size_bytes = files + 1, size_bytes + (target / path).stat().st_size
    return Copied(files, size_bytes)


def _replace(source: Path, target: Path) -> None:
    making = target.with_name(f".{target.name}.tmp")
    shutil.copy2(source, making)
    making.replace(target)
