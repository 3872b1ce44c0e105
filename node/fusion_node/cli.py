"""The `fusion-node` command: join a cluster, start the daemon, check the machine."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from fusion.base.address import split_address
from fusion.base.errors import AuthError, ConfigError, UsageError
from fusion.base.ids import check_name
from fusion.base.units import parse_bytes, parse_flops
from fusion.cli.main import run
from fusion.cli.output import json_option, print_json
from fusion_node.reachability import DEFAULT_LISTEN, DEFAULT_PORT

if TYPE_CHECKING:
    from fusion.security.credentials import Credentials
    from fusion_node.daemon import Settings

F = TypeVar("F", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fusionllm")
def cli() -> None:
    """Let this machine train in a cluster."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fusion-node` and leave the process with its exit code."""
    sys.exit(run(cli, arguments, "fusion-node"))


def _home_option(function: F) -> F:
    help_text = "Where credentials, logs and the cache lie; default: $FUSION_HOME/node, or ~/.fusion/node."
    return click.option("--home", type=click.Path(path_type=Path), help=help_text)(function)


def _name_option(function: F) -> F:
    return click.option("--name", help="What people call this machine; default: its host name.")(function)


def _node_options(function: F) -> F:
    for decorate in reversed(
        [
            click.option(
                "--listen",
                default=DEFAULT_LISTEN,
                show_default=True,
                metavar="HOST:PORT",
                help="Data plane, for peers.",
            ),
            click.option("--advertise", default="", metavar="HOST[:PORT]", help="Where the other nodes reach it."),
            click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 or mps."),
            click.option("--max-memory", default="", metavar="SIZE", help="What a job may use, such as 8GiB."),
            click.option("--threads", default=0, type=click.IntRange(0, 1024), help="Compute threads; 0: all cores."),
            click.option(
                "--speed", default=0.0, type=click.FloatRange(0), help="FLOP/s to state instead of measuring."
            ),
        ]
    ):
        function = decorate(function)
    return function


@cli.command()
@click.argument("join_string", metavar="JOINSTRING")
@_name_option
@click.option("--force", is_flag=True, help="Replace the credentials that are there.")
@_home_option
def join(join_string: str, name: str | None, force: bool, home: Path | None) -> None:
    """Become a node: JOINSTRING comes from 'fusion-coordinator token create'. '-' reads it from stdin."""
    directory = _home(home)
    if (directory / "identity.json").exists() and not force:
        raise ConfigError(f"there are credentials in {directory} already; add --force to replace them")
    credentials = _enrol(join_string, name, directory)
    click.echo(f"joined cluster {credentials.cluster} as {credentials.name} ({credentials.identity})")


@cli.command()
@click.argument("join_string", metavar="[JOINSTRING]", required=False)
@_node_options
@_name_option
@click.option(
    "--allow-data", multiple=True, metavar="DIR", type=click.Path(path_type=Path), help="Jobs may read data there."
)
@click.option(
    "--spare-worker/--no-spare-worker",
    default=True,
    show_default=True,
    help="Keep a process ready for the next stage, so that recovery does not wait for torch to load; about 300 MiB.",
)
@click.option("--require-reachable", is_flag=True, help="End if other nodes cannot reach this one.")
@click.option(
    "--drain-timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(0, 86400),
    metavar="SECONDS",
    help="How long to wait, when asked to end, for jobs to go on without this node.",
)
@click.option(
    "--emulate-speed", default="", metavar="FLOPS", help="Lab: be a device of this speed, such as 2T, by waiting."
)
@click.option("--routes", type=click.Path(path_type=Path), help="Lab: JSON object of peer address to address to dial.")
@_home_option
def start(join_string: str | None, name: str | None, home: Path | None, **options: Any) -> None:
    """Run the node until SIGTERM or Ctrl-C. With a JOINSTRING it joins first, unless it has already.

    At the first signal its jobs go on without it, then it leaves; a second signal ends it at once.
    """
    from fusion.observe.logs import setup_logging
    from fusion.security.credentials import Credentials
    from fusion_node.daemon import run as run_daemon

    setup_logging("node")
    directory = _home(home)
    settings = _settings(directory, name, **options)
    credentials = _join_once(join_string, name, directory) if join_string else Credentials.load(directory)
    code = asyncio.run(run_daemon(settings, credentials))
    raise click.exceptions.Exit(code)


@cli.command()
@click.option("--now", is_flag=True, help="Don't wait for the jobs that need this node; they lose a step at most.")
@click.option(
    "--timeout",
    default=180.0,
    show_default=True,
    type=click.FloatRange(0, 86400),
    metavar="SECONDS",
    help="Give up then.",
)
@_home_option
def stop(now: bool, timeout: float, home: Path | None) -> None:
    """End the node that runs on this machine: its jobs go on without it, then it leaves the cluster's list."""
    from fusion_node.stopping import stop as stop_daemon

    stop_daemon(_home(home), now=now, patience_s=timeout)
    click.echo("stopped")


@cli.command("emulate-speed")
@click.argument("speed", metavar="FLOPS")
@_home_option
def emulate_speed(speed: str, home: Path | None) -> None:
    """Lab: change the speed that the running node emulates, such as 500G; its worker obeys at once.

    The node must have been started with --emulate-speed. The coordinator is not told, it has to find out.
    """
    from fusion_node.hardware import MAX_FLOPS
    from fusion_node.localport import EmulateSpeed, ask

    flops = parse_flops("FLOPS", speed)
    if not 0 < flops <= MAX_FLOPS:
        raise ConfigError(f"FLOPS: {speed} is not in 1..{MAX_FLOPS:.0e} operations per second")
    click.echo(ask(_home(home), EmulateSpeed(flops)))


@cli.command()
@_node_options
@_home_option
@json_option
def doctor(home: Path | None, as_json: bool, **options: Any) -> None:
    """Check versions, device, memory, certificate, clock, coordinator and this node's own reachability."""
    from fusion.observe.doctor import exit_code, render, to_data
    from fusion_node.doctor import examine

    checks = examine(_settings(_home(home), None, **options))
    if as_json:
        print_json(to_data(checks))
    else:
        for line in render(checks):
            click.echo(line)
    raise click.exceptions.Exit(exit_code(checks))


def _home(home: Path | None) -> Path:
    from fusion.job.client import fusion_home

    return (home or fusion_home() / "node").expanduser().absolute()


def _settings(
    home: Path,
    name: str | None,
    *,
    listen: str,
    advertise: str,
    device: str,
    max_memory: str,
    threads: int,
    speed: float,
    allow_data: Sequence[Path] = (),
    routes: Path | None = None,
    require_reachable: bool = False,
    drain_timeout: float = 120.0,
    spare_worker: bool = True,
    emulate_speed: str = "",
) -> Settings:
    """Return the daemon's settings, checked as far as that is possible before anything runs."""
    from fusion_node.daemon import Settings
    from fusion_node.hardware import Limits

    split_address("--listen", listen, DEFAULT_PORT)
    if advertise:
        split_address("--advertise", advertise, DEFAULT_PORT)
    memory_bytes = parse_bytes("--max-memory", max_memory) if max_memory else 0
    if max_memory and not memory_bytes:
        raise ConfigError(f"--max-memory: {max_memory} leaves a job nothing; write for example 8GiB")
    emulated = parse_flops("--emulate-speed", emulate_speed) if emulate_speed else 0.0
    if emulated and speed:
        raise ConfigError("--speed and --emulate-speed: an emulated speed is also the one stated; give only one")
    limits = Limits(device, memory_bytes, threads, emulated or speed)
    limits.check()
    return Settings(
        home=home,
        listen=listen,
        advertise=advertise,
        name=check_name("--name", name) if name else "",
        limits=limits,
        allow_data=tuple(_directory(path) for path in allow_data),
        routes=read_routes(routes) if routes else {},
        require_reachable=require_reachable,
        drain_timeout_s=drain_timeout,
        spare_worker=spare_worker,
        emulate_flops=emulated,
    )


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"--allow-data: {path} is not a directory of this machine")
    return path.resolve()


def read_routes(path: Path) -> dict[str, str]:
    """Return the lab's routes; ConfigError unless the file is a JSON object from HOST:PORT to HOST:PORT."""
    try:
        routes = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except OSError as error:
        raise ConfigError(f"--routes: {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--routes: {path} is not a JSON object of addresses: {error}") from None
    for address in (*routes.keys(), *routes.values()):
        split_address("--routes", address)
    return routes


def _join_once(join_string: str, name: str | None, directory: Path) -> Credentials:
    """Join, unless this node is in that cluster already: the same command line may be run again and again."""
    from fusion.security.credentials import Credentials
    from fusion.security.enrolment import parse_join_string

    if not (directory / "identity.json").exists():
        return _enrol(join_string, name, directory)
    credentials = Credentials.load(directory)
    cluster = parse_join_string(_read(join_string)).cluster
    if cluster != credentials.cluster:
        raise ConfigError(
            f"{directory} holds credentials of cluster {credentials.cluster}, the join string is for {cluster}; "
            "use another --home, or 'fusion-node join --force' to replace them"
        )
    return credentials


def _enrol(join_string: str, name: str | None, directory: Path) -> Credentials:
    from fusion.security.credentials import Role
    from fusion.security.enrolment import enrol, parse_join_string

    join_data = parse_join_string(_read(join_string))
    if join_data.role is not Role.NODE:
        raise UsageError(f"this join string is for a {join_data.role}; a person joins with 'fusion join'")
    name = check_name("--name", name) if name else host_name(socket.gethostname())
    _check_writable(directory)
    credentials = enrol(join_data, name)
    if credentials.role is not Role.NODE:
        raise AuthError(f"the coordinator made this machine a {credentials.role}; nothing was saved")
    credentials.save(directory)
    return credentials


def _read(join_string: str) -> str:
    return sys.stdin.readline().strip() if join_string == "-" else join_string


def _check_writable(directory: Path) -> None:
    """Find out before the join string is used up."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = directory / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}; use --home or FUSION_HOME") from None


def host_name(text: str) -> str:
    """Return the machine's host name as far as it makes a usable name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip(".-_")
    return name or "node"


if __name__ == "__main__":
    main()
