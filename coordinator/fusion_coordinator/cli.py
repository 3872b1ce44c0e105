"""The `fusion-coordinator` command: make a cluster, run it, let machines in, look at it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fusion.cli.main import run
from fusion.cli.output import json_option, print_json

if TYPE_CHECKING:
    from fusion_coordinator.remote import Admin
    from fusion_coordinator.settings import Settings
    from fusion_coordinator.statedir import Running

F = TypeVar("F", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fusionllm")
def cli() -> None:
    """Run a cluster's coordinator."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fusion-coordinator` and leave the process with its exit code."""
    sys.exit(run(cli, arguments, "fusion-coordinator"))


def _state_dir_option(function: F) -> F:
    help_text = "Where the cluster's keys, database and blobs lie; default: $FUSION_HOME/coordinator."
    return click.option("--state-dir", type=click.Path(path_type=Path), help=help_text)(function)


def _directory(state_dir: Path | None) -> Path:
    from fusion.job.client import fusion_home

    return state_dir if state_dir is not None else fusion_home() / "coordinator"


@cli.command()
@_state_dir_option
@click.option("--name", default="fusion", show_default=True, help="What people call this cluster.")
@click.option("--listen", default="127.0.0.1:7443", show_default=True, metavar="HOST:PORT", help="Default of 'serve'.")
@click.option("--advertise", multiple=True, metavar="HOST[:PORT]", help="Where nodes and owners reach it; repeatable.")
def init(state_dir: Path | None, name: str, listen: str, advertise: tuple[str, ...]) -> None:
    """Make a new cluster: its id, its CA, keys, and the database."""
    from fusion.base.clock import SystemClock
    from fusion.job.client import fusion_home
    from fusion_coordinator.statedir import initialise

    directory, owner = _directory(state_dir), fusion_home() / "owner"
    config, made_owner = initialise(directory, owner, name, listen, advertise, SystemClock())
    option = f" --state-dir {directory}" if state_dir is not None else ""
    click.echo(f"cluster {config.cluster} ({config.name}) is in {directory}; keep its ca-key.pem to yourself")
    if made_owner:
        click.echo(f"your own credentials as an owner of jobs are in {owner}")
    else:
        click.echo(f"{owner} has credentials already; 'token create --role owner' makes some for this cluster")
    click.echo("next:")
    click.echo(f"  fusion-coordinator serve{option}")
    click.echo(f"  fusion-coordinator token create{option}   # then, on a node: fusion-node join JOINSTRING")


@cli.command()
@_state_dir_option
@click.option("--listen", metavar="HOST:PORT", help="Default: what 'init' was told, else 127.0.0.1:7443.")
@click.option("--enrol-listen", default="", metavar="HOST:PORT", help="Enrolment port; default: one port further.")
@click.option(
    "--relay-rate",
    default="",
    metavar="RATE",
    help="Most that is relayed for nodes that cannot reach each other; default: 100 Mbit/s, 0: nothing.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def serve(state_dir: Path | None, listen: str | None, enrol_listen: str, relay_rate: str, log_level: str) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C."""
    from fusion.base.units import parse_rate
    from fusion.observe.logs import setup_logging
    from fusion_coordinator.descriptors import raise_limit
    from fusion_coordinator.server import Listen
    from fusion_coordinator.settings import process_settings
    from fusion_coordinator.statedir import StateDir

    directory = _directory(state_dir)
    setup_logging("coordinator", log_level)
    raise_limit()
    listens = Listen(listen or StateDir(directory).config().listen, enrol_listen)
    settings = process_settings()
    if relay_rate:
        rate = 0.0 if relay_rate.strip() == "0" else parse_rate("--relay-rate", relay_rate)
        settings = replace(settings, relay_bytes_per_s=rate)
    asyncio.run(_serve(directory, listens, settings))


async def _serve(directory: Path, listens: Any, settings: Settings) -> None:
    from fusion_coordinator.server import serve as run_server

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_server(directory, listens, settings=settings, started=_print_started, stop=stop)


def _print_started(running: Running) -> None:
    click.echo(f"listening on {running.address} (mutual TLS) and {running.enrol_address} (enrolment only)")
    sys.stdout.flush()


@cli.group()
def token() -> None:
    """Let machines and people in."""


@token.command("create")
@_state_dir_option
@click.option("--role", type=click.Choice(["node", "owner"]), default="node", show_default=True)
@click.option("--valid", default="15m", show_default=True, metavar="DURATION", help="Such as 90s, 15m, 12h or 7d.")
def token_create(state_dir: Path | None, role: str, valid: str) -> None:
    """Print a join string that one machine can use once."""
    from fusion_coordinator.remote import parse_duration

    valid_s = parse_duration("--valid", valid)
    with _admin(state_dir) as admin:
        click.echo(admin.create_token(role, valid_s))


@cli.command()
@_state_dir_option
@json_option
def nodes(state_dir: Path | None, as_json: bool) -> None:
    """List the nodes."""
    from fusion_coordinator import tables

    with _admin(state_dir) as admin:
        found = admin.nodes()
    if as_json:
        print_json([tables.node_as_json(node) for node in found])
    else:
        tables.show(tables.NODE_COLUMNS, [tables.node_row(node) for node in found], "no node has joined yet")


@cli.command()
@_state_dir_option
@json_option
def jobs(state_dir: Path | None, as_json: bool) -> None:
    """List the jobs of all owners."""
    from fusion_coordinator import tables

    with _admin(state_dir) as admin:
        found = admin.jobs()
    if as_json:
        print_json([tables.job_as_json(job) for job in found])
    else:
        tables.show(tables.JOB_COLUMNS, [tables.job_row(job) for job in found], "no job was submitted yet")


@cli.command()
@_state_dir_option
@click.argument("identity")
def revoke(state_dir: Path | None, identity: str) -> None:
    """Withdraw the certificate of a node or an owner, by identity."""
    with _admin(state_dir) as admin:
        admin.revoke(identity)
    click.echo(f"{identity} is revoked", err=True)


@cli.command()
@_state_dir_option
@click.argument("directory", type=click.Path(path_type=Path))
def backup(state_dir: Path | None, directory: Path) -> None:
    """Copy the whole state to DIRECTORY, also while the coordinator runs; again into the same one copies what is new.

    To go back to it, copy it to a state directory and start 'fusion-coordinator serve' there. It holds the CA's key.
    """
    from fusion.base.units import format_bytes
    from fusion_coordinator.backup import backup as make_backup
    from fusion_coordinator.statedir import StateDir

    copied = make_backup(StateDir(_directory(state_dir)), directory)
    click.echo(f"{directory} is complete: {copied.files} new files, {format_bytes(copied.size_bytes)}")


@cli.command()
@_state_dir_option
@json_option
def info(state_dir: Path | None, as_json: bool) -> None:
    """Show the running coordinator."""
    with _admin(state_dir) as admin:
        answer = admin.info()
        found = {
            "cluster": answer.cluster_id,
            "address": admin.address,
            "version": answer.package_version,
            "protocol": answer.protocol,
        }
    if as_json:
        print_json(found)
    else:
        for key, value in found.items():
            click.echo(f"{key}: {value}")


def _admin(state_dir: Path | None) -> Admin:
    from fusion_coordinator.remote import Admin

    return Admin(_directory(state_dir))


if __name__ == "__main__":
    main()
