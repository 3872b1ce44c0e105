"""`fusion checkpoints`: what a job can be resumed from, also as a folder of safetensors files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusion.base.errors import ConfigError, NotFoundError, WireError
from fusion.base.units import format_bytes
from fusion.cli.output import coordinator_option, json_option, print_json

if TYPE_CHECKING:
    from fusion.job.client import Client
    from fusion.protocol.jobstatus import Checkpoint


@click.command()
@click.argument("job")
@click.option("--download", type=click.Path(path_type=Path), metavar="DIR", help="Write one into this new folder.")
@click.option("--step", type=click.IntRange(1), help="Which one to download; default: the latest.")
@coordinator_option
@json_option
def checkpoints(job: str, download: Path | None, step: int | None, coordinator: str | None, as_json: bool) -> None:
    """List the checkpoints of JOB, the latest last; with --download, write one into a folder.

    A checkpoint has a safetensors file for each stage, by the model's own parameter names, and MANIFEST.json.
    """
    from fusion.job.client import Client

    with Client(coordinator, hasty=True) as client:
        found = client.checkpoints(job)
        if download is not None:
            chosen = _chosen(job, found, step)
            _download(client, chosen, download)
            found = [chosen]
    if as_json:
        print_json([_as_json(checkpoint) for checkpoint in found])
    elif download is not None:
        click.echo(f"wrote the checkpoint of step {found[0].step} to {download} ({format_bytes(found[0].size_bytes)})")
    elif found:
        for one in found:
            made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.committed_wall_s))
            click.echo(f"step {one.step:>9}  {len(one.states)} files  {format_bytes(one.size_bytes):>10}  made {made}")
    else:
        click.echo(f"{job} has no checkpoint", err=True)


def _chosen(job: str, found: Sequence[Checkpoint], step: int | None) -> Checkpoint:
    fit = [checkpoint for checkpoint in found if step is None or checkpoint.step == step]
    if not fit:
        known = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise NotFoundError(f"{job} has no checkpoint{'' if step is None else f' of step {step}'}; it has: {known}")
    return fit[-1]


def _download(client: Client, checkpoint: Checkpoint, directory: Path) -> None:
    """Write files whose digests were verified, and the manifest last: a folder without it is not whole."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--download: {directory} exists already; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"--download: {directory} cannot be made: {error.strerror}") from None
    for name, blob in zip(_names(checkpoint), checkpoint.states, strict=True):
        client.blobs.download_file(blob, directory / name)
    (directory / "MANIFEST.json").write_text(checkpoint.manifest)


def _names(checkpoint: Checkpoint) -> list[str]:
    """Return the files' names by the manifest; WireError for names that are no file names."""
    try:
        names = [str(file["name"]) for file in json.loads(checkpoint.manifest)["files"]]
    except (ValueError, KeyError, TypeError):
        raise WireError(f"the manifest of step {checkpoint.step} cannot be read") from None
    if len(names) != len(checkpoint.states) or any(Path(name).name != name or name in ("", "..") for name in names):
        raise WireError(f"the manifest of step {checkpoint.step} does not name one file for each of its states")
    return names


def _as_json(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "step": checkpoint.step,
        "files": len(checkpoint.states),
        "bytes": checkpoint.size_bytes,
        "made_wall_s": checkpoint.committed_wall_s,
    }
