"""The tables, and the way from one version of them to the next.

The version is SQLite's `user_version`. A migration runs in one transaction, after the file was copied.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

METADATA = sa.MetaData()
_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("seq", _NUMBER, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
SNAPSHOT = sa.Table(
    "snapshot",
    METADATA,
    sa.Column("id", _NUMBER, primary_key=True),
    sa.Column("seq", _NUMBER, nullable=False),  # of the last event in it
    sa.Column("body", sa.LargeBinary, nullable=False),
)
ANSWERS = sa.Table(
    "rpc_dedupe",
    METADATA,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("method", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("response", sa.LargeBinary, nullable=False),
    sa.Column("expires_wall_s", sa.REAL, nullable=False),
)
BLOBS = sa.Table(
    "blobs",
    METADATA,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("size_bytes", _NUMBER, nullable=False),
    sa.Column("chunk_digests", sa.LargeBinary, nullable=False),
    sa.Column("stored_wall_s", sa.REAL, nullable=False),
)
STEPS = sa.Table(
    "steps",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("step", _NUMBER, primary_key=True),
    sa.Column("stage", _NUMBER, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
LOGS = sa.Table(
    "logs",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("number", _NUMBER, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

Migration = Callable[[sa.Connection], None]


def _first(connection: sa.Connection) -> None:
    METADATA.create_all(connection)


#: Entry n leads from version n to n + 1. Entries are never changed once released.
MIGRATIONS: tuple[Migration, ...] = (_first,)
