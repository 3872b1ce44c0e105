"""What this stage did when, by its own clock: kept for a few steps, taken once a step."""

from __future__ import annotations

import threading
from collections import deque

from fusion.plan.timeline import Kind, Span

__all__ = ["SpanRecorder"]

MOST_SPANS = 8192  #: that wait to be taken; older ones are dropped
MOST_PER_STEP = 4000
TRACED_EVERY_S = 0.5  #: steps that are shorter are traced one in two, four, and so on


class SpanRecorder:
    """Notes spans from any thread. Times are seconds of `time.monotonic`."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def work(self, kind: Kind, step: int, micro_batch: int, start_s: float, end_s: float) -> None:
        """Note work of the stage itself; micro_batch -1: of none."""
        self.link(self.stage, -1, kind, step, micro_batch, start_s, end_s)

    def link(
        self, source: int, target: int, kind: Kind, step: int, micro_batch: int, start_s: float, end_s: float
    ) -> None:
        """Note what happened on the link from one stage to another."""
        with self._lock:
            self._spans.append(Span(source, target, kind, step, micro_batch, start_s, end_s))

    def take(self, step: int) -> list[Span]:
        """Return what was noted of a step, and forget that and everything of earlier ones."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
            self._spans.extend(span for span in spans if span.step > step)
        return [span for span in spans if span.step == step][:MOST_PER_STEP]


def is_traced(step: int, step_s: float) -> bool:
    """Whether a step of this duration is reported: so that short ones are not slowed down by their own account."""
    stride = 1
    while stride * max(step_s, 1e-4) < TRACED_EVERY_S:
        stride *= 2
    return step % stride == 0
