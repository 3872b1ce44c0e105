"""`fusion move`: let a running job go on under other cuts on other nodes."""

from __future__ import annotations

import click

from fusion.base.errors import UsageError
from fusion.cli.output import coordinator_option, json_option, print_json, status_as_json


@click.command()
@click.argument("job")
@click.option("--nodes", required=True, metavar="NAME,...", help="Who runs the stages, in their order.")
@click.option("--cuts", default="", metavar="N,...", help="Operator positions to cut at; default: by the nodes' speed.")
@coordinator_option
@json_option
def move(job: str, nodes: str, cuts: str, coordinator: str | None, as_json: bool) -> None:
    """Let JOB go on on NODES from the end of one of its next steps on. Its loss curve does not change."""
    from fusion.job.client import Client

    names = [name.strip() for name in nodes.split(",")]
    if not all(names):
        raise UsageError(f"--nodes: {nodes[:80]!r} has an empty name; write a,b,c")
    positions = [_position(text) for text in cuts.split(",")] if cuts else []
    with Client(coordinator, hasty=True) as client:
        status = client.move(job, positions, names)
    if as_json:
        print_json(status_as_json(status))
    else:
        click.echo(f"{status.job_id} {status.reason or status.state}")


def _position(text: str) -> int:
    if not text.strip().isdecimal() or int(text) >= 2**32:
        raise UsageError(f"--cuts: {text[:40]!r} is no operator position; write whole numbers such as 10,40")
    return int(text)
