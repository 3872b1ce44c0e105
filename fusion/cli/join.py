"""`fusion join`: an owner's key and certificate for one cluster, from a join string."""

from __future__ import annotations

import getpass
import re
import sys
import tempfile
from pathlib import Path

import click

from fusion.base.errors import ConfigError, UsageError
from fusion.base.ids import check_name
from fusion.cli.output import json_option, print_json


@click.command()
@click.argument("join_string", metavar="JOINSTRING")
@click.option("--name", help="What people call you; default: your user name.")
@click.option("--force", is_flag=True, help="Replace the credentials that are there.")
@json_option
def join(join_string: str, name: str | None, force: bool, as_json: bool) -> None:
    """Become an owner of jobs: JOINSTRING comes from 'fusion-coordinator token create --role owner'.

    The credentials go to $FUSION_HOME/owner (default ~/.fusion/owner). '-' reads the join string from stdin, so
    that it does not show in the list of processes.
    """
    from fusion.job.client import fusion_home
    from fusion.security.credentials import Role
    from fusion.security.enrolment import enrol, parse_join_string

    directory = fusion_home() / "owner"
    if (directory / "identity.json").exists() and not force:
        raise ConfigError(f"there are credentials in {directory} already; add --force to replace them")
    text = parse_join_string(sys.stdin.readline() if join_string == "-" else join_string)
    if text.role not in (Role.OWNER, Role.ADMIN):
        raise UsageError(f"this join string is for a {text.role}; a machine joins with 'fusion-node join'")
    _check_writable(directory)
    credentials = enrol(text, check_name("--name", name) if name else _user_name())
    credentials.save(directory)
    if as_json:
        print_json({"identity": credentials.identity, "cluster": credentials.cluster, "credentials": str(directory)})
    else:
        click.echo(f"joined cluster {credentials.cluster} at {credentials.coordinator}; credentials in {directory}")


def _check_writable(directory: Path) -> None:
    """Find out before the join string is used up."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}; set FUSION_HOME to a place you own") from None


def _user_name() -> str:
    """Return the user's name as far as it makes a usable name."""
    try:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", getpass.getuser())[:63].strip(".-_")
    except (OSError, KeyError, ImportError):
        name = ""
    return name or "owner"
