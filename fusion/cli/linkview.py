"""`fusion status JOB --links`: each link's codec now, and what the last step sent, took and waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.base.units import format_bytes, format_duration, format_rate
from fusion.cli.output import printable, table
from fusion.cli.planview import measured_stages

if TYPE_CHECKING:
    from fusion.plan.types import Plan
    from fusion.protocol.jobstatus import JobStatus
    from fusion.protocol.metrics import StageMetrics

_HEADING = ("LINK", "NODES", "CODEC", "RATIO", "PER STEP", "GOODPUT", "ENCODE", "DECODE", "WAITED", "VIA")
_UNKNOWN = "-"


def links_as_json(status: JobStatus) -> dict[str, Any] | None:
    """Return the links of a job's plan; None before there is one.

    All figures are of the last step and null where it did not measure them. `ratio` counts values and gradients,
    `bytes` everything. `waited_share` is the part of the step in which the receiving stage had nothing else to do.
    `relayed_by` is null for a link that needs no relay. `compression` is what a job is given to use the same codecs at
    the same steps again.
    """
    from fusion.plan.codecs import codec_schedule, compression_text

    plan = status.plan
    if plan is None:
        return None
    measured, codecs = measured_stages(status, plan), codec_schedule(plan)
    relays = {(link.source, link.target): link.by for link in status.relayed}
    step = max(1, status.step)
    return {
        "step": status.step,
        "compression": compression_text(plan),
        "links": [
            _link(
                plan,
                link.source,
                link.target,
                codecs.at(step).of(link.source, link.target).name,
                measured,
                relays.get((link.source, link.target)),
            )
            for link in plan.links
        ],
    }


def _link(
    plan: Plan, source: int, target: int, codec: str, measured: dict[int, StageMetrics], relayed: str | None
) -> dict[str, Any]:
    from fusion.base.ids import StageIndex

    sender, receiver = measured.get(source), measured.get(target)
    coding = None if sender is None else sender.coding.get(StageIndex(target))
    got = None if receiver is None else receiver.received.get(StageIndex(source))
    step_s = 0.0 if receiver is None else receiver.step_s
    return {
        "source": source,
        "target": target,
        "from_node": plan.stages[source].node_name,
        "to_node": plan.stages[target].node_name,
        "codec": codec if coding is None else coding.codec,
        "ratio": None if coding is None or not coding.coded_bytes else coding.ratio,
        "bytes": None if sender is None else sender.sent_bytes.get(StageIndex(target)),
        "raw_bytes": None if coding is None else coding.raw_bytes,
        "bytes_per_s": None if got is None else got.bytes_per_s or None,
        "encode_s": None if coding is None else coding.encode_s,
        "decode_s": None if got is None else got.decode_s,
        "relayed_by": relayed,
        "waited_share": None if got is None or step_s <= 0 else got.waited_s / step_s,
    }


def link_lines(status: JobStatus) -> list[str]:
    """Return the same for people."""
    found = links_as_json(status)
    if found is None:
        return ["no plan yet"]
    if not found["links"]:
        return ["one stage, so no links"]
    return [
        *table([_HEADING, *map(_row, found["links"])]),
        f"the same codecs again: compression={found['compression']!r}",
    ]


def _row(link: dict[str, Any]) -> tuple[str, ...]:
    ratio, rate, share = link["ratio"], link["bytes_per_s"], link["waited_share"]
    return (
        f"{link['source']} -> {link['target']}",
        printable(f"{link['from_node']} -> {link['to_node']}"),
        printable(link["codec"]),
        _UNKNOWN if ratio is None else f"{ratio:.1f}",
        _UNKNOWN if link["bytes"] is None else format_bytes(link["bytes"]),
        _UNKNOWN if rate is None else format_rate(rate),
        _UNKNOWN if link["encode_s"] is None else format_duration(link["encode_s"]),
        _UNKNOWN if link["decode_s"] is None else format_duration(link["decode_s"]),
        _UNKNOWN if share is None else f"{share:.0%}",
        _UNKNOWN if link["relayed_by"] is None else printable(link["relayed_by"]),
    )
