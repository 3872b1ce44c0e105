"""Time and memory of every contiguous run of operators between legal cuts, for planners that search over cuts.

Large graphs have thousands of legal cuts; neighbouring ones are merged until `MAX_PIECES` are left, which costs a
balance of at most about one piece. What a stage would compute again is left out here, because it depends on where
others cut; `fusion.plan.need` counts it for the plan that is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fusion.base.ids import ValueId
from fusion.graph.dag import Graph
from fusion.graph.lifetimes import lifetimes_of
from fusion.graph.partition import crossing_bytes, legal_cuts
from fusion.plan.need import operator_work, resident_bytes, total_bytes
from fusion.plan.types import JobView

MAX_PIECES = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A run of operators as one stage."""

    work: float  #: floating-point operations per micro-batch, forward and backward
    resident: int  #: bytes that stay for a whole step
    saved: int  #: bytes that each micro-batch in flight keeps for its backward
    received: int  #: bytes of the values that it receives for each micro-batch
    sent: int  #: and of those that it sends
    working: int  #: bytes of the largest operator's traffic

    def memory_bytes(self, flights: int, *, recompute: bool = False) -> int:
        """Return the memory needed with so many micro-batches in flight; `recompute`: forwards are run again."""
        if recompute:
            return total_bytes(self.resident + self.saved + self.sent, self.received, self.working, flights)
        return total_bytes(self.resident, self.saved + self.received + self.sent, self.working, flights)

    def least_bytes(self, flights: int, *, recompute: bool = False) -> int:
        """Return a part of it that any longer run needs too."""
        return total_bytes(self.resident, self.saved, self.working, 1 if recompute else flights)


@dataclass(frozen=True)
class Spans:
    """All runs of a graph. Places are indices into `positions`, which begins with 0 and ends with the last operator."""

    positions: tuple[int, ...]
    #: by end place and then start place, from the place before the end down to 0
    table: tuple[tuple[Span, ...], ...]

    @property
    def pieces(self) -> int:
        """Number of runs that cannot be cut further."""
        return len(self.positions) - 1

    def span(self, start: int, end: int) -> Span:
        """Return the run from place `start` to place `end`, which is larger."""
        return self.table[end][end - 1 - start]


def spans_of(graph: Graph, job: JobView, most: int = MAX_PIECES) -> Spans:
    """Measure all runs of a graph between at most about `most` cuts."""
    positions = _merge(graph, [0, *legal_cuts(graph), len(graph.operators)], most)
    crossing = crossing_bytes(graph)
    works = [operator_work(graph, position).total for position in range(len(graph.operators))]
    table = [()] + [_ending_at(graph, job, positions, place, crossing, works) for place in range(1, len(positions))]
    return Spans(tuple(positions), tuple(table))


def _merge(graph: Graph, positions: list[int], most: int) -> list[int]:
    """Drop cuts between light pieces: a piece is closed once it has its share of the work or of the memory."""
    if len(positions) - 1 <= most:
        return positions
    weights = [
        (operator_work(graph, position).total, float(op.cost.saved_bytes))
        for position, op in enumerate(graph.operators)
    ]
    totals = [max(1.0, sum(weight[kind] for weight in weights)) for kind in (0, 1)]
    shares = [max(work / totals[0], saved / totals[1]) for work, saved in weights]
    limit = sum(shares) / most
    kept, waiting = [0], 0.0
    for begin, end in pairwise(positions):
        share = sum(shares[begin:end])
        if waiting and waiting + share > limit:
            kept.append(begin)
            waiting = 0.0
        waiting += share
    return [*kept, positions[-1]]


def _ending_at(
    graph: Graph, job: JobView, positions: list[int], place: int, crossing: tuple[int, ...], works: list[float]
) -> tuple[Span, ...]:
    """Grow a run from its end towards the front of the graph."""
    lifetimes, end = lifetimes_of(graph), positions[place]
    uses: dict[ValueId, int] = {}
    received: set[ValueId] = set()
    work, resident, saved, received_bytes, working = 0.0, 0, 0, 0, 0
    found: list[Span] = []
    for start in range(place - 1, -1, -1):
        for position in range(positions[start + 1] - 1, positions[start] - 1, -1):
            op = graph.operators[position]
            work += works[position]
            saved += op.cost.saved_bytes
            working = max(working, op.cost.moved_bytes)
            for out in op.outputs:
                if out in received:
                    received.discard(out)
                    received_bytes -= graph.values[out].bytes
            for value in lifetimes.reads[position]:
                if value in graph.producer:
                    if value not in received and not lifetimes.is_recomputed(value):
                        received.add(value)
                        received_bytes += graph.values[value].bytes
                    continue
                before = uses.get(value)
                if before is not None:
                    resident -= resident_bytes(graph, value, job, before)
                uses[value] = (before or 0) + (not op.no_grad)
                resident += resident_bytes(graph, value, job, uses[value])
        found.append(Span(work, resident, saved, received_bytes, crossing[end], working))
    return tuple(found)
