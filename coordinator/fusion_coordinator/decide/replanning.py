"""Whether a running job should move to another plan. Pure: figures and the memory of earlier looks in, a verdict out.

A move has to be worth its cost over the steps that are left, by a clear ratio, twice in a row, and not soon after
another; so that noise does not move a job, and two plans of nearly the same speed do not take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fusion.base.ids import NodeId
from fusion.base.units import format_duration

OVERHEAD_S = 0.001  #: of a micro-batch on a stage, beside what the model counts; no node is judged by less
STEPS_NEEDED = 3
SETTLED = 1.25  #: the medians of the last few steps and of some more differ by no more than this factor
SLOWEST, FASTEST = 1e4, 1e-3  #: measured over predicted: more and less are taken for a fault of the measurement


@dataclass(frozen=True, slots=True)
class Limits:
    """When a move is allowed."""

    ratio: float = 1.25  #: present step time over the best
    wins: int = 2  #: looks in a row that must find the same
    hold_off_s: float = 60.0  #: after the job began to run, or last moved


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of a job between two looks."""

    running_since_s: float  #: under its present plan; monotonic
    wins: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """The plan in force, and the best other one, under what was measured."""

    present_s: float  #: time of a step
    best_s: float
    move_s: float  #: cost of moving: no step is done meanwhile
    steps_left: int

    @property
    def ratio(self) -> float:
        """How many times faster the other plan is."""
        return self.present_s / self.best_s if self.best_s > 0 else 1.0

    @property
    def saved_s(self) -> float:
        """What the job ends earlier by, the cost of the move taken off."""
        return (self.present_s - self.best_s) * self.steps_left - self.move_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to move now, and why or why not, in one line."""

    move: bool
    reason: str


def judge(offer: Offer, memory: Memory, now_s: float, limits: Limits) -> tuple[Verdict, Memory]:
    """Return the verdict, and what to remember until the next look."""
    figures = (
        f"{offer.present_s:.3g} s per step by what was measured, another plan {offer.best_s:.3g} s "
        f"({offer.ratio:.2f}x), moving takes {format_duration(offer.move_s)}"
    )
    if offer.ratio < limits.ratio:
        return Verdict(False, f"{figures}: not better by {limits.ratio:g}x"), replace(memory, wins=0)
    if offer.saved_s <= 0:
        return Verdict(False, f"{figures}: not worth it for {offer.steps_left} steps"), replace(memory, wins=0)
    memory = replace(memory, wins=memory.wins + 1)
    early_s = memory.running_since_s + limits.hold_off_s - now_s
    if early_s > 0:
        return Verdict(False, f"{figures}: too soon, by {early_s:.0f} s"), memory
    if memory.wins < limits.wins:
        return Verdict(False, f"{figures}: {memory.wins} of {limits.wins} looks in a row found so"), memory
    return Verdict(True, f"{figures}, and saves {format_duration(offer.saved_s)}"), replace(memory, wins=0)


def settled(measured_s: Sequence[float]) -> bool:
    """Whether a stage's latest steps are enough to tell how long it computes: they agree with those before.

    While a node's speed changes they do not, and a plan for half of the change would soon have to be replaced.
    """
    if len(measured_s) < STEPS_NEEDED:
        return False
    usual, latest = median(measured_s), median(list(measured_s)[-STEPS_NEEDED:])
    return usual / SETTLED <= latest <= usual * SETTLED


def slowness(
    nodes: Sequence[NodeId], predicted_s: Sequence[float], measured_s: Sequence[float], micro_batches: int
) -> dict[NodeId, float]:
    """Return by node how many times longer it computes in a step than its stated speed makes one expect.

    A fixed cost of each micro-batch keeps a stage with next to no work from being judged by that cost.
    """
    raw = [took / said for took, said in zip(measured_s, predicted_s, strict=True) if said > 0 and took > 0]
    if not raw:
        return {}
    usual, extra_s = _bounded(median(raw)), OVERHEAD_S * micro_batches
    return {
        node: _bounded(usual * (took + extra_s) / (usual * said + extra_s))
        for node, said, took in zip(nodes, predicted_s, measured_s, strict=True)
        if took > 0
    }


def with_usual(known: Mapping[NodeId, float], nodes: Sequence[NodeId]) -> dict[NodeId, float]:
    """Return the slowness of all `nodes`; one that was not measured is as slow as half of the others.

    What the model leaves out slows down every node: without this, those that never ran the job would look faster.
    """
    usual = median(known.values()) if known else 1.0
    return {node: known.get(node, usual) for node in nodes}


def _bounded(factor: float) -> float:
    return min(SLOWEST, max(FASTEST, factor))


def move_cost_s(
    old: Mapping[NodeId, int], new: Mapping[NodeId, int], rates: Mapping[NodeId, tuple[float, float]], restart_s: float
) -> float:
    """Return how long a job stands still for a move.

    old, new: bytes of weights and optimizer state that each node holds before and after. All of them leave the old
    holders and come to the new ones, at `rates` (out, in) in bytes per second; a node that is not named there has no
    limit worth counting. `restart_s`: for the workers to start again and connect.
    """
    leaving = max((size / rates[node][0] for node, size in old.items() if node in rates), default=0.0)
    coming = max((size / rates[node][1] for node, size in new.items() if node in rates), default=0.0)
    return restart_s + leaving + coming
