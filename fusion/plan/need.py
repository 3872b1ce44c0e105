"""What a stage needs: work per micro-batch, and memory. Exact for a shard, given the costs that capture measured."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.base.ids import ValueId
from fusion.graph.dag import Graph, InputKind
from fusion.graph.partition import Partition, Shard, operators_of
from fusion.plan.types import JobView

#: Work is counted in floating-point operations. Operators that only move memory have none; a byte moved stands for so
#: many, about what both CPUs and GPUs could have computed meanwhile.
WORK_PER_BYTE = 8.0
#: The backward of an operator reads and writes about twice what its forward does.
BACKWARD_MOVES = 2.0
#: Memory allocators round up and fragment.
MARGIN = 1.05


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one micro-batch, in floating-point operations."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def operator_work(graph: Graph, position: int) -> Work:
    """Return the work of one operator, never zero, so that any operator counts."""
    op = graph.operators[position]
    moved = WORK_PER_BYTE * op.cost.moved_bytes
    backward = op.cost.backward_flops
    if not op.no_grad and any(graph.values[out].requires_grad for out in op.outputs):
        backward += BACKWARD_MOVES * moved
    return Work(op.cost.forward_flops + moved + 1.0, backward)


def shard_work(graph: Graph, shard: Shard) -> Work:
    """Return the work of a shard, with the operators that it runs again."""
    parts = [operator_work(graph, position) for position in operators_of(shard)]
    return Work(sum(part.forward for part in parts), sum(part.backward for part in parts))


def recomputes(job: JobView, flights: int) -> bool:
    """Return whether a stage that holds so many micro-batches runs forwards again whatever its memory."""
    return job.recompute == "always" and flights > 1


def in_flight(job: JobView, stage: int, stages: int) -> int:
    """Return how many micro-batches a stage holds at once: with 1F1B the first stage the most, the last one (P9)."""
    return job.micro_batches if job.schedule == "gpipe" else min(job.micro_batches, stages - stage)


def resident_bytes(graph: Graph, value: ValueId, job: JobView, uses: int) -> int:
    """Return what an input keeps in memory for a whole step.

    A parameter: itself, its optimizer state, and a gradient for each of its `uses`, which are summed up apart.
    """
    item, bytes_ = graph.values[value], graph.values[value].bytes
    kind = graph.input_of[value].kind
    if kind in (InputKind.BUFFER, InputKind.CONSTANT):
        return bytes_
    if kind is not InputKind.PARAMETER:
        return 0
    if not item.requires_grad or item.spec is None:
        return bytes_
    return bytes_ * (1 + max(1, uses)) + item.spec.elements * job.optimizer_bytes_per_parameter


def total_bytes(resident: float, per_micro_batch: float, working: float, flights: int) -> int:
    """Return a stage's memory: what stays, what each micro-batch in flight holds, and twice the largest operator's
    own traffic for whatever it needs besides; with the allocator's margin.
    """
    return int(MARGIN * (resident + flights * per_micro_batch + 2 * working))


def stage_bytes(parts: Partition, stage: int, job: JobView, flights: int = 0, *, recompute: bool | None = None) -> int:
    """Return the memory that a stage of a partition needs, by the most exact account that the graph allows.

    `flights`: micro-batches in flight; 0: as the schedule's name says. `recompute`: all of them but one are only what
    came in; None: as the job asks where memory suffices.
    """
    graph, shard = parts.graph, parts.shards[stage]
    positions = operators_of(shard)
    uses: dict[ValueId, int] = {}
    for position in positions:
        op = graph.operators[position]
        for value in op.reads():
            uses[value] = uses.get(value, 0) + (not op.no_grad)
    resident = sum(resident_bytes(graph, value, job, uses.get(value, 0)) for value in shard.inputs)
    saved = sum(graph.operators[position].cost.saved_bytes for position in positions)
    received = sum(graph.values[parts.edges[edge].value].bytes for edge in shard.incoming)
    sent = sum(graph.values[value].bytes for value in {parts.edges[edge].value for edge in shard.outgoing})
    working = max(graph.operators[position].cost.moved_bytes for position in positions)
    flights = flights or in_flight(job, stage, len(parts.shards))
    if recomputes(job, flights) if recompute is None else recompute:
        return total_bytes(resident + saved + sent, received, working, flights)
    return total_bytes(resident, saved + received + sent, working, flights)
