"""The store on SQLite: one file, one connection, one thread, every commit synced to disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.pool import StaticPool

from fusion.base.errors import ConfigError, StateError
from fusion.base.ids import JobId
from fusion_coordinator.state import AnyEvent, State, apply_all
from fusion_coordinator.state.events import decode_event, encode_event, redone_after
from fusion_coordinator.store.base import Answer, BlobRecord, LogRow, Request, StepRow
from fusion_coordinator.store.schema import ANSWERS, BLOBS, EVENTS, LOGS, MIGRATIONS, SNAPSHOT, STEPS, Migration

EVENTS_KEPT = 10_000  #: behind the snapshot, for whoever looks into what happened
_BUSY_TIMEOUT_S = 5.0
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    f"busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}",
    "wal_autocheckpoint=1000",
    "trusted_schema=OFF",
)


class SqliteStore:
    """Opens an existing database file, or makes one if `create`. Use it only from the thread that made it."""

    def __init__(self, path: Path, *, create: bool = False, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self._path = path
        _check_file(path, create)
        self._engine = sa.create_engine(
            f"sqlite:///{path}",
            poolclass=StaticPool,
            connect_args={"timeout": _BUSY_TIMEOUT_S, "isolation_level": None},
        )
        sa.event.listen(self._engine, "connect", _configure)
        sa.event.listen(self._engine, "begin", _begin_immediate)
        try:
            self._connection = self._engine.connect()
            self._check_integrity()
            self._migrate(migrations)
        except sa.exc.DatabaseError as error:
            self._engine.dispose()
            if "locked" in str(error.orig):
                raise StateError(f"{path} is locked by another process; end it first") from None
            raise _unusable(path, str(error.orig)) from None
        except ConfigError:
            self.close()
            raise

    def _check_integrity(self) -> None:
        found = self._connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        self._connection.rollback()
        if found != "ok":
            raise _unusable(self._path, str(found))

    def _migrate(self, migrations: Sequence[Migration]) -> None:
        version = int(self._connection.exec_driver_sql("PRAGMA user_version").scalar_one())
        self._connection.rollback()
        if version > len(migrations):
            raise ConfigError(
                f"{self._path} has schema version {version}, this program knows up to {len(migrations)}; upgrade it"
            )
        if 0 < version < len(migrations):
            self._copy(self._path.with_name(f"{self._path.name}.bak-v{version}"))
        for number in range(version, len(migrations)):
            with self._connection.begin():
                migrations[number](self._connection)
                self._connection.exec_driver_sql(f"PRAGMA user_version={number + 1}")

    def _copy(self, target: Path) -> None:
        with closing(sqlite3.connect(target)) as copy:
            source: Any = self._connection.connection.driver_connection
            source.backup(copy)

    def load(self) -> State:
        with self._connection.begin():
            row = self._connection.execute(sa.select(SNAPSHOT.c.seq, SNAPSHOT.c.body)).one_or_none()
            start = State() if row is None else msgspec.json.decode(row.body, type=State)
            later = sa.select(EVENTS.c.body).where(EVENTS.c.seq > (0 if row is None else row.seq))
            bodies = self._connection.execute(later.order_by(EVENTS.c.seq)).scalars().all()
        return apply_all((decode_event(body) for body in bodies), start)

    def commit(self, events: Sequence[AnyEvent], answer: Answer | None = None) -> None:
        if not events and answer is None:
            return
        with self._connection.begin():
            if events:
                self._connection.execute(sa.insert(EVENTS), [{"body": encode_event(event)} for event in events])
            for job, step in filter(None, map(redone_after, events)):
                self._connection.execute(sa.delete(STEPS).where(STEPS.c.job == job, STEPS.c.step > step))
            if answer is not None:
                row = {**_request_key(answer.request), "response": answer.response}
                self._connection.execute(sa.insert(ANSWERS), row | {"expires_wall_s": answer.expires_wall_s})

    def answer(self, request: Request, now_wall_s: float) -> bytes | None:
        query = sa.select(ANSWERS.c.response).filter_by(**_request_key(request))
        response: bytes | None = self._scalar(query.where(ANSWERS.c.expires_wall_s > now_wall_s))
        return response

    def compact(self, state: State, now_wall_s: float) -> None:
        with self._connection.begin():
            seq = self._connection.execute(sa.select(sa.func.coalesce(sa.func.max(EVENTS.c.seq), 0))).scalar_one()
            row = {"id": 1, "seq": seq, "body": msgspec.json.encode(state)}
            self._connection.execute(sa.delete(SNAPSHOT))
            self._connection.execute(sa.insert(SNAPSHOT), row)
            self._connection.execute(sa.delete(EVENTS).where(EVENTS.c.seq <= seq - EVENTS_KEPT))
            self._connection.execute(sa.delete(ANSWERS).where(ANSWERS.c.expires_wall_s <= now_wall_s))

    def blob(self, digest: str) -> BlobRecord | None:
        row = self._rows(sa.select(BLOBS).where(BLOBS.c.digest == digest))
        return BlobRecord(*tuple(row[0])) if row else None

    def add_blob(self, blob: BlobRecord) -> None:
        row = (blob.digest, blob.size_bytes, blob.chunk_digests, blob.stored_wall_s)
        with self._connection.begin():
            self._connection.execute(insert(BLOBS).values(row).on_conflict_do_nothing())

    def blobs(self, before_wall_s: float) -> list[str]:
        rows = self._rows(sa.select(BLOBS.c.digest).where(BLOBS.c.stored_wall_s < before_wall_s))
        return [str(row.digest) for row in rows]

    def drop_blobs(self, digests: Sequence[str]) -> None:
        if digests:
            with self._connection.begin():
                self._connection.execute(sa.delete(BLOBS).where(BLOBS.c.digest.in_(digests)))

    def add_progress(self, steps: Sequence[StepRow], logs: Sequence[LogRow]) -> None:
        if not steps and not logs:
            return
        with self._connection.begin():
            if steps:
                rows = [{"job": row.job, "step": row.step, "stage": row.stage, "body": row.body} for row in steps]
                self._connection.execute(insert(STEPS).on_conflict_do_nothing(), rows)
            if logs:
                lines = [{"job": row.job, "number": row.number, "body": row.body} for row in logs]
                self._connection.execute(insert(LOGS).on_conflict_do_nothing(), lines)

    def steps(self, job: JobId, after: int, limit: int) -> list[StepRow]:
        numbers = (
            sa.select(STEPS.c.step)
            .where(STEPS.c.job == job, STEPS.c.step > after)
            .distinct()
            .order_by(STEPS.c.step)
            .limit(limit)
            .subquery()
        )
        last = sa.select(sa.func.max(numbers.c.step)).scalar_subquery()
        query = sa.select(STEPS).where(STEPS.c.job == job, STEPS.c.step > after, STEPS.c.step <= last)
        return [StepRow(*tuple(row)) for row in self._rows(query.order_by(STEPS.c.step, STEPS.c.stage))]

    def last_step(self, job: JobId, stages: int, after: int = 0) -> int:
        query = sa.select(STEPS.c.step).where(STEPS.c.job == job, STEPS.c.step > after).group_by(STEPS.c.step)
        query = query.having(sa.func.count() >= stages).order_by(STEPS.c.step.desc()).limit(1)
        return int(self._scalar(query) or 0)

    def logs(self, job: JobId, after: int, limit: int) -> list[LogRow]:
        query = sa.select(LOGS).where(LOGS.c.job == job, LOGS.c.number > after)
        return [LogRow(*tuple(row)) for row in self._rows(query.order_by(LOGS.c.number).limit(limit))]

    def last_log(self, job: JobId) -> int:
        return int(self._scalar(sa.select(sa.func.max(LOGS.c.number)).where(LOGS.c.job == job)) or 0)

    def drop_logs(self, job: JobId, up_to: int) -> None:
        with self._connection.begin():
            self._connection.execute(sa.delete(LOGS).where(LOGS.c.job == job, LOGS.c.number <= up_to))

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        with self._connection.begin():
            return self._connection.execute(query).all()

    def _scalar(self, query: sa.Select[Any]) -> Any:
        with self._connection.begin():
            return self._connection.execute(query).scalar_one_or_none()


def _request_key(request: Request) -> dict[str, Any]:
    return {"caller": request.caller, "method": request.method, "request_id": request.request_id}


def _check_file(path: Path, create: bool) -> None:
    """SQLite takes a missing or empty file for a new database; here that would be the loss of a cluster."""
    if create:
        if path.exists():
            raise ConfigError(f"{path} exists already; it is never overwritten")
        return
    if not path.exists():
        raise ConfigError(f"{path} is missing; put its latest copy there ({_copies(path)})")
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            raise _unusable(path, "not a database file")


def _unusable(path: Path, why: str) -> ConfigError:
    why = " ".join(why.split())
    return ConfigError(f"{path} is damaged ({why}); nothing was changed; put its latest copy there ({_copies(path)})")


def _copies(path: Path) -> str:
    found: list[str] = []
    with suppress(OSError):
        found = sorted(copy.name for copy in path.parent.glob(f"{path.name}.bak*"))
        found += [f"backups/{copy.name}" for copy in sorted((path.parent / "backups").glob("*.db"))[-1:]]
    return ", ".join(found) or "there are none beside it"


def _configure(connection: Any, _record: Any) -> None:
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
