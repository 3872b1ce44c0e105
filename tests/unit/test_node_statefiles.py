"""States on a node: found by what they are, whole or not at all, and never in a place that others can write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusion.base.digest import BlobHasher
from fusion.protocol.job import BlobRef
from fusion_node import statefiles
from fusion_node.statefiles import FileSource, Kept, StateFiles

JOB, OTHER = "job-aaaaaaaaaa", "job-bbbbbbbbbb"


def keep(files: StateFiles, job: str, content: bytes, step: int = 5, stage: int = 0) -> Kept:
    hasher = BlobHasher()
    hasher.update(content)
    kept = Kept(job, 2, stage, step, BlobRef(hasher.hexdigest(), len(content)))
    part = files.begin(job, len(content))
    part.write_bytes(content)
    files.keep(part, kept)
    return kept


def test_a_file_s_name_says_all_about_a_state(tmp_path: Path) -> None:
    files = StateFiles([tmp_path / "state"])
    first, second = keep(files, JOB, b"first", 7, 1), keep(files, JOB, b"second", 6, 0)
    other = keep(files, OTHER, b"other")
    files.begin(JOB, 10)
    (tmp_path / "state" / "stray").touch()
    assert StateFiles([tmp_path / "state"]).all() == [second, first, other]
    assert files.all(JOB) == [second, first]
    assert Kept.of_name(first.file_name) == first
    assert Kept.of_name(first.file_name + ".part") is None
    assert Kept.of_name("../" + first.file_name) is None


def test_a_kept_state_is_found_by_its_digest_as_long_as_it_is_whole(tmp_path: Path) -> None:
    files, content = StateFiles([tmp_path / "state"]), bytes(range(256)) * 9000
    blob = keep(files, JOB, content).blob
    path = files.find(JOB, blob)
    assert path is not None
    assert files.find(OTHER, blob) is None
    source = FileSource(path)
    assert source.size_bytes == len(content)
    assert b"".join(source.chunks(1, 3)) == content[2**20 :]
    part = bytearray(100)
    source.read_into(2**20 - 50, memoryview(part))
    assert bytes(part) == content[2**20 - 50 : 2**20 + 50]
    path.write_bytes(content[:-1] + b"x")
    assert files.find(JOB, blob) is None
    path.write_bytes(content[:-1])
    assert files.find(JOB, blob) is None


def test_states_are_deleted_by_job_or_all_together_half_written_ones_too(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    files = StateFiles([directory])
    files.clear()
    other = keep(files, OTHER, b"other")
    keep(files, JOB, b"mine")
    files.begin(JOB, 4).write_bytes(b"half")
    files.clear(JOB)
    assert [path.name for path in directory.iterdir()] == [other.file_name]
    half = files.begin(OTHER, 4)
    files.clear_unfinished()
    assert not half.exists()
    assert files.all() == [other]
    files.clear()
    assert not directory.exists()


def test_the_first_place_with_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    files = StateFiles([memory, disk])
    assert files.begin(JOB, 10).parent == memory

    def full(directory: Path, size_bytes: int) -> None:
        if directory == memory or size_bytes > 1000:
            raise OSError(errno.ENOSPC, f"no space in {directory}")

    monkeypatch.setattr(statefiles, "_check_room", full)
    assert files.begin(JOB, 10).parent == disk
    with pytest.raises(OSError, match=r"no space in .*disk"):
        files.begin(JOB, 2000)


def test_more_than_there_is_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    with pytest.raises(OSError, match=r"need .* free "):
        StateFiles([tmp_path / "state"]).begin(JOB, found.f_bavail * found.f_frsize)


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    open_to_all, disk = tmp_path / "shared", tmp_path / "disk"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(disk)
    disk.mkdir(mode=0o700)
    files = StateFiles([open_to_all, link, disk])
    kept = keep(files, JOB, b"mine")
    assert list(open_to_all.iterdir()) == []
    assert [path.parent for path in (files.path(kept),) if path is not None] == [link]  # by its name, from the disk
    (open_to_all / kept.file_name).write_bytes(b"theirs")
    assert StateFiles([open_to_all]).all() == []
