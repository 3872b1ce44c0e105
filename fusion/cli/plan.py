"""`fusion plan`: who would compute what on a cluster, how fast that is, and what each node is worth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from fusion.base.units import format_bytes, format_duration
from fusion.cli.output import json_option, print_json, printable
from fusion.cli.planning import Case, echo_table, plan_case, planning_options
from fusion.cli.planview import in_flight_text

if TYPE_CHECKING:
    from fusion.plan.explain import Explanation


@click.command()
@planning_options
@json_option
def plan(as_json: bool, **settings: Any) -> None:
    """Plan a job for a cluster, without any node running.

    The cluster is a TOML file of nodes and links (docs/planning.md), or with --live the one that a coordinator knows.
    """
    from fusion.plan.explain import explain

    case = plan_case(**settings)
    explanation = explain(case.planned)
    if as_json:
        print_json(plan_as_json(case, explanation))
    else:
        _show(case, explanation)


def plan_as_json(case: Case, explanation: Explanation) -> dict[str, Any]:
    """Return a plan as `--json` shows it; seconds of stages and links are per micro-batch."""
    plan = case.planned.plan
    gains = {gain.node: gain.gain for gain in explanation.gains}
    return {
        "job": case.name,
        "step_s": plan.step_s,
        "bottleneck": case.planned.bottleneck,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "stages": [
            {
                "node": stage.node_name,
                "first_operator": stage.first_operator,
                "end_operator": stage.end_operator,
                "parameters": stage.parameters,
                "memory_bytes": stage.memory_bytes,
                "memory_limit_bytes": stage.memory_limit_bytes,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "in_flight": stage.in_flight,
                "recompute": stage.recompute,
                "gain": gains[stage.node] if math.isfinite(gains[stage.node]) else None,
            }
            for stage in plan.stages
        ],
        "links": [
            {
                "source": link.source,
                "target": link.target,
                "codec": link.codec,
                "ratio": link.ratio,
                "bytes_per_step": link.bytes_per_step,
                "seconds": link.seconds,
            }
            for link in plan.links
        ],
        "left_out": [{"node": item.name, "reason": item.reason} for item in explanation.left_out],
    }


def _show(case: Case, explanation: Explanation) -> None:
    plan = case.planned.plan
    click.echo(
        f"{printable(case.name)}: {format_duration(plan.step_s)} per step on {len(plan.stages)} of "
        f"{len(case.cluster.nodes)} nodes, {plan.schedule}, {plan.micro_batches} micro-batches"
    )
    click.echo(f"bottleneck: {printable(case.planned.bottleneck)}")
    gains = {gain.node: gain.gain for gain in explanation.gains}
    rows: list[tuple[str, ...]] = [
        (
            "STAGE",
            "NODE",
            "OPERATORS",
            "PARAMETERS",
            "MEMORY",
            "LIMIT",
            "IN FLIGHT",
            "FORWARD",
            "BACKWARD",
            "WITHOUT IT",
        )
    ]
    for index, stage in enumerate(plan.stages):
        rows.append(
            (
                str(index),
                printable(stage.node_name),
                f"{stage.first_operator}..{stage.end_operator - 1}",
                f"{stage.parameters:,}",
                format_bytes(stage.memory_bytes),
                format_bytes(stage.memory_limit_bytes),
                in_flight_text(stage.in_flight, recompute=stage.recompute),
                format_duration(stage.forward_s),
                format_duration(stage.backward_s),
                _gain(gains[stage.node]),
            )
        )
    echo_table(rows)
    links: list[tuple[str, ...]] = [("LINK", "CODEC", "PER STEP", "ON THE WIRE", "PER MICRO-BATCH")]
    for link in plan.links:
        links.append(
            (
                f"{link.source} -> {link.target}",
                printable(link.codec),
                format_bytes(link.bytes_per_step),
                format_bytes(link.bytes_per_step / link.ratio),
                format_duration(link.seconds),
            )
        )
    if plan.links:
        echo_table(links)
    for item in explanation.left_out:
        click.echo(f"left out: {printable(item.name)}: {printable(item.reason)}")


def _gain(gain: float) -> str:
    """Return how much slower a step is without the node, in words."""
    if not math.isfinite(gain):
        return "no plan"
    return "no slower" if gain < 0.005 else f"{gain:.0%} slower"
