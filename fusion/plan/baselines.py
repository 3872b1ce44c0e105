"""The methods that a better planner is measured against: equal number, equal compute, and the paper's OP-Fence.

All of them use every node that they can: nothing is left out because its links are slow. They cut where little
crosses, as anyone would who cuts between layers, so that they are not slower than their idea.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion.plan.communities import communities, ordered
from fusion.plan.cost import Arrangement, Floats, Ints, Problem

_HALVINGS = 40
_CHOICE = 1.5  #: cuts to choose from, as a multiple of the stages


def equal_number(problem: Problem) -> Arrangement:
    """As many operators on each node, nodes in the cluster's order."""
    order = list(range(problem.max_stages))
    allowed = _cheap_places(problem, len(order))
    positions = problem.profile.positions[allowed]
    wanted = positions[-1] * np.arange(1, len(order)) / len(order)
    nearest = np.searchsorted((positions[:-1] + positions[1:]) / 2, wanted)
    chosen = _spread(nearest.tolist(), len(allowed) - 1)
    return Arrangement(tuple(order), tuple(int(allowed[index]) for index in chosen))


def equal_compute(problem: Problem) -> Arrangement:
    """The same time on each node, as far as memory allows, nodes in the cluster's order."""
    return balanced(problem, _fastest(problem, range(len(problem.network.flops))))


def op_fence(problem: Problem) -> Arrangement:
    """Communities of bandwidth one after another (FusionLLM, section on OP-Fence), the same time on each node."""
    groups = ordered(communities(problem.network), problem.network)
    return balanced(problem, _fastest(problem, [node for group in groups for node in group]))


def _fastest(problem: Problem, order: Sequence[int]) -> list[int]:
    """Where nodes are more than stages can be, the fastest of them, in order."""
    ranked = sorted(order, key=lambda node: (-problem.network.flops[node], node))
    taken = set(ranked[: problem.max_stages])
    return [node for node in order if node in taken]


def balanced(problem: Problem, order: Sequence[int]) -> Arrangement:
    """Return the arrangement of exactly these nodes in which the slowest computes as briefly as it can.

    Without regard to links. Memory is regarded if the model fits in this order at all.
    """
    allowed = _cheap_places(problem, len(order))
    fitting = _balance(problem, order, allowed, _memory_reach(problem, order, allowed))
    if fitting is None:
        free = np.full((len(order), len(allowed)), len(allowed) - 1, dtype=np.int64)
        fitting = _balance(problem, order, allowed, free)
    assert fitting is not None, "without memory limits any order works"
    return Arrangement(tuple(order), tuple(int(allowed[index]) for index in fitting))


def _cheap_places(problem: Problem, stages: int) -> Ints:
    """Return the places that send least, as many as leave a choice, with both ends."""
    crossing = problem.profile.forward_out + problem.profile.backward_out
    inner = np.sort(crossing[1:-1])
    if problem.whole_blocks or len(inner) <= _CHOICE * stages:
        return np.arange(len(crossing))
    cheap = crossing <= inner[int(_CHOICE * stages)]
    cheap[[0, -1]] = True
    return np.flatnonzero(cheap)


def _balance(problem: Problem, order: Sequence[int], allowed: Ints, reach: Ints) -> tuple[int, ...] | None:
    seconds = problem.seconds[:, allowed]
    low, high = 0.0, float(seconds[list(order), -1].max())
    best = _greedy(seconds, order, reach, high)
    if best is None:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _greedy(seconds, order, reach, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def _greedy(seconds: Floats, order: Sequence[int], reach: Ints, cap_s: float) -> tuple[int, ...] | None:
    """Let each node take as much as it can below `cap_s` while leaving a block for each that follows.

    Places here are indices into the allowed ones.
    """
    blocks, place, places = seconds.shape[1] - 1, 0, [0]
    for stage, node in enumerate(order):
        end = int(np.searchsorted(seconds[node], seconds[node, place] + cap_s * (1 + 1e-9), side="right")) - 1
        end = min(end, int(reach[stage, place]), blocks - (len(order) - 1 - stage))
        if end <= place:
            return None
        place = end
        places.append(place)
    return tuple(places) if place == blocks else None


def _memory_reach(problem: Problem, order: Sequence[int], allowed: Ints) -> Ints:
    """[stage, i]: the last allowed place up to which the stage may run from allowed place i."""
    count = len(order)
    reach = np.empty((count, len(allowed)), dtype=np.int64)
    for stage, node in enumerate(order):
        flights = problem.micro_batches if problem.gpipe else min(problem.micro_batches, count - stage)
        need = problem.profile.memory_bytes(flights)[np.ix_(allowed, allowed)]
        over = np.triu(need > problem.network.memory_bytes[node], 1)
        reach[stage] = np.where(over.any(axis=1), over.argmax(axis=1) - 1, len(allowed) - 1)
    return reach


def _spread(places: list[int], blocks: int) -> tuple[int, ...]:
    """Make places ascend strictly between 0 and `blocks`, moving them as little as needed."""
    for index, place in enumerate(places):
        places[index] = max(place, index + 1, places[index - 1] + 1 if index else 1)
    for index in range(len(places) - 1, -1, -1):
        after = places[index + 1] if index + 1 < len(places) else blocks
        places[index] = min(places[index], after - 1)
    return (0, *places, blocks)
