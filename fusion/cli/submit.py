"""`fusion submit`: upload the job of a file, and by default stay until it has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusion.base.units import format_bytes
from fusion.cli.output import coordinator_option, json_option, metrics_as_json, metrics_line, print_json

if TYPE_CHECKING:
    from fusion.job.run import Run


@click.command()
@click.argument("file", metavar="JOBFILE", type=click.Path(path_type=Path))
@coordinator_option
@click.option("--wait/--detach", default=True, help="Stay until the job has ended (default), or leave it to itself.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the file's make_job().")
@json_option
def submit(file: Path, coordinator: str | None, wait: bool, settings: tuple[str, ...], as_json: bool) -> None:
    """Submit the job that JOBFILE defines: job = fusion.Job(...), or a function make_job() that returns one.

    The file is run on this machine; what is sent is the captured model, its weights and the data. Ctrl-C while
    waiting leaves the job running. With --json, one object per line: the job, each step, and how it ended.
    """
    from fusion.cli.jobfile import load_job, parse_settings

    values = parse_settings(settings)
    if as_json:
        # Whatever the owner's file prints must not come between the lines of JSON.
        real, sys.stdout = sys.stdout, sys.stderr
        try:
            job = load_job(file, values)
        finally:
            sys.stdout = real
    else:
        job = load_job(file, values)
    with job.submit(coordinator, progress=_Uploads()) as run:
        if as_json:
            print_json({"job": run.job_id, "steps": job.steps})
        else:
            click.echo(f"submitted {run.job_id} ({job.name}, {job.steps} steps)")
        if wait:
            _follow(run, job.steps, as_json)
        elif not as_json:
            click.echo(f"look at it with: fusion status {run.job_id}")


def _follow(run: Run, steps: int, as_json: bool) -> None:
    for metrics in run.metrics():
        if as_json:
            print_json(metrics_as_json(metrics))
        else:
            click.echo(metrics_line(metrics, steps))
    if as_json:
        print_json({"job": run.job_id, "state": "succeeded"})
    else:
        click.echo(f"{run.job_id} succeeded; its weights: fusion weights {run.job_id} -o weights.safetensors")


class _Uploads:
    """Says on stderr what is being uploaded: once for each file, and as it goes on a terminal."""

    _LARGE_BYTES = 32 * 2**20

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if total < self._LARGE_BYTES:
            return
        if sys.stderr.isatty():
            end = "\n" if done >= total else ""
            click.echo(f"\ruploading {what}: {format_bytes(done)} of {format_bytes(total)}  {end}", nl=False, err=True)
        elif what not in self._told:
            self._told.add(what)
            click.echo(f"uploading {what} ({format_bytes(total)})", err=True)
