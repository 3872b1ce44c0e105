"""Nodes and jobs as rows for people and as JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from fusion.base.units import format_bytes, format_duration
from fusion.observe.logs import escape_control
from fusion.wire.v1 import coordinator_pb2

NODE_COLUMNS = ("NAME", "STATE", "DEVICE", "MEMORY", "SPEED", "ADDRESS", "JOB", "HEARD", "ID")
JOB_COLUMNS = ("JOB", "NAME", "STATE", "STEP", "STAGES", "AGE", "REASON")


def node_row(node: coordinator_pb2.NodeStatus) -> list[str]:
    """Return a node's row."""
    hardware = node.hardware
    heard = f"{format_duration(max(0.0, time.time() - node.last_heartbeat_wall_s))} ago"
    speed = f"{hardware.flops / 1e9:.3g} GFLOP/s"
    memory = format_bytes(hardware.memory_bytes)
    return [node.name, node.state, hardware.device, memory, speed, node.address, node.job_id, heard, node.node_id]


def node_as_json(node: coordinator_pb2.NodeStatus) -> dict[str, Any]:
    """Return a node as `--json` shows it."""
    hardware = node.hardware
    return {
        "node": node.node_id,
        "name": node.name,
        "state": node.state,
        "address": node.address,
        "job": node.job_id or None,
        "device": hardware.device,
        "device_name": hardware.device_name,
        "memory_bytes": hardware.memory_bytes,
        "flops": hardware.flops,
        "bytes_per_s": hardware.bytes_per_s or None,
        "efficiency": dict(sorted(hardware.efficiency.items())),
        "threads": hardware.threads,
        "torch": hardware.torch_version,
        "last_heartbeat_s": node.last_heartbeat_wall_s,
        "incarnation": node.incarnation,
    }


def state_word(job: coordinator_pb2.JobStatus) -> str:
    """Return a job's state as people write it."""
    return coordinator_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()


def job_row(job: coordinator_pb2.JobStatus) -> list[str]:
    """Return a job's row."""
    age = format_duration(max(0.0, time.time() - job.submitted_wall_s))
    stages = str(len(job.plan.stages) or "")
    return [job.job_id, job.name, state_word(job), f"{job.step}/{job.steps}", stages, age, job.reason]


def job_as_json(job: coordinator_pb2.JobStatus) -> dict[str, Any]:
    """Return a job as `--json` shows it."""
    return {
        "job": job.job_id,
        "name": job.name,
        "state": state_word(job),
        "reason": job.reason,
        "step": job.step,
        "steps": job.steps,
        "loss": job.last.loss if job.HasField("last") else None,
        "stages": [
            {"node": stage.node_name, "first_operator": stage.first_operator, "end_operator": stage.end_operator}
            for stage in job.plan.stages
        ],
        "submitted_s": job.submitted_wall_s,
        "finished_s": job.finished_wall_s or None,
        "owner": job.owner,
    }


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print a table: drawn on a terminal, tab-separated elsewhere, so that `cut` and `awk` can read it."""
    clean = [[escape_control(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [list(columns), *clean]:
            click.echo("\t".join(row))
        return
    if not clean:
        click.echo(nothing)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in clean:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
