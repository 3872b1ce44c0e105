"""A backup is enough to go on from, whatever ran meanwhile; upkeep deletes what nobody needs and nothing else."""

from __future__ import annotations

import shutil

import grpc
import pytest

from fusion.base.errors import ConfigError
from fusion.wire.v1 import coordinator_pb2
from fusion_coordinator.backup import KEPT, backup, hourly
from fusion_coordinator.statedir import StateDir
from tests.support.coordinator import CoordinatorProcess, FakeOwner, wait_until


def test_a_backup_of_a_running_coordinator_is_all_that_a_new_one_needs(tmp_path):
    with CoordinatorProcess(tmp_path / "state") as coordinator:
        owner = FakeOwner(coordinator)
        job = owner.submit(owner.job())
        target = tmp_path / "copy"
        first = backup(StateDir(coordinator.directory), target)
        later = owner.submit(owner.job(layers=5))
        second = backup(StateDir(coordinator.directory), target)
        assert first.files > second.files > 0
        coordinator.kill()
        shutil.rmtree(coordinator.directory / "blobs")
        for name in ("coordinator.db", "coordinator.db-wal", "coordinator.db-shm", "ca-key.pem"):
            (coordinator.directory / name).unlink(missing_ok=True)
        shutil.copytree(target, coordinator.directory, dirs_exist_ok=True)
        coordinator.start()

        def answers():
            try:
                return owner.state(job)
            except grpc.RpcError:
                return None

        assert wait_until(answers, "the restored coordinator answers") == "queued"
        assert owner.state(later) == "queued"
        graph = owner.status(job).graph
        parts = owner.stubs.blobs.Get(coordinator_pb2.GetBlobRequest(digest=graph.digest), timeout=10)
        assert sum(len(part.data) for part in parts) == graph.size_bytes
        owner.close()


def test_a_backup_never_overwrites_what_is_none(tmp_path):
    state = StateDir(CoordinatorProcess(tmp_path / "state").directory)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="not empty and no backup"):
        backup(state, tmp_path / "full")
    with pytest.raises(ConfigError, match="in the state directory itself"):
        backup(state, state.path / "backup")
    other = StateDir(CoordinatorProcess(tmp_path / "other").directory)
    backup(other, tmp_path / "copy")
    with pytest.raises(ConfigError, match="is a backup of cluster"):
        backup(state, tmp_path / "copy")


def test_hourly_copies_of_the_database_are_kept_for_a_day(tmp_path):
    state = StateDir(CoordinatorProcess(tmp_path / "state").directory)
    made = [hourly(state, 1e9 + 3600 * hour) for hour in range(KEPT + 2)]
    assert sorted((state.path / "backups").iterdir()) == made[2:]


def test_blobs_that_nothing_refers_to_are_deleted_after_their_time_and_no_others(tmp_path):
    with CoordinatorProcess(tmp_path / "state", {"upkeep_s": 0.3, "blobs_kept_s": 0.0}) as coordinator:
        owner = FakeOwner(coordinator)
        spec = owner.job()
        job = None
        for _ in range(20):  # a look may come between upload and submission, here where nothing is kept for long
            try:
                job = owner.submit(spec)
                break
            except grpc.RpcError:
                spec = owner.job()
        assert job is not None
        stray = owner.upload(b"of a submission that never came")
        stat = coordinator_pb2.StatBlobRequest(digest=stray.digest)
        wait_until(lambda: not owner.stubs.blobs.Stat(stat, timeout=5).complete, "the stray blob is deleted")
        for blob in (spec.graph, spec.weights, spec.data.files[0].blob):
            assert owner.stubs.blobs.Stat(coordinator_pb2.StatBlobRequest(digest=blob.digest), timeout=5).complete
        assert len(list((coordinator.directory / "backups").iterdir())) >= 1
        owner.close()
