"""What `fusion plan` and `fusion simulate` share: their options, and the way from job and cluster files to a plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fusion.base.errors import ConfigError, UsageError
from fusion.cli.output import table

if TYPE_CHECKING:
    from fusion.plan.planner import Planned
    from fusion.plan.types import Cluster, JobView
    from fusion.plan.workload import Workload

F = TypeVar("F", bound=Callable[..., Any])

_METHODS = "fusion (default), op-fence, equal-number, equal-compute or exact (small clusters only)."
_MAX_FILE_BYTES = 16_000_000


def planning_options(function: F) -> F:
    """Add --job, --cluster, --live, --method, --compression, --set, --seed and --budget."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--job", "job_file", required=True, type=path, help="Python job file, as for submit."),
        click.option("--cluster", "cluster_file", type=path, help="TOML file that names nodes and links."),
        click.option("--live", is_flag=True, help="Take the cluster from the coordinator instead."),
        click.option("--coordinator", metavar="HOST:PORT", help="With --live: whom to ask."),
        click.option("--method", default="fusion", metavar="NAME", help=_METHODS),
        click.option("--compression", metavar="HOW", help="Instead of the job's own: none, int8/int4, auto, ..."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of make_job()."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the planner's search."),
        click.option(
            "--budget", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds for the search."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(frozen=True)
class Case:
    """A job on a cluster, planned."""

    name: str  #: of the job
    job: JobView
    workload: Workload
    cluster: Cluster
    planned: Planned


def plan_case(
    *,
    job_file: Path,
    cluster_file: Path | None,
    live: bool,
    coordinator: str | None,
    method: str,
    compression: str | None,
    settings: tuple[str, ...],
    seed: int,
    budget: float,
) -> Case:
    """Load and capture the job, read the cluster, and plan. What the job file prints goes to stderr."""
    from fusion.cli.jobfile import load_job, parse_settings
    from fusion.job.prepare import captured_graph
    from fusion.plan.planner import Options, make_plan
    from fusion.plan.workload import workload_of
    from fusion.protocol.job import job_view

    cluster = _cluster(cluster_file, live, coordinator)
    real, sys.stdout = sys.stdout, sys.stderr
    try:
        job = load_job(job_file, parse_settings(settings))
    finally:
        sys.stdout = real
    draft, graph = captured_graph(job)
    view = job_view(draft)
    if compression is not None:
        view = replace(view, compression=compression)
    planned = make_plan(cluster, graph, view, Options(method, seed, budget, time.monotonic))
    return Case(draft.name, view, workload_of(graph), cluster, planned)


def _cluster(cluster_file: Path | None, live: bool, coordinator: str | None) -> Cluster:
    if live == (cluster_file is not None):
        raise UsageError("give either --cluster FILE or --live")
    if coordinator and not live:
        raise UsageError("--coordinator goes with --live")
    if live:
        from fusion.job.client import live_cluster

        return live_cluster(coordinator)
    assert cluster_file is not None
    return read_cluster(cluster_file)


def read_cluster(file: Path) -> Cluster:
    """Return the cluster of a file that --cluster names; ConfigError if it cannot be read, or is wrong."""
    from fusion.plan.cluster_file import parse_cluster

    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--cluster {file}: larger than {_MAX_FILE_BYTES} bytes; name fewer nodes")
        return parse_cluster(file.read_text(encoding="utf-8-sig"), str(file))
    except OSError as error:
        raise ConfigError(f"--cluster {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--cluster {file} is not text in UTF-8") from None


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first is the heading."""
    for line in table(rows):
        click.echo(line)
