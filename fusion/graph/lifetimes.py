"""What may be cut and what may be computed twice: memory shared between values, writes to it, and ancestry.

One `Lifetimes` is made per graph, by linear sweeps; `lifetimes_of` keeps it with the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from fusion.base.ids import ValueId
from fusion.base.units import MIB
from fusion.graph.costs import flops, moved_bytes
from fusion.graph.dag import Graph, InputKind
from fusion.graph.operators import may_draw, shared_values, written_values

#: A value is computed again where it is needed, instead of being sent, when making it again
MAX_OPERATORS = 128  #: takes at most so many operators,
WORK_FACTOR = 16  #: moves at most so many times its own bytes, and as many floating-point operations per byte,
FREE_BYTES = 4 * MIB  #: or at most so many bytes: about a millisecond, less than any message takes
FREE_FLOPS = 10_000_000.0  #: and operations


def lifetimes_of(graph: Graph) -> Lifetimes:
    """Return the analysis of `graph`, made at the first call and kept with the graph like a cached property."""
    found: Lifetimes = graph.__dict__.get("_lifetimes") or graph.__dict__.setdefault("_lifetimes", Lifetimes(graph))
    return found


class Lifetimes:
    """Alias groups, in-place writes and closures of one checked graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: what each operator reads, with repeats
        self.reads: list[tuple[ValueId, ...]] = [tuple(op.reads()) for op in graph.operators]
        self._roots = _alias_roots(graph)
        self._of_input = {self._roots[item.value] for item in graph.inputs}
        self._writers = self._find_writers()
        self.blocked = self._find_blocked()  #: by position: whether no cut may lie before this operator
        self._find_ancestry()
        self._fit: dict[ValueId, bool] = {}
        self._closures: dict[ValueId, tuple[int, ...]] = {}
        self._work: dict[int, tuple[int, float]] = {}  # by position: bytes moved, operations

    def is_written(self, value: ValueId) -> bool:
        """Whether any operator writes to the memory of this value, through whatever alias."""
        return self._roots[value] in self._writers

    def is_recomputed(self, value: ValueId) -> bool:
        """Whether `value`, which an operator makes, is made again where a later stage needs it, instead of sent.

        It is sent if it depends on randomness, on a written buffer, or on parameters together with the batch; if it
        costs too much to make again; or if it holds more parameters than it has bytes itself. An integer is never
        sent.
        """
        if self._graph.values[value].spec is None:
            return True
        if self._unfit[value] or (self._holds[value] and self._varies[value]):
            return False
        if value not in self._fit:
            positions, inputs = self._walk(value, MAX_OPERATORS)
            self._fit[value] = len(positions) <= MAX_OPERATORS and self._is_fit(value, positions, inputs)
        return self._fit[value]

    def closure(self, value: ValueId) -> tuple[int, ...]:
        """Return the operators, ascending, that make a recomputed `value` from the graph's inputs.

        Where one of them touches memory that is written in place, all its writers belong to them.
        """
        if value not in self._closures:
            self._closures[value] = tuple(sorted(self._walk(value, len(self._graph.operators))[0]))
        return self._closures[value]

    def _find_writers(self) -> dict[int, list[int]]:
        """Positions of the writes to each alias group that is written to at all, ascending, by its root."""
        writers: dict[int, list[int]] = {}
        for position, op in enumerate(self._graph.operators):
            for value in written_values(op):
                writers.setdefault(self._roots[value], []).append(position)
        return writers

    def _find_blocked(self) -> list[bool]:
        starts = [0] * (len(self._graph.operators) + 2)
        for first, last in self._written_ranges():
            starts[first + 1] += 1
            starts[last + 1] -= 1
        return [count > 0 for count in accumulate(starts)]

    def _written_ranges(self) -> Iterable[tuple[int, int]]:
        """First and last operator of each run that must stay together because of a write.

        Memory that an operator makes: from there to the last write. Memory of an input: all operators that touch it.
        """
        first: dict[int, int] = {}
        last = {root: writers[-1] for root, writers in self._writers.items()}
        for position in range(len(self._graph.operators) if last else 0):
            for root in self._written_roots(position):
                first.setdefault(root, position)
                if root in self._of_input:
                    last[root] = max(last[root], position)
        return [(first[root], last[root]) for root in last]

    def _written_roots(self, position: int) -> set[int]:
        """The alias groups that an operator touches and that any operator writes to."""
        if not self._writers:
            return set()
        touched = (*self.reads[position], *self._graph.operators[position].outputs)
        return {self._roots[value] for value in touched if self._roots[value] in self._writers}

    def _find_ancestry(self) -> None:
        """Sweep once for what already rules most values out: randomness, written buffers, parameters and batch."""
        graph = self._graph
        self._draws = [may_draw(op) for op in graph.operators]
        unfit, holds, varies = ([False] * len(graph.values) for _ in range(3))
        for item in graph.inputs:
            unfit[item.value] = self.is_written(item.value)
            holds[item.value] = item.kind is InputKind.PARAMETER
            varies[item.value] = item.kind is InputKind.BATCH
        for position, op in enumerate(graph.operators):
            read = self.reads[position]
            op_unfit = self._draws[position] or any(unfit[value] for value in read)
            op_holds, op_varies = any(holds[value] for value in read), any(varies[value] for value in read)
            for out in op.outputs:
                unfit[out], holds[out], varies[out] = op_unfit, op_holds, op_varies
        self._unfit, self._holds, self._varies = unfit, holds, varies

    def _walk(self, value: ValueId, limit: int) -> tuple[set[int], set[ValueId]]:
        """Return the operators that make `value` and the inputs that they read; end early beyond `limit`."""
        maker_of = self._graph.producer
        positions = {maker_of[value]}
        inputs: set[ValueId] = set()
        pending = list(positions)
        while pending and len(positions) <= limit:
            position = pending.pop()
            makers = []
            for read in self.reads[position]:
                if read in maker_of:
                    makers.append(maker_of[read])
                else:
                    inputs.add(read)
            for root in self._written_roots(position):
                makers.extend(self._writers[root][: limit + 1])
            fresh = set(makers) - positions
            positions |= fresh
            pending.extend(fresh)
        return positions, inputs

    def _is_fit(self, value: ValueId, positions: set[int], inputs: set[ValueId]) -> bool:
        kinds = {self._graph.input_of[item].kind for item in inputs}
        if (InputKind.PARAMETER in kinds and InputKind.BATCH in kinds) or any(map(self.is_written, inputs)):
            return False
        return not any(self._draws[position] for position in positions) and self._is_cheap(value, positions, inputs)

    def _is_cheap(self, value: ValueId, positions: set[int], inputs: set[ValueId]) -> bool:
        size, held = self._graph.values[value].bytes, dict.fromkeys(InputKind, 0)
        for item in inputs:
            held[self._graph.input_of[item].kind] += self._graph.values[item].bytes
        if held[InputKind.PARAMETER] > size:
            return False
        limit = max(WORK_FACTOR * size, FREE_BYTES)
        work = [self._work_of(position) for position in positions]
        return (
            held[InputKind.BUFFER] + held[InputKind.CONSTANT] <= limit
            and sum(moved for moved, _ in work) <= limit
            and sum(operations for _, operations in work) <= max(WORK_FACTOR * size, FREE_FLOPS)
        )

    def _work_of(self, position: int) -> tuple[int, float]:
        if position not in self._work:
            op, values = self._graph.operators[position], self._graph.values
            self._work[position] = moved_bytes(op, values), flops(op, values)[0]
        return self._work[position]


def _alias_roots(graph: Graph) -> list[int]:
    """Return for each value the one that stands for all that may share its memory."""
    parent = list(range(len(graph.values)))

    def root(value: int) -> int:
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    for op in graph.operators:
        for shared in shared_values(op):
            for out in op.outputs:
                parent[root(out)] = root(shared)
    return [root(value) for value in range(len(graph.values))]
