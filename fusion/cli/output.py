"""What the subcommands share: options, JSON, and the words for a job's state and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fusion.base.errors import ConfigError
from fusion.base.units import format_bytes, format_duration

if TYPE_CHECKING:
    from fusion.protocol.jobstatus import JobStatus
    from fusion.protocol.metrics import StepMetrics

F = TypeVar("F", bound=Callable[..., Any])


def coordinator_option(function: F) -> F:
    """Add --coordinator."""
    help_text = "Coordinator to ask; default: the one of your credentials."
    return click.option("--coordinator", metavar="HOST:PORT", help=help_text)(function)


def json_option(function: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")(function)


def print_json(value: Any) -> None:
    """Print one line of JSON; numbers that JSON does not have become null."""
    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=True, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def status_as_json(status: JobStatus) -> dict[str, Any]:
    """Return a job's status as `--json` shows it."""
    return {
        "job": status.job_id,
        "name": status.name,
        "state": str(status.state),
        "reason": status.reason,
        "step": status.step,
        "steps": status.steps,
        "stages": [
            {"node": stage.node_name, "operators": stage.end_operator - stage.first_operator}
            | {"parameters": stage.parameters}
            for stage in status.stages
        ],
        "last": None if status.last is None else metrics_as_json(status.last),
        "submitted_s": status.submitted_wall_s,
        "finished_s": status.finished_wall_s or None,
        "owner": status.owner,
        "relayed": [
            {"source": link.source, "target": link.target, "by": link.by, "bytes": link.bytes}
            for link in status.relayed
        ],
    }


def metrics_as_json(metrics: StepMetrics) -> dict[str, Any]:
    """Return a step's metrics as `--json` shows them."""
    return {
        "step": metrics.step,
        "loss": metrics.loss,
        "eval_loss": metrics.eval_loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "skipped": metrics.skipped,
        "step_s": metrics.step_s,
        "samples": metrics.samples,
        "tokens": metrics.tokens,
        "bytes": metrics.bytes,
    }


def metrics_line(metrics: StepMetrics, steps: int) -> str:
    """Return one step as a line for people."""
    parts = [f"step {metrics.step:>{len(str(steps))}}/{steps}", f"loss {metrics.loss:.4f}"]
    if metrics.eval_loss is not None:
        parts.append(f"eval loss {metrics.eval_loss:.4f}")
    if metrics.skipped:
        parts.append("skipped: gradients not finite")
    if metrics.tokens:
        parts.append(f"{metrics.tokens_per_s:.0f} tokens/s")
    elif metrics.step_s:
        parts.append(f"{metrics.samples / metrics.step_s:.0f} samples/s")
    return "  ".join([*parts, f"{format_bytes(metrics.bytes)}/step", format_duration(metrics.step_s)])


def printable(text: str) -> str:
    """Return text that came from elsewhere without what could steer a terminal or break the line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines in columns; the first is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file that an option names; ConfigError if that is not possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be written: {getattr(error, 'strerror', error)}") from None
