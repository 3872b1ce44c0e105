"""Measured spans for people: a table, a Chrome trace and a picture, like those of `fusion simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion.base.errors import StateError
from fusion.base.units import format_duration
from fusion.cli.output import write_text
from fusion.plan.timeline import Kind, Row, Span, chrome_trace_json, row_label, rows_of
from fusion.plan.timeline_svg import timeline_svg
from fusion.protocol.timeline import Timeline, align, whole_steps

if TYPE_CHECKING:
    from fusion.job.client import Client
    from fusion.protocol.jobstatus import JobStatus


def measured_timeline(client: Client, job: JobStatus) -> Timeline:
    """Return the last steps of which all stages have told; StateError while there is none."""
    timeline = align(whole_steps(client.timeline(job.job_id)))
    if not timeline.spans:
        raise StateError(f"job {job.job_id} has no measured steps yet; look again when it has done some")
    return timeline


def timeline_lines(timeline: Timeline, names: Sequence[str]) -> list[str]:
    """Return a line for every stage and link: what a step's time went into, on average."""
    steps = sorted({span.step for span in timeline.spans})
    shown = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
    lines = [f"measured in {shown}; clocks aligned to within {format_duration(timeline.error_s)}; per step:"]
    for row in rows_of(timeline.spans):
        parts = [
            f"{kind.value} {format_duration(seconds)}" for kind, seconds in _totals(timeline.spans, row, len(steps))
        ]
        lines.append(f"{row_label(row, names)}: {', '.join(parts)}")
    for stage in timeline.missing:
        lines.append(f"stage {stage} is left out: nothing is known of its clock yet")
    return lines


def timeline_as_json(timeline: Timeline) -> dict[str, Any]:
    """Return the same as `--json` shows it, with all spans."""
    steps = sorted({span.step for span in timeline.spans})
    return {
        "steps": steps,
        "clock_error_s": timeline.error_s,
        "missing_stages": list(timeline.missing),
        "per_step_s": [
            {
                "stage": row[0],
                "target": row[1] if row[1] >= 0 else None,
                **{kind.value: seconds for kind, seconds in _totals(timeline.spans, row, len(steps))},
            }
            for row in rows_of(timeline.spans)
        ],
        "spans": [span._asdict() for span in timeline.spans],
    }


def write_pictures(
    timeline: Timeline, job: JobStatus, names: Sequence[str], trace: Path | None, svg: Path | None
) -> None:
    """Write the Chrome trace and the picture that were asked for; ConfigError if a file cannot be written."""
    if trace is not None:
        write_text("--trace", trace, chrome_trace_json(timeline.spans, names))
    if svg is not None:
        step = "" if job.last is None else f", {format_duration(job.last.step_s)} per step"
        write_text(
            "--svg", svg, timeline_svg(timeline.spans, names, f"{job.name}: {len(names)} stages{step} (measured)")
        )


def _totals(spans: Sequence[Span], row: Row, steps: int) -> list[tuple[Kind, float]]:
    found: dict[Kind, float] = {}
    for span in spans:
        if (span.stage, span.target) == row:
            found[span.kind] = found.get(span.kind, 0.0) + (span.end_s - span.start_s) / steps
    return [(kind, found[kind]) for kind in Kind if kind in found]
