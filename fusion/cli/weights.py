"""`fusion weights`: the trained weights of a job in one safetensors file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from fusion.base.errors import ConfigError
from fusion.base.units import format_bytes
from fusion.cli.output import coordinator_option, json_option, print_json


@click.command()
@click.argument("job")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@coordinator_option
@json_option
def weights(job: str, output: Path, force: bool, coordinator: str | None, as_json: bool) -> None:
    """Download the weights of JOB by the model's own names, ready for load_state_dict.

    They are put together beside the output, which therefore needs room for them twice, and appear when complete.
    """
    from fusion.job.client import Client
    from fusion.job.weights import WeightFiles

    _check_target(output, force)
    with Client(coordinator, hasty=True) as client, _beside(output) as directory:
        files = WeightFiles(client, client.get(job), Path(directory), _progress if sys.stderr.isatty() else None)
        size_bytes = files.write(output, force)
    if as_json:
        print_json({"job": job, "file": str(output), "bytes": size_bytes})
    else:
        click.echo(f"wrote {output} ({format_bytes(size_bytes)})")


def _check_target(output: Path, force: bool) -> None:
    if output.is_dir():
        raise ConfigError(f"{output} is a directory; name a file such as {output / 'weights.safetensors'}")
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already; choose another name or give --force")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent} is not a directory; make it first")


def _beside(output: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".fusion-weights-", dir=output.parent)
    except OSError as error:
        raise ConfigError(f"cannot write into {output.parent}: {error.strerror}") from error


def _progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    click.echo(f"\rdownloading {format_bytes(done)} of {format_bytes(total)}  {end}", nl=False, err=True)
