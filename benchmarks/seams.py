"""What lies between two steps of a measured timeline: no stage should wait there for another one's update."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fusion.plan.timeline import Kind, Span


@dataclass(frozen=True, slots=True)
class Seam:
    """Seconds between a step and the next, by the measured timeline."""

    first_stage_s: float  #: from its last backward to its first forward: sums of squares, verdict, and its own update
    first_update_s: float  #: its own update alone
    ahead_s: float  #: its next forward had begun so long before the last stage's update was done
    held_up_s: float  #: the most that a later stage's first forward began after its value had come and been decoded


def seams(spans: Sequence[Span]) -> list[Seam]:
    """Return the seams between all two steps that follow each other in a timeline whose clocks are aligned."""
    steps, stages = sorted({span.step for span in spans}), sorted({span.stage for span in spans})
    found = {(span.stage, span.target, span.kind, span.step, span.micro_batch): span for span in spans}
    last = max(span.micro_batch for span in spans if span.kind is Kind.BACKWARD)
    result = []
    for step in steps:
        if step + 1 not in steps:
            continue
        forwards = [found[stage, -1, Kind.FORWARD, step + 1, 0].start_s for stage in stages]
        updates = [found[stage, -1, Kind.UPDATE, step, -1] for stage in stages]
        decoded = [found[stage - 1, stage, Kind.DECODE, step + 1, 0].end_s for stage in stages[1:]]
        result.append(
            Seam(
                forwards[0] - found[0, -1, Kind.BACKWARD, step, last].end_s,
                updates[0].end_s - updates[0].start_s,
                updates[-1].end_s - forwards[0],
                max(
                    (begin_s - here_s for begin_s, here_s in zip(forwards[1:], decoded, strict=True)),
                    default=0.0,
                ),
            )
        )
    return result


def median_seam(spans: Sequence[Span]) -> dict[str, float] | None:
    """Return the medians over all seams, by name; None where there are no two steps."""
    rows = [asdict(seam) for seam in seams(spans)] if spans else []
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} if rows else None
