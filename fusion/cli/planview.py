"""`fusion status JOB --plan`: what the plan in force predicts for each stage and link, and what the last step took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.base.units import format_bytes, format_duration, format_rate
from fusion.cli.output import printable, table

if TYPE_CHECKING:
    from fusion.plan.types import Plan, PlannedLink
    from fusion.protocol.jobstatus import JobStatus
    from fusion.protocol.metrics import StageMetrics

_STAGES = (
    "STAGE",
    "NODE",
    "OPERATORS",
    "PARAMETERS",
    "IN FLIGHT",
    "COMPUTE",
    "MEASURED",
    "MEMORY",
    "LIMIT",
    "MEASURED",
)
_LINKS = ("LINK", "CODEC", "PER STEP", "MEASURED", "SECONDS", "MEASURED", "GOODPUT")
_UNKNOWN = "-"


def plan_as_json(status: JobStatus) -> dict[str, Any] | None:
    """Return the plan of a job with predicted and measured figures; None before there is one.

    Seconds are of a whole step; null where nothing is predicted or no step is done. A link's predicted seconds hold
    delay and codec as well, the measured ones are those in which its receiver was busy with the bytes.
    """
    plan = status.plan
    if plan is None:
        return None
    measured = measured_stages(status, plan)
    return {
        "epoch": plan.epoch,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "step_s": _both(plan.step_s or None, status.last.step_s if measured and status.last is not None else None),
        "stages": [_stage(plan, index, measured.get(index)) for index in range(len(plan.stages))],
        "links": [_link(plan, link, measured) for link in plan.links],
    }


def measured_stages(status: JobStatus, plan: Plan) -> dict[int, StageMetrics]:
    """Return the last step's figures by stage; none while that step is of an earlier plan."""
    found = {} if status.last is None else {int(stage.stage): stage for stage in status.last.stages}
    return found if found.keys() == set(range(len(plan.stages))) else {}


def _both(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    return {"predicted": predicted, "measured": measured}


def _stage(plan: Plan, index: int, measured: StageMetrics | None) -> dict[str, Any]:
    stage = plan.stages[index]
    compute_s = plan.micro_batches * (stage.forward_s + stage.backward_s)
    return {
        "stage": index,
        "node": stage.node_name,
        "first_operator": stage.first_operator,
        "end_operator": stage.end_operator,
        "parameters": stage.parameters,
        "compute_s": _both(compute_s or None, None if measured is None else measured.compute_s),
        "memory_bytes": _both(stage.memory_bytes, None if measured is None else measured.peak_memory_bytes or None),
        "memory_limit_bytes": stage.memory_limit_bytes or None,
        "in_flight": stage.in_flight or None,
        "recompute": stage.recompute,
    }


def _link(plan: Plan, link: PlannedLink, measured: dict[int, StageMetrics]) -> dict[str, Any]:
    sender, receiver = measured.get(link.source), measured.get(link.target)
    got = None if receiver is None else receiver.received.get(link.source)
    return {
        "source": link.source,
        "target": link.target,
        "codec": link.codec,
        "bytes": _both(
            link.bytes_per_step / link.ratio, None if sender is None else sender.sent_bytes.get(link.target)
        ),
        "seconds": _both(plan.micro_batches * link.seconds or None, None if got is None else got.busy_s),
        "bytes_per_s": None if got is None else got.bytes_per_s or None,
    }


def plan_lines(status: JobStatus) -> list[str]:
    """Return the same for people."""
    found = plan_as_json(status)
    if found is None:
        return ["no plan yet"]
    step = found["step_s"]
    lines = [
        f"plan {found['epoch']}: {len(found['stages'])} stages, {found['schedule']}, "
        f"{found['micro_batches']} micro-batches; a step takes {_duration(step['measured'])}, "
        f"predicted {_duration(step['predicted'])}"
    ]
    lines += table([_STAGES, *map(_stage_row, found["stages"])])
    if found["links"]:
        lines += table([_LINKS, *map(_link_row, found["links"])])
    return lines


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    compute, memory = stage["compute_s"], stage["memory_bytes"]
    return (
        str(stage["stage"]),
        printable(stage["node"]),
        f"{stage['first_operator']}..{stage['end_operator'] - 1}",
        f"{stage['parameters']:,}",
        in_flight_text(stage["in_flight"], recompute=stage["recompute"]),
        _duration(compute["predicted"]),
        _duration(compute["measured"]),
        _size(memory["predicted"]),
        _size(stage["memory_limit_bytes"]),
        _size(memory["measured"]),
    )


def in_flight_text(count: int | None, *, recompute: bool) -> str:
    """Return how many micro-batches a stage holds at once, and whether only what came in of them."""
    text = str(count or _UNKNOWN)
    return f"{text}, recomputed" if recompute else text


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{link['source']} -> {link['target']}",
        printable(link["codec"]),
        _size(link["bytes"]["predicted"]),
        _size(link["bytes"]["measured"]),
        _duration(link["seconds"]["predicted"]),
        _duration(link["seconds"]["measured"]),
        _UNKNOWN if link["bytes_per_s"] is None else format_rate(link["bytes_per_s"]),
    )


def _duration(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else format_duration(seconds)


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)
