"""What the demo shows: progress on stderr while it runs, and at the end a table, or the same as JSON, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from fusion.base.ids import StageIndex
from fusion.base.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fusion.cli.demoprediction import Prediction
    from fusion.protocol.jobstatus import StageStatus
    from fusion.protocol.metrics import StepMetrics


@dataclass(frozen=True)
class Outcome:
    """Everything that a finished demo has to tell."""

    model: str
    metrics: Sequence[StepMetrics]
    reference: Sequence[StepMetrics]
    stages: Sequence[StageStatus]
    links: Mapping[tuple[str, str], str]  #: how the link from one node to another is shaped, in words
    seconds: float
    prediction: Prediction | None = None  #: of an emulated cluster

    @property
    def largest_difference(self) -> float:
        """Largest distance between the two loss curves."""
        return max(abs(a.loss - b.loss) for a, b in zip(self.metrics, self.reference, strict=True))

    @property
    def training_s(self) -> float:
        """Duration of the steps after the first, which also warms up."""
        return sum(step.step_s for step in self.metrics[1:]) or self.metrics[0].step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the steps after the first."""
        return sum(step.tokens for step in self.metrics[1:] or self.metrics) / self.training_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the steps after the first."""
        return sum(step.samples for step in self.metrics[1:] or self.metrics) / self.training_s

    @property
    def bytes_per_step(self) -> float:
        """Mean bytes per step over all links."""
        return sum(step.bytes for step in self.metrics) / len(self.metrics)

    def link_bytes(self) -> dict[tuple[StageIndex, StageIndex], int]:
        """Return the bytes over each directed link, by stage."""
        total: dict[tuple[StageIndex, StageIndex], int] = {}
        for step in self.metrics:
            for stage in step.stages:
                for target, count in stage.sent_bytes.items():
                    total[stage.stage, target] = total.get((stage.stage, target), 0) + count
        return dict(sorted(total.items()))

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        names = [stage.node_name for stage in self.stages]
        return {
            "model": self.model,
            "steps": len(self.metrics),
            "first_loss": self.metrics[0].loss,
            "last_loss": self.metrics[-1].loss,
            "reference_first_loss": self.reference[0].loss,
            "reference_last_loss": self.reference[-1].loss,
            "reference_max_abs_diff": self.largest_difference,
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "bytes_per_step": self.bytes_per_step,
            "seconds": self.seconds,
            "stages": [
                {"node": stage.node_name, "operators": stage.end_operator - stage.first_operator}
                | {"parameters": stage.parameters}
                for stage in self.stages
            ],
            "links": [
                {"from": names[source], "to": names[target], "bytes": count}
                | {"shaped": self.links.get((names[source], names[target]))}
                for (source, target), count in self.link_bytes().items()
            ],
        } | ({} if self.prediction is None else {"prediction": self.prediction.as_json()})

    def lines(self) -> list[str]:
        """Return the table for people."""
        speed = f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else f"{self.samples_per_s:,.0f} samples/s"
        rows = [
            ("", "first loss", "last loss"),
            (count_of(len(self.stages), "node"), f"{self.metrics[0].loss:.6f}", f"{self.metrics[-1].loss:.6f}"),
            ("one process", f"{self.reference[0].loss:.6f}", f"{self.reference[-1].loss:.6f}"),
        ]
        lines = [f"{name:<14}{first:>12}{last:>12}" for name, first, last in rows]
        lines += [f"largest difference over {len(self.metrics)} steps: {self.largest_difference:g}", ""]
        for number, stage in enumerate(self.stages):
            operators = stage.end_operator - stage.first_operator
            lines.append(f"stage {number}  {stage.node_name}  {operators} operators  {stage.parameters:,} parameters")
        lines += [""] if self.link_bytes() else []
        for (source, target), count in self.link_bytes().items():
            names = (self.stages[source].node_name, self.stages[target].node_name)
            shaped = self.links.get(names, "not shaped")
            lines.append(f"{names[0]} -> {names[1]}  {format_bytes(count):>9}  {shaped}")
        if self.prediction is not None:
            lines += ["", *self.prediction.lines()]
        lines += ["", f"{speed}, {format_bytes(self.bytes_per_step)} per step, {format_duration(self.seconds)} in all"]
        return lines


class Display:
    """Progress on stderr: bars on a terminal, else a line now and then. Its methods may be called from any thread."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bars: Progress | None = _bars() if sys.stderr.isatty() else None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Tell what is being done."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)

    def begin(self, name: str) -> None:
        """Show that the run `name` is starting."""
        if self._bars is not None and name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=self._steps, detail="starting")

    def step(self, name: str, metrics: StepMetrics) -> None:
        """Show that the run `name` has finished a step."""
        if self._bars is None:
            every = max(1, self._steps // 5)
            if metrics.step == 1 or metrics.step % every == 0 or metrics.step == self._steps:
                click.echo(f"{name}: {describe(metrics, self._steps)}", err=True)
            return
        self.begin(name)
        self._bars.update(self._tasks[name], completed=metrics.step, detail=describe(metrics, self._steps))


def count_of(number: int, noun: str) -> str:
    """Return "1 node", "4 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe(metrics: StepMetrics, steps: int) -> str:
    """Return one step in words: step, loss, speed, and bytes where any were sent."""
    parts = [f"step {metrics.step}/{steps}", f"loss {metrics.loss:.4f}"]
    if metrics.step_s and metrics.tokens:
        parts.append(f"{metrics.tokens_per_s:,.0f} tokens/s")
    elif metrics.step_s:
        parts.append(f"{metrics.samples / metrics.step_s:,.0f} samples/s")
    if metrics.bytes:
        parts.append(f"{format_bytes(metrics.bytes)}/step")
    return "  ".join(parts)


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<11}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
