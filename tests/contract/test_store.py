"""One suite for every store: what was committed is there, in order, once; what was not leaves no trace."""

from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from fusion.base.errors import ConfigError, StateError
from fusion.base.ids import JobId, NodeId
from fusion.security.credentials import Role
from fusion_coordinator.lock import StateLock
from fusion_coordinator.state import State, apply_all
from fusion_coordinator.state.events import (
    Enrolled,
    JobEnded,
    JobPlanned,
    JobSubmitted,
    NodeGone,
    NodeRegistered,
    Revoked,
    StageMoved,
    TokenCreated,
    decode_event,
    encode_event,
)
from fusion_coordinator.state.records import (
    HardwareRecord,
    JobState,
    NodeState,
    StageRecord,
    StageState,
    WeightsRecord,
)
from fusion_coordinator.store.base import Answer, BlobRecord, LogRow, Request, StepRow
from fusion_coordinator.store.memory import MemoryStore
from fusion_coordinator.store.schema import MIGRATIONS
from fusion_coordinator.store.sqlite import SqliteStore

JOB, OTHER = JobId("job-aaaaaaaaaa"), JobId("job-bbbbbbbbbb")
NODE = NodeId("n" * 20)
HARDWARE = HardwareRecord("cpu", "Test CPU", 2**34, 1.5e11, 8, "linux", "3.11.2", "2.13.0", "0.1.0")
EVENTS = [
    TokenCreated(1.0, "tok-abcdefghij", b"\x00\xffhash", Role.NODE, 900.0),
    Enrolled(2.0, "tok-abcdefghij", NODE, Role.NODE, "n0"),
    NodeRegistered(3.0, NODE, "n0", "10.0.0.1:7445", "10.0.0.1", HARDWARE, 1),
    JobSubmitted(4.0, JOB, "o" * 20, "gpt", b"\x01\x02spec", 10),
    JobPlanned(5.0, JOB, 1, b"plan", (StageRecord(NODE, "n0", 1),)),
    StageMoved(6.0, JOB, 1, 0, StageState.FINISHED, weights=WeightsRecord("f" * 64, 7)),
    JobSubmitted(7.0, OTHER, "o" * 20, "gpt2", b"", 5),
    JobEnded(8.0, OTHER, JobState.CANCELLED, "by its owner"),
    NodeGone(9.0, NODE, 1, NodeState.LEFT, "SIGTERM"),
    Revoked(10.0, "o" * 20),
]


@pytest.fixture(params=["sqlite", "memory"])
def reopen(request, tmp_path):
    """Returns a function that gives the store, after a restart where there can be one."""
    if request.param == "memory":
        store = MemoryStore()
        yield lambda: store
        return
    path = tmp_path / "coordinator.db"
    opened = [SqliteStore(path, create=True)]

    def again():
        opened.pop().close()
        opened.append(SqliteStore(path))
        return opened[0]

    yield again
    opened.pop().close()


def request(number=1):
    return Request("caller", "/fusion.wire.v1.Jobs/Submit", f"request-{number}")


def test_an_empty_store_gives_the_empty_state(reopen):
    assert reopen().load() == State()


def test_committed_events_lead_to_the_same_state_after_a_restart(reopen):
    store = reopen()
    store.commit(EVENTS[:4])
    store.commit(EVENTS[4:])
    loaded = reopen().load()
    assert loaded == apply_all(EVENTS, State())
    assert loaded.jobs[JOB].state is JobState.SUCCEEDED
    assert loaded.tokens["tok-abcdefghij"].used_by == NODE
    assert loaded.revoked == {"o" * 20}


def test_every_kind_of_event_survives_being_written():
    for event in EVENTS:
        assert decode_event(encode_event(event)) == event


def test_compaction_changes_nothing_that_is_loaded_and_later_events_still_count(reopen):
    store = reopen()
    store.commit(EVENTS[:5])
    store.compact(store.load(), 0.0)
    assert reopen().load() == apply_all(EVENTS[:5], State())
    store = reopen()
    store.commit(EVENTS[5:])
    assert reopen().load() == apply_all(EVENTS, State())


def test_an_answer_is_kept_with_its_effect_and_given_only_to_the_same_request(reopen):
    store = reopen()
    store.commit(EVENTS[3:4], Answer(request(), b"job-1", 100.0))
    store = reopen()
    assert store.answer(request(), 99.0) == b"job-1"
    assert store.answer(request(2), 99.0) is None
    assert store.answer(Request("other", request().method, "request-1"), 99.0) is None
    assert store.answer(Request("caller", "/fusion.wire.v1.Jobs/Cancel", "request-1"), 99.0) is None
    assert store.answer(request(), 100.0) is None


def test_a_request_that_was_answered_has_no_second_effect(reopen):
    store = reopen()
    store.commit(EVENTS[3:4], Answer(request(), b"job-1", 100.0))
    with pytest.raises((ValueError, sa.exc.IntegrityError)):
        store.commit(EVENTS[6:7], Answer(request(), b"job-2", 100.0))
    assert set(reopen().load().jobs) == {JOB}
    assert reopen().answer(request(), 1.0) == b"job-1"


def test_compaction_forgets_expired_answers(reopen):
    store = reopen()
    store.commit([], Answer(request(1), b"old", 10.0))
    store.commit([], Answer(request(2), b"new", 20.0))
    store.compact(store.load(), 15.0)
    assert store.answer(request(1), 5.0) is None
    assert store.answer(request(2), 5.0) == b"new"


def test_blobs_are_known_once_they_were_added(reopen):
    store = reopen()
    blob = BlobRecord("a" * 64, 3_000_000_000, b"\x00" * 32 * 2862, 1.5)
    assert store.blob(blob.digest) is None
    store.add_blob(blob)
    store.add_blob(BlobRecord("a" * 64, 3_000_000_000, blob.chunk_digests, 9.0))
    assert reopen().blob(blob.digest) == blob


def test_steps_come_in_order_once_each_and_in_pages(reopen):
    store = reopen()
    rows = [StepRow(JOB, step, stage, b"%d.%d" % (step, stage)) for step in (3, 1, 2) for stage in (1, 0)]
    store.add_progress(rows, [])
    store.add_progress([StepRow(JOB, 3, 1, b"again"), StepRow(JOB, 4, 0, b"4.0"), StepRow(OTHER, 9, 0, b"x")], [])
    store = reopen()
    assert [row.body for row in store.steps(JOB, 0, 2)] == [b"1.0", b"1.1", b"2.0", b"2.1"]
    assert [row.body for row in store.steps(JOB, 2, 10)] == [b"3.0", b"3.1", b"4.0"]
    assert store.steps(JOB, 4, 10) == []
    assert (store.last_step(JOB, 2), store.last_step(JOB, 1), store.last_step(OTHER, 2)) == (3, 4, 0)


def test_log_lines_are_numbered_paged_and_dropped_from_the_old_end(reopen):
    store = reopen()
    store.add_progress([], [LogRow(JOB, number, b"%d" % number) for number in range(1, 6)])
    store.add_progress([], [LogRow(OTHER, 1, b"other")])
    store.drop_logs(JOB, 2)
    store = reopen()
    assert [row.number for row in store.logs(JOB, 0, 2)] == [3, 4]
    assert [row.body for row in store.logs(JOB, 4, 10)] == [b"5"]
    assert (store.last_log(JOB), store.last_log(OTHER), store.last_log(JobId("job-none"))) == (5, 1, 0)


# What only a file can have.


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "coordinator.db"
    store = SqliteStore(path, create=True)
    store.commit(EVENTS)
    store.close()
    return path


def test_the_file_is_written_with_full_durability(path):
    store = SqliteStore(path)
    pragmas = {
        name: store._connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
        for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout", "trusted_schema")
    }
    store.close()
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 5000,
        "trusted_schema": 0,
    }


def test_f29_a_damaged_file_is_refused_and_left_alone(path):
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xa5" * 4096
    path.write_bytes(content)
    (path.parent / "coordinator.db.bak-v1").touch()
    with pytest.raises(ConfigError, match=r"damaged.*coordinator\.db\.bak-v1"):
        SqliteStore(path)
    assert path.read_bytes() == content


def test_f29_a_missing_or_empty_file_is_never_taken_for_a_new_one(path):
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="damaged"):
        SqliteStore(path)
    assert path.stat().st_size == 0
    path.unlink()
    with pytest.raises(ConfigError, match="missing"):
        SqliteStore(path)
    assert not path.exists()


def test_a_new_cluster_never_overwrites_a_database(path):
    with pytest.raises(ConfigError, match="never overwritten"):
        SqliteStore(path, create=True)


def test_an_older_schema_is_copied_and_migrated_and_a_newer_one_refused(path):
    def second(connection):
        connection.exec_driver_sql("CREATE TABLE extra (x INTEGER)")

    SqliteStore(path, migrations=(*MIGRATIONS, second)).close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    connection.close()
    copy = sqlite3.connect(path.with_name(f"coordinator.db.bak-v{len(MIGRATIONS)}"))
    assert copy.execute("SELECT count(*) FROM events").fetchone() == (len(EVENTS),)
    assert copy.execute("SELECT count(*) FROM sqlite_master WHERE name='extra'").fetchone() == (0,)
    copy.close()
    with pytest.raises(ConfigError, match=f"schema version {len(MIGRATIONS) + 1}.*upgrade"):
        SqliteStore(path)


def test_a_migration_that_breaks_off_changes_nothing(path):
    def broken(connection):
        connection.exec_driver_sql("CREATE TABLE extra (x INTEGER)")
        raise ConfigError("power cut")

    with pytest.raises(ConfigError, match="power cut"):
        SqliteStore(path, migrations=(*MIGRATIONS, broken))
    store = SqliteStore(path)
    assert store.load() == apply_all(EVENTS, State())
    tables = store._connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
    store.close()
    assert "extra" not in tables


def test_f30_a_second_coordinator_on_a_state_directory_is_told_who_holds_it(tmp_path):
    import os

    first = StateLock(tmp_path)
    with pytest.raises(StateError, match=rf"another coordinator \(pid {os.getpid()}\) holds"):
        StateLock(tmp_path, wait_s=0.0)
    first.release()
    StateLock(tmp_path, wait_s=0.0).release()


def test_a_database_that_cannot_be_written_is_a_matter_of_trying_again_later():
    import asyncio

    from fusion.base.errors import UnreachableError
    from fusion_coordinator.store.thread import StoreThread

    def full_disk():
        raise sa.exc.OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))

    async def main():
        thread = StoreThread()
        try:
            with pytest.raises(UnreachableError, match="database or disk is full; free space there"):
                await thread.run(full_disk)
        finally:
            await thread.close()

    asyncio.run(main())
