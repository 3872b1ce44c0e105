"""`fusion logs`: what nodes and coordinator wrote about a job."""

from __future__ import annotations

import time

import click

from fusion.cli.output import coordinator_option, json_option, print_json, printable


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@coordinator_option
@json_option
def logs(job: str, follow: bool, coordinator: str | None, as_json: bool) -> None:
    """Show the log of JOB. With --json, one object per line."""
    from fusion.job.run import attach

    with attach(job, coordinator) as run:
        for line in run.logs(follow=follow):
            if as_json:
                print_json({"time_s": line.wall_s, "level": line.level, "origin": line.origin, "text": line.text})
            else:
                when = time.strftime("%H:%M:%S", time.localtime(line.wall_s))
                click.echo(f"{when} {line.level:<7} {printable(line.origin)}: {printable(line.text)}")
