"""A workload between at most a few hundred candidate cuts, as arrays that a planner can search over quickly.

Places 0..K are indices into `positions`; block k is the run of operators from place k to place k + 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from fusion.plan.need import MARGIN
from fusion.plan.timing import Pace, TimeModel
from fusion.plan.workload import HeldLoad, ValueLoad, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_PLACES = 160
_FEW = 64  #: so few cuts are all kept
_NEAR = 1 / 64  #: of the work


@dataclass(frozen=True)
class Edges:
    """Values by the block that makes them and one block that reads them, ordered by (group, target).

    A group is all values with the same maker and the same readers: a stage that holds several of the readers gets
    them once.
    """

    group: Ints
    source: Ints
    target: Ints
    forward_bytes: Floats
    backward_bytes: Floats


@dataclass(frozen=True)
class Shared:
    """A tensor that several blocks read; each stage that reads it holds a copy."""

    uses: Ints  #: by place: reads in earlier blocks
    bytes: int
    elements: int
    trainable: bool


@dataclass(frozen=True)
class Profile:
    """What a stage from place i to place j costs, for all i < j."""

    workload: Workload
    model: TimeModel
    positions: Ints  #: K + 1 of the operators' positions, from 0 to their number
    forward_out: Floats  #: by place: bytes of values that cross it, each once
    backward_out: Floats  #: by place: bytes of their gradients
    edges: Edges
    shared: tuple[Shared, ...]
    resident_bytes: Floats  #: [i, j]: parameters, gradients, optimizer state, buffers and constants
    flight_bytes: Floats  #: [i, j]: kept for each micro-batch in flight
    input_bytes: Floats  #: [i, j]: the part of it that came in: all that is kept where forwards are run again
    working_bytes: Floats  #: [i, j]
    _paces: dict[Pace, tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of runs that cannot be cut further."""
        return len(self.positions) - 1

    def work(self, pace: Pace) -> tuple[Floats, Floats]:
        """Return by place the forward and the backward work of all that lies before it."""
        found = self._paces.get(pace)
        if found is None:
            forward, backward = self.workload.work(pace, self.model)
            found = self._paces[pace] = (self._prefix(forward), self._prefix(backward))
        return found

    def memory_bytes(self, flights: int | Floats, *, recompute: bool = False) -> Floats:
        """Return [i, j] the memory that a stage needs with so many micro-batches in flight.

        With `recompute` all of them but the one whose backward runs are only what came in.
        """
        fixed = self.resident_bytes + 2 * self.working_bytes
        if recompute:
            return MARGIN * (fixed + flights * self.input_bytes + (self.flight_bytes - self.input_bytes))
        return MARGIN * (fixed + flights * self.flight_bytes)

    def _prefix(self, by_operator: Floats) -> Floats:
        return np.concatenate([[0.0], np.cumsum(by_operator)])[self.positions]


def profile_of(
    workload: Workload,
    optimizer_bytes_per_parameter: int,
    model: TimeModel | None = None,
    *,
    cuts: Sequence[int] = (),
    most: int = MAX_PLACES,
) -> Profile:
    """Return the profile of a workload between `cuts` if there are any, or else between the best legal positions."""
    model = model or TimeModel()
    inner = list(cuts) or _candidates(workload, model, most)
    positions = np.array([0, *inner, len(workload.operators)], dtype=np.int64)
    forward_out = _crossing(workload.values, positions, backward=False)
    shared, resident = _held(workload.held, positions, optimizer_bytes_per_parameter)
    saved = _prefix_at([op.saved_bytes for op in workload.operators], positions)
    return Profile(
        workload,
        model,
        positions,
        forward_out,
        _crossing(workload.values, positions, backward=True),
        _edges(workload.values, positions),
        shared,
        resident,
        saved[None, :] - saved[:, None] + forward_out[None, :] + forward_out[:, None],
        np.repeat(forward_out[:, None], len(positions), axis=1),
        _range_max([op.forward_bytes for op in workload.operators], positions),
    )


def _candidates(workload: Workload, model: TimeModel, most: int) -> list[int]:
    """Keep of each equal share of the work the legal cut that sends least; of equals the one nearest the middle.

    Of many cuts, those that send at least twice as much as one close by are dropped first.
    """
    cuts = np.array(workload.cuts, dtype=np.int64)
    if len(cuts) < _FEW:
        return [int(cut) for cut in cuts]
    forward, backward = workload.work(Pace(model.bytes_per_flop), model)
    done = np.concatenate([[0.0], np.cumsum(forward + backward)])
    crossing, place = workload.crossing_bytes()[cuts], done[cuts] / done[-1]
    near = np.abs(place[:, None] - place[None, :]) < _NEAR
    dearer = (near & (2.0 * crossing[None, :] <= crossing[:, None])).any(axis=1)
    cuts, crossing, place = cuts[~dearer], crossing[~dearer], place[~dearer] * (most - 1)
    if len(cuts) < most:
        return [int(cut) for cut in cuts]
    slot = place.astype(np.int64)
    ranked = np.lexsort((np.abs(place - slot - 0.5), crossing, slot))
    return [int(cut) for cut in cuts[ranked][np.unique(slot[ranked], return_index=True)[1]]]


def _blocks(positions: Ints, operators: Sequence[int]) -> Ints:
    return np.searchsorted(positions, np.asarray(operators, dtype=np.int64), side="right") - 1


def _crossing(values: Sequence[ValueLoad], positions: Ints, *, backward: bool) -> Floats:
    changes = np.zeros(len(positions) + 1)
    if values:
        made = _blocks(positions, [value.producer for value in values])
        read = _blocks(positions, [value.readers[-1] for value in values])
        size = np.array([value.backward_bytes if backward else value.forward_bytes for value in values], dtype=float)
        np.add.at(changes, made + 1, size)
        np.add.at(changes, read + 1, -size)
    return np.cumsum(changes)[: len(positions)]


def _edges(values: Sequence[ValueLoad], positions: Ints) -> Edges:
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    starts = positions.tolist()
    for value in values:
        source = bisect_right(starts, value.producer) - 1
        targets = tuple(sorted({bisect_right(starts, reader) - 1 for reader in value.readers} - {source}))
        if targets:
            size = found.setdefault((source, targets), [0, 0])
            size[0] += value.forward_bytes
            size[1] += value.backward_bytes
    rows = [
        (group, source, target, size[0], size[1])
        for group, ((source, targets), size) in enumerate(sorted(found.items()))
        for target in targets
    ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    whole = table[:, :3].astype(np.int64)
    return Edges(whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3], table[:, 4])


def _held(held: Sequence[HeldLoad], positions: Ints, optimizer_bytes: int) -> tuple[tuple[Shared, ...], Floats]:
    """Return the tensors that several blocks read, and the resident bytes of all stages."""
    alone = np.zeros(len(positions))
    shared: list[Shared] = []
    for item in held:
        blocks = _blocks(positions, item.readers)
        if blocks[0] == blocks[-1]:
            copies = 1 + len(blocks) if item.trainable else 1
            alone[blocks[0] + 1] += copies * item.bytes + item.trainable * item.elements * optimizer_bytes
        else:
            counts = np.bincount(blocks, minlength=len(positions) - 1)
            uses = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            shared.append(Shared(uses, item.bytes, item.elements, item.trainable))
    total = np.cumsum(alone)
    resident = total[None, :] - total[:, None]
    for one in shared:
        uses_inside = np.maximum(one.uses[None, :] - one.uses[:, None], 0)
        copies_of = (1 + uses_inside) * one.bytes + one.elements * optimizer_bytes if one.trainable else one.bytes
        resident = resident + np.where(uses_inside > 0, copies_of, 0)
    return tuple(shared), resident


def _prefix_at(by_operator: Sequence[float], positions: Ints) -> Floats:
    return np.array([0.0, *accumulate(by_operator)])[positions]


def _range_max(by_operator: Sequence[float], positions: Ints) -> Floats:
    """Return [i, j] the largest figure of any operator from place i to place j; 0 where j <= i."""
    blocks = np.array([max(by_operator[a:b]) for a, b in pairwise(positions)])
    table = np.zeros((len(positions), len(positions)))
    for start in range(len(blocks)):
        table[start, start + 1 :] = np.maximum.accumulate(blocks[start:])
    return table
