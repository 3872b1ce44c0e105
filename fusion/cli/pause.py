"""`fusion pause`: let a job stop at a step's end."""

from __future__ import annotations

import click

from fusion.cli.output import coordinator_option, json_option, print_json, status_as_json


@click.command()
@click.argument("job")
@coordinator_option
@json_option
def pause(job: str, coordinator: str | None, as_json: bool) -> None:
    """Let JOB stop at the end of one of its next steps. Its nodes are free then; 'fusion resume' lets it go on."""
    from fusion.job.client import Client

    with Client(coordinator, hasty=True) as client:
        status = client.pause(job)
    if as_json:
        print_json(status_as_json(status))
    else:
        click.echo(f"{status.job_id} {status.state}: {status.reason}")
