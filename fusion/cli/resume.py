"""`fusion resume`: let a job go on that pauses, has failed or was cancelled."""

from __future__ import annotations

import click

from fusion.cli.output import coordinator_option, json_option, print_json, status_as_json


@click.command()
@click.argument("job")
@click.option(
    "--from", "from_step", type=click.IntRange(0), metavar="STEP", help="Go back to this checkpoint; 0 begins anew."
)
@coordinator_option
@json_option
def resume(job: str, from_step: int | None, coordinator: str | None, as_json: bool) -> None:
    """Let JOB go on: from where it paused, or, if it has failed or was cancelled, from its last checkpoint.

    It runs on whatever nodes there are. Steps after the one that it goes on from are done again.
    """
    from fusion.job.client import Client

    with Client(coordinator, hasty=True) as client:
        status = client.resume(job, from_step)
    if as_json:
        print_json(status_as_json(status))
    else:
        click.echo(f"{status.job_id} {status.state}, goes on after step {status.step}")
