"""`fusion status`: the jobs of this owner, or one of them with its stages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusion.base.errors import UsageError
from fusion.base.units import format_bytes, format_duration
from fusion.cli.output import coordinator_option, json_option, metrics_line, print_json, printable, status_as_json

if TYPE_CHECKING:
    from fusion.protocol.jobstatus import JobStatus


@click.command()
@click.argument("job", required=False)
@click.option("--plan", "with_plan", is_flag=True, help="Show what JOB's plan predicts beside what was measured.")
@click.option("--links", "with_links", is_flag=True, help="Show the codec of each of JOB's links and what it costs.")
@click.option("--timeline", "with_timeline", is_flag=True, help="Show what JOB's stages and links spend a step on.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write JOB's last steps as a Chrome trace (Perfetto).")
@click.option("--svg", type=click.Path(path_type=Path), help="Write JOB's last steps as a picture.")
@coordinator_option
@json_option
def status(
    job: str | None,
    with_plan: bool,
    with_links: bool,
    with_timeline: bool,
    trace: Path | None,
    svg: Path | None,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Show all your jobs, or one JOB with the part of the model that each node trains."""
    from fusion.cli.linkview import link_lines, links_as_json
    from fusion.cli.planview import plan_as_json, plan_lines
    from fusion.cli.timelineview import measured_timeline, timeline_as_json, timeline_lines, write_pictures
    from fusion.job.client import Client

    measured = bool(with_timeline or trace or svg)
    wanted = (("--plan", with_plan), ("--links", with_links), ("--timeline", with_timeline), ("--trace", trace))
    for name, given in (*wanted, ("--svg", svg)):
        if given and job is None:
            raise UsageError(f"{name} needs a job: fusion status JOB {name}")

    with Client(coordinator, hasty=True) as client:
        if job is None:
            jobs = client.list()
            if as_json:
                print_json([status_as_json(item) for item in jobs])
            else:
                _show_all(jobs)
            return
        found = client.get(job)
        timeline = measured_timeline(client, found) if measured else None
    names = [stage.node_name for stage in found.stages]
    if timeline is not None:
        write_pictures(timeline, found, names, trace, svg)
    if as_json:
        more = {"plan": plan_as_json(found)} if with_plan else {}
        more |= {"links": links_as_json(found)} if with_links else {}
        more |= {"timeline": timeline_as_json(timeline)} if timeline is not None and with_timeline else {}
        print_json(status_as_json(found) | more)
    else:
        _show(found, with_plan)
        for line in [*(plan_lines(found) if with_plan else ()), *(link_lines(found) if with_links else ())]:
            click.echo(f"  {line}")
        if timeline is not None and with_timeline:
            for line in timeline_lines(timeline, [printable(name) for name in names]):
                click.echo(f"  {line}")
        for path in (trace, svg):
            if path is not None:
                click.echo(f"  wrote {path}")


def _show_all(jobs: list[JobStatus]) -> None:
    if not jobs:
        click.echo("no jobs yet; 'fusion submit JOBFILE' starts one")
        return
    rows = [("JOB", "NAME", "STATE", "STEP", "LOSS", "AGE", "")]
    for job in jobs:
        loss = "" if job.last is None else f"{job.last.loss:.4f}"
        age = format_duration(max(0.0, time.time() - job.submitted_wall_s))
        step, reason = f"{job.step}/{job.steps}", printable(job.reason)
        rows.append((job.job_id, printable(job.name), str(job.state), step, loss, age, reason))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]).rstrip())


def _show(job: JobStatus, with_plan: bool) -> None:
    click.echo(f"{job.job_id}  {printable(job.name)}  {job.state}  step {job.step}/{job.steps}")
    if job.reason:
        click.echo(f"  {printable(job.reason)}")
    if job.last is not None:
        click.echo(f"  {metrics_line(job.last, job.steps)}")
    for link in job.relayed:
        way = f"{_stage(job, link.source)} reaches {_stage(job, link.target)}"
        click.echo(f"  {way} through the {printable(link.by)}'s relay, {format_bytes(link.bytes)} so far")
    for number, stage in enumerate(() if with_plan else job.stages):
        operators = f"operators {stage.first_operator}..{stage.end_operator - 1}"
        click.echo(f"  stage {number}  {printable(stage.node_name)}  {operators}  {stage.parameters:,} parameters")


def _stage(job: JobStatus, number: int) -> str:
    name = job.stages[number].node_name if number < len(job.stages) else "?"
    return f"stage {number} ({printable(name)})"
