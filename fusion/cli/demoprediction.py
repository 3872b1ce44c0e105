"""What a plan predicted beside what its steps took, for a job that ran on a demo cluster under one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fusion.base.ids import NodeId
from fusion.base.units import format_duration, format_rate
from fusion.cli.output import printable, table
from fusion.plan.types import Cluster, Link, Plan, PlannedLink
from fusion.protocol.metrics import StageMetrics, StepMetrics

_STAGES = ("STAGE", "NODE", "PREDICTED", "COMPUTED", "")
_LINKS = ("LINK", "NODES", "RATE", "GOODPUT", "PREDICTED", "BUSY", "")
#: Longer than predicted by this share: this machine cannot stand for so fast a device.
_TOO_FAST = 0.2


@dataclass(frozen=True)
class Prediction:
    """A plan, the cluster as it was when the plan was made, and the steps that ran under it.

    Times are of a step. The first step warms up connections and memory and is left out, if there are others.
    """

    plan: Plan
    cluster: Cluster
    metrics: Sequence[StepMetrics]
    simulated_s: float  #: step time by `fusion.plan.simulator`

    @property
    def steps(self) -> Sequence[StepMetrics]:
        """The steps that count."""
        return self.metrics[1:] or self.metrics

    @property
    def measured_s(self) -> float:
        """Median time of a step."""
        return median(step.step_s for step in self.steps)

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.plan.step_s - self.measured_s) / self.measured_s

    @property
    def simulated_error(self) -> float:
        """The same for the simulator."""
        return abs(self.simulated_s - self.measured_s) / self.measured_s

    @property
    def too_fast(self) -> bool:
        """Whether some stage took clearly longer to compute than its emulated device would."""
        return any(
            row["computed_s"] > (1 + _TOO_FAST) * row["predicted_s"] for row in self._stages() if row["predicted_s"]
        )

    def left_out(self) -> list[str]:
        """Return the names of the nodes that the plan does not use."""
        used = {stage.node for stage in self.plan.stages}
        return [node.name for node in self.cluster.nodes if node.node not in used]

    def as_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {
            "predicted_s": self.plan.step_s,
            "simulated_s": self.simulated_s,
            "measured_s": self.measured_s,
            "error": self.error,
            "simulated_error": self.simulated_error,
            "left_out": self.left_out(),
            "stages": self._stages(),
            "links": [self._link(link) for link in self.plan.links],
        }

    def lines(self) -> list[str]:
        """Return the same for people."""
        lines = [
            f"a step took {format_duration(self.measured_s)} (median of {len(self.steps)}); the plan predicted "
            f"{format_duration(self.plan.step_s)} ({self.error:.1%} off), the simulator "
            f"{format_duration(self.simulated_s)} ({self.simulated_error:.1%} off)"
        ]
        if left_out := self.left_out():
            lines.append(f"left out by the plan: {', '.join(map(printable, left_out))}")
        lines += table([_STAGES, *map(_stage_row, enumerate(self._stages()))])
        if self.plan.links:
            lines += table([_LINKS, *map(_link_row, map(self._link, self.plan.links))])
        if self.too_fast:
            lines.append("some stages computed longer than their devices would: this machine is too slow or too busy")
            lines.append("to stand for them; divide all speeds in the cluster file by the same factor")
        return lines

    def _stages(self) -> list[dict[str, Any]]:
        plan = self.plan
        return [
            {
                "node": stage.node_name,
                "predicted_s": plan.micro_batches * (stage.forward_s + stage.backward_s),
                "computed_s": self._median(index, lambda part: part.compute_s),
            }
            for index, stage in enumerate(plan.stages)
        ]

    def _link(self, link: PlannedLink) -> dict[str, Any]:
        names = [self.plan.stages[stage].node_name for stage in (link.source, link.target)]
        known = self._between(self.plan.stages[link.source].node, self.plan.stages[link.target].node)
        rate = None if known is None else known.rate_bytes_per_s
        count = link.bytes_per_step / link.ratio
        return {
            "source": link.source,
            "target": link.target,
            "from": names[0],
            "to": names[1],
            "codec": link.codec,
            "bytes": count,
            "rate_bytes_per_s": rate,
            "goodput_bytes_per_s": self._median(link.target, lambda part: _goodput(part, link)) or None,
            "predicted_s": None if rate is None else count / rate,
            "busy_s": self._median(link.target, lambda part: _busy_s(part, link)) or None,
        }

    def _between(self, source: NodeId, target: NodeId) -> Link | None:
        nodes = {node.node: node for node in self.cluster.nodes}
        return self.cluster.links.between(nodes[source], nodes[target])

    def _median(self, stage: int, figure: Callable[[StageMetrics], float]) -> float:
        return median(figure(part) for step in self.steps for part in step.stages if part.stage == stage)


def _busy_s(part: StageMetrics, link: PlannedLink) -> float:
    got = part.received.get(link.source)
    return 0.0 if got is None else got.busy_s


def _goodput(part: StageMetrics, link: PlannedLink) -> float:
    got = part.received.get(link.source)
    return 0.0 if got is None else got.bytes_per_s


def _stage_row(item: tuple[int, dict[str, Any]]) -> tuple[str, ...]:
    index, stage = item
    predicted_s, computed_s = stage["predicted_s"], stage["computed_s"]
    return (
        str(index),
        printable(stage["node"]),
        format_duration(predicted_s),
        format_duration(computed_s),
        _off(predicted_s, computed_s),
    )


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    rate, goodput, predicted_s = link["rate_bytes_per_s"], link["goodput_bytes_per_s"], link["predicted_s"]
    return (
        f"{link['source']} -> {link['target']}",
        f"{printable(link['from'])} -> {printable(link['to'])}",
        "-" if rate is None else format_rate(rate),
        "-" if goodput is None else format_rate(goodput),
        "-" if predicted_s is None else format_duration(predicted_s),
        "-" if link["busy_s"] is None else format_duration(link["busy_s"]),
        "" if predicted_s is None or link["busy_s"] is None else _off(predicted_s, link["busy_s"]),
    )


def _off(predicted: float, measured: float) -> str:
    return f"{(measured - predicted) / predicted:+.0%}" if predicted else ""
