"""What `fusion plan` and `fusion simulate` share: their options, and the way from a job file and a cluster to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_METHODS = "fusion (default), op-fence, equal-number, equal-compute or exact (small clusters only)."


def planning_options(function: F) -> F:
    """Add --job, --cluster, --method, --compression, --set and --seed."""
    options = [
        click.option("--job", "job_file", required=True, type=click.Path(path_type=Path), help="Python job file."),
        click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), help="TOML file: nodes and links."),
        click.option("--method", default="fusion", metavar="NAME", help=_METHODS),
        click.option("--compression", default="none", metavar="HOW", help="none, topk:R, adatopk:R, auto or auto:MAX."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of make_job()."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the planner's search."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo(f"  {'  '.join(cells)}".rstrip())
