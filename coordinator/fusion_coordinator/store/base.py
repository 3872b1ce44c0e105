"""The contract of a store. Calls block; all of them are made from one thread (`store.thread`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fusion.base.ids import JobId
from fusion_coordinator.state import AnyEvent, State


@dataclass(frozen=True, slots=True)
class Request:
    """What a repeated call is known by. Request ids of different callers and methods never meet."""

    caller: str  #: identity
    method: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, kept with the request's effect so that a repetition gets it again."""

    request: Request
    response: bytes
    expires_wall_s: float


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """A complete blob."""

    digest: str
    size_bytes: int
    chunk_digests: bytes
    stored_wall_s: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one stage reported of one step: a serialised StageStep."""

    job: JobId
    step: int
    stage: int
    body: bytes


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line of a job's log, numbered from 1: a serialised LogLine."""

    job: JobId
    number: int
    body: bytes


class Store(Protocol):
    """Durable memory. Every method that changes something returns only after it is on disk."""

    def load(self) -> State:
        """Return the state that the committed events lead to."""
        ...

    def commit(self, events: Sequence[AnyEvent], answer: Answer | None = None) -> None:
        """Keep events and the answer of the request that caused them, all or nothing.

        Reported steps that a job does again by one of the events (`redone_after`) are dropped with it.
        """
        ...

    def answer(self, request: Request, now_wall_s: float) -> bytes | None:
        """Return the kept answer to an earlier identical request."""
        ...

    def compact(self, state: State, now_wall_s: float) -> None:
        """Keep `state`, which all committed events led to, as the start of the next load; drop what is outdated."""
        ...

    def blob(self, digest: str) -> BlobRecord | None:
        """Return what is known of a complete blob."""
        ...

    def blobs(self, before_wall_s: float) -> list[str]:
        """Return the digests of all blobs that were stored before then."""
        ...

    def drop_blobs(self, digests: Sequence[str]) -> None:
        """Forget blobs; unknown ones are no error."""
        ...

    def add_blob(self, blob: BlobRecord) -> None:
        """Note that a blob is complete; a second time changes nothing."""
        ...

    def add_progress(self, steps: Sequence[StepRow], logs: Sequence[LogRow]) -> None:
        """Keep reported steps and log lines. A step that is reported twice is kept once."""
        ...

    def steps(self, job: JobId, after: int, limit: int) -> list[StepRow]:
        """Return the rows of up to `limit` steps later than `after`, in order of step and stage."""
        ...

    def last_step(self, job: JobId, stages: int, after: int = 0) -> int:
        """Return the last step later than `after` that all of a job's `stages` have reported; 0 if there is none."""
        ...

    def logs(self, job: JobId, after: int, limit: int) -> list[LogRow]:
        """Return up to `limit` log lines with numbers above `after`, in order."""
        ...

    def last_log(self, job: JobId) -> int:
        """Return the number of the last log line; 0 if there is none."""
        ...

    def drop_logs(self, job: JobId, up_to: int) -> None:
        """Forget log lines with numbers up to `up_to`."""
        ...

    def close(self) -> None:
        """Let go of everything; the store cannot be used any more."""
        ...
