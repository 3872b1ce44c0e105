"""`fusion cancel`: end a job."""

from __future__ import annotations

import click

from fusion.cli.output import coordinator_option, json_option, print_json, status_as_json


@click.command()
@click.argument("job")
@click.option("--reason", default="cancelled by its owner", help="Shown with the job's state.")
@coordinator_option
@json_option
def cancel(job: str, reason: str, coordinator: str | None, as_json: bool) -> None:
    """Cancel JOB. 'fusion resume' can take it up again from its last checkpoint, if it has one."""
    from fusion.job.client import Client

    with Client(coordinator, hasty=True) as client:
        status = client.cancel(job, reason)
    if as_json:
        print_json(status_as_json(status))
    else:
        click.echo(f"{status.job_id} {status.state} after step {status.step}")
