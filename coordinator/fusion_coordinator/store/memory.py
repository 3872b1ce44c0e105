"""The store's twin for tests: the same contract without a disk."""

from __future__ import annotations

from collections.abc import Sequence

from fusion.base.ids import JobId
from fusion_coordinator.state import AnyEvent, State, apply_all
from fusion_coordinator.state.events import decode_event, encode_event, redone_after
from fusion_coordinator.store.base import Answer, BlobRecord, LogRow, Request, StepRow


class MemoryStore:
    """Keeps events as text, like the real one, so that whatever cannot be written is noticed here too."""

    def __init__(self) -> None:
        self._start = State()
        self._events: list[bytes] = []
        self._answers: dict[Request, Answer] = {}
        self._blobs: dict[str, BlobRecord] = {}
        self._steps: dict[tuple[JobId, int, int], StepRow] = {}
        self._logs: dict[tuple[JobId, int], LogRow] = {}

    def load(self) -> State:
        return apply_all((decode_event(body) for body in self._events), self._start)

    def commit(self, events: Sequence[AnyEvent], answer: Answer | None = None) -> None:
        if answer is not None:
            if answer.request in self._answers:
                raise ValueError(f"{answer.request} was answered before")
            self._answers[answer.request] = answer
        self._events.extend(encode_event(event) for event in events)
        for job, step in filter(None, map(redone_after, events)):
            self._steps = {key: row for key, row in self._steps.items() if key[0] != job or key[1] <= step}

    def answer(self, request: Request, now_wall_s: float) -> bytes | None:
        found = self._answers.get(request)
        return found.response if found is not None and found.expires_wall_s > now_wall_s else None

    def compact(self, state: State, now_wall_s: float) -> None:
        self._start, self._events = state, []
        self._answers = {key: value for key, value in self._answers.items() if value.expires_wall_s > now_wall_s}

    def blob(self, digest: str) -> BlobRecord | None:
        return self._blobs.get(digest)

    def add_blob(self, blob: BlobRecord) -> None:
        self._blobs.setdefault(blob.digest, blob)

    def blobs(self, before_wall_s: float) -> list[str]:
        return [blob.digest for blob in self._blobs.values() if blob.stored_wall_s < before_wall_s]

    def drop_blobs(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._blobs.pop(digest, None)

    def add_progress(self, steps: Sequence[StepRow], logs: Sequence[LogRow]) -> None:
        for step in steps:
            self._steps.setdefault((step.job, step.step, step.stage), step)
        for line in logs:
            self._logs.setdefault((line.job, line.number), line)

    def steps(self, job: JobId, after: int, limit: int) -> list[StepRow]:
        numbers = sorted({key[1] for key in self._steps if key[0] == job and key[1] > after})[:limit]
        return [self._steps[key] for key in sorted(self._steps) if key[0] == job and key[1] in numbers]

    def last_step(self, job: JobId, stages: int, after: int = 0) -> int:
        counts: dict[int, int] = {}
        for found, step, _ in self._steps:
            if found == job and step > after:
                counts[step] = counts.get(step, 0) + 1
        return max((step for step, count in counts.items() if count >= stages), default=0)

    def logs(self, job: JobId, after: int, limit: int) -> list[LogRow]:
        return [self._logs[key] for key in sorted(self._logs) if key[0] == job and key[1] > after][:limit]

    def last_log(self, job: JobId) -> int:
        return max((number for found, number in self._logs if found == job), default=0)

    def drop_logs(self, job: JobId, up_to: int) -> None:
        self._logs = {key: line for key, line in self._logs.items() if key[0] != job or key[1] > up_to}

    def close(self) -> None:
        pass
