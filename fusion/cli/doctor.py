"""`fusion doctor`: whether this machine and its owner's credentials are fit to submit jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusion.cli.output import coordinator_option, json_option, print_json

if TYPE_CHECKING:
    from fusion.observe.doctor import Check
    from fusion.security.credentials import Credentials


@click.command()
@coordinator_option
@json_option
def doctor(coordinator: str | None, as_json: bool) -> None:
    """Check versions, disk, certificate, clock and coordinator; each line says ok, warn or fail, and the remedy.

    Ends with 1 if a check failed. On a node, 'fusion-node doctor' also checks device, memory and reachability.
    """
    from fusion.observe.doctor import exit_code, render, to_data

    checks = examine(coordinator)
    if as_json:
        print_json(to_data(checks))
    else:
        for line in render(checks):
            click.echo(line)
    raise click.exceptions.Exit(exit_code(checks))


def examine(coordinator: str | None) -> list[Check]:
    """Run all checks; takes a second, up to half a minute when the coordinator does not answer."""
    from fusion.base.errors import FusionError
    from fusion.job.client import credentials_directory, fusion_home
    from fusion.observe import doctor as checking
    from fusion.security.credentials import Credentials

    checks = [checking.check_python(), *checking.check_packages(), checking.check_protobuf()]
    try:
        checks.append(checking.check_disk(fusion_home()))
        directory = credentials_directory()
        credentials = Credentials.load(directory)
    except FusionError as error:
        remedy = "run: fusion join JOINSTRING (from: fusion-coordinator token create --role owner)"
        return [*checks, checking.fail("credentials", str(error), remedy)]
    return checks + _check_cluster(credentials, directory, coordinator)


def _check_cluster(credentials: Credentials, directory: Path, coordinator: str | None) -> list[Check]:
    from fusion.base.address import join_address, split_address
    from fusion.base.errors import FusionError
    from fusion.job.client import DEFAULT_PORT
    from fusion.observe import doctor as checking
    from fusion.security.tls import coordinator_server_name
    from fusion.transport.channels import open_channel

    wall_s = time.time()
    try:
        credentials.check(wall_s)
        problem = ""
    except FusionError as error:
        problem = str(error)
    checks = [
        checking.check_key(directory / "key.pem"),
        checking.check_certificate(credentials.certificate_pem, problem, wall_s),
    ]
    if problem:
        return checks  # the coordinator would refuse it, and say less
    address = join_address(*split_address("coordinator", coordinator or credentials.coordinator, DEFAULT_PORT))
    name = coordinator_server_name(credentials.cluster)
    channel = open_channel(address, credentials, name)
    try:
        return checks + checking.check_coordinator(channel, address, name, directory)
    finally:
        channel.close()
