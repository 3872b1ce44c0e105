"""`fusion simulate`: run the plan for a job on a cluster through the simulator, and draw what happens when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusion.base.units import format_bytes, format_duration
from fusion.cli.output import json_option, print_json, printable, write_text
from fusion.cli.planning import echo_table, plan_case, planning_options

if TYPE_CHECKING:
    from fusion.plan.simulation import Simulation
    from fusion.plan.types import Plan

_MOST_STEPS = 1000
_MOST_ROWS = 40  #: of a table for people


@click.command()
@planning_options
@click.option("--steps", type=click.IntRange(1, _MOST_STEPS), default=3, show_default=True, help="Steps to simulate.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome trace (JSON), which Perfetto opens too.")
@click.option("--svg", type=click.Path(path_type=Path), help="Write the timeline as a picture.")
@json_option
def simulate(steps: int, trace: Path | None, svg: Path | None, as_json: bool, **settings: Any) -> None:
    """Simulate the steps of a job on a cluster: compute, links with their queues and credit, and the schedule.

    Nothing is trained and no node has to run. The plan is the one that `fusion plan` shows for the same options.
    """
    from fusion.plan.plan_simulation import simulate_plan
    from fusion.transport.frames import DEFAULT_WINDOW_BYTES

    case = plan_case(**settings)
    made = case.planned.plan
    result = simulate_plan(
        made,
        case.workload,
        case.cluster,
        steps=steps,
        optimizer_bytes_per_parameter=case.job.optimizer_bytes_per_parameter,
        window_bytes=DEFAULT_WINDOW_BYTES,
        record=bool(trace or svg),
    )
    _write_pictures(result, case.name, trace, svg)
    if as_json:
        print_json(simulation_as_json(result, made))
    else:
        _show(result, made, case.name)
        for path, hint in ((trace, "; open it at https://ui.perfetto.dev or chrome://tracing"), (svg, "")):
            if path is not None:
                click.echo(f"wrote {path}{hint}")


def simulation_as_json(result: Simulation, plan: Plan) -> dict[str, Any]:
    """Return a simulation as `--json` shows it."""
    stage, target = result.bottleneck
    return {
        "step_s": result.step_s,
        "planned_step_s": plan.step_s or None,
        "total_s": result.total_s,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "bottleneck": {"stage": stage, "target": target if target >= 0 else None},
        "steps": [
            {"start_s": step.start_s, "backward_end_s": step.backward_end_s, "end_s": step.end_s}
            for step in result.steps
        ],
        "stages": [
            {"node": use.name, "busy_s": use.busy_s, "busy_share": use.share, "in_flight": use.most_in_flight}
            for use in result.stages
        ],
        "links": [
            {
                "source": use.source,
                "target": use.target,
                "bytes": use.bytes,
                "busy_s": use.busy_s,
                "busy_share": use.share,
                "blocked_s": use.blocked_s,
                "queued_peak_bytes": use.queued_peak_bytes,
                "buffered_peak_bytes": use.buffered_peak_bytes,
            }
            for use in result.wires
        ],
    }


def _write_pictures(result: Simulation, name: str, trace: Path | None, svg: Path | None) -> None:
    from fusion.plan.timeline import chrome_trace_json
    from fusion.plan.timeline_svg import timeline_svg

    if trace is not None:
        write_text("--trace", trace, chrome_trace_json(result.spans, result.names))
    if svg is not None:
        title = f"{name}: {len(result.stages)} stages, {format_duration(result.step_s)} per step (simulated)"
        write_text("--svg", svg, timeline_svg(result.spans, result.names, title))


def _show(result: Simulation, plan: Plan, name: str) -> None:
    estimate = f" (the planner's estimate: {format_duration(plan.step_s)})" if plan.step_s else ""
    click.echo(
        f"{name}: {len(result.stages)} stages, {plan.micro_batches} micro-batches, {plan.schedule}: "
        f"{format_duration(result.step_s)} per step{estimate}"
    )
    click.echo(f"bottleneck: {row_words(result.bottleneck, result.names)}")
    rows = [("STAGE", "NODE", "BUSY", "", "IN FLIGHT")]
    for index, use in enumerate(result.stages[:_MOST_ROWS]):
        busy = format_duration(use.busy_s / len(result.steps))
        rows.append((str(index), printable(use.name), f"{busy}/step", f"{use.share:.0%}", str(use.most_in_flight)))
    echo_table(rows)
    links = [("LINK", "SENT", "BUSY", "", "NO CREDIT", "MOST QUEUED", "MOST WAITING")]
    for wire in result.wires[:_MOST_ROWS]:
        steps = len(result.steps)
        links.append(
            (
                f"{wire.source} -> {wire.target}",
                f"{format_bytes(wire.bytes / steps)}/step",
                f"{format_duration(wire.busy_s / steps)}/step",
                f"{wire.share:.0%}",
                format_duration(wire.blocked_s / steps),
                format_bytes(wire.queued_peak_bytes),
                format_bytes(wire.buffered_peak_bytes),
            )
        )
    if result.wires:
        echo_table(links)
    if max(len(result.stages), len(result.wires)) > _MOST_ROWS:
        click.echo(f"only the first {_MOST_ROWS} rows are shown; --json has all")


def row_words(row: tuple[int, int], names: tuple[str, ...]) -> str:
    """Return a stage or link with its nodes, in words."""
    stage, target = row
    here = f"stage {stage} on {printable(names[stage])}"
    return here if target < 0 else f"the link from {here} to stage {target} on {printable(names[target])}"
