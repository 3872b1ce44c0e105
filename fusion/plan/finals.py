"""The last word on a plan has the simulator: its step time, and small changes that make it shorter.

The formula of `fusion.plan.cost`, by which plans are searched, lets the bottleneck wait while the first micro-batch
goes through all that follows. With more micro-batches in flight it works meanwhile, and only the simulator knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fusion.plan.baselines import equal_compute, op_fence
from fusion.plan.codecs import PlanCodec
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.plans import plan_of

MOST_TASKS = 20_000  #: of a simulation (micro-batches x stages); beyond, the formula must do
_STEPS = 2  #: the second one follows another, as all but the first of a run do
_FEW_TASKS, _FEW_NODES = 400, 16  #: so small pipelines are simulated often
_SIMULATIONS = 160  #: of changed plans
_BETTER = 0.999
WORTH = 1.002  #: a plan with a node less may take so much longer


def without_stage(places: tuple[int, ...], at: int) -> Iterator[tuple[int, ...]]:
    """Yield the places of the other stages when a neighbour takes over the part of stage `at`."""
    stages = len(places) - 1
    for inner in {max(1, at), min(stages - 1, at + 1)}:
        yield places[:inner] + places[inner + 1 :]


def simulated_s(problem: Problem, arrangement: Arrangement) -> float:
    """Return the step time of an arrangement: by simulation, of a very large one by the formula; inf: no fit."""
    evaluation = problem.evaluate(arrangement)
    if not evaluation.fits or problem.micro_batches * len(arrangement.nodes) > MOST_TASKS:
        return evaluation.step_s
    return simulate_plan(
        plan_of(problem, arrangement, evaluation),
        problem.profile.workload,
        problem.network.cluster,
        steps=_STEPS,
        optimizer_bytes_per_parameter=problem.job.optimizer_bytes_per_parameter,
        record=False,
    ).step_s


def improved(problem: Problem, found: Arrangement, out_of_time: Callable[[], bool]) -> Arrangement:
    """Return the best that simulation finds near `found` and near the baselines, in small clusters.

    An arrangement whose links have codecs of their own stays as it is.
    """
    small = problem.micro_batches * problem.max_stages <= _FEW_TASKS and len(problem.network.flops) <= _FEW_NODES
    if not small or found.ways is None or problem.whole_blocks:
        return found
    return _Climb(problem, found.ways, out_of_time).run(found)


class _Climb:
    """Takes every change that helps, until none does or the simulations are used up."""

    def __init__(self, problem: Problem, ways: tuple[PlanCodec, PlanCodec], out_of_time: Callable[[], bool]) -> None:
        self._problem, self._ways, self._out_of_time = problem, ways, out_of_time
        self._left = _SIMULATIONS
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def run(self, found: Arrangement) -> Arrangement:
        baselines = [Arrangement.alike(one.nodes, one.places, *self._ways) for one in self._baselines()]
        best = min([found, *baselines], key=self._seconds)
        helped = True
        while helped:
            helped = False
            for changed in self._changes(best):
                if self._left <= 0 or self._out_of_time():
                    return best
                limit = WORTH if len(changed.nodes) < len(best.nodes) else _BETTER
                if self._seconds(changed) <= limit * self._seconds(best):
                    best, helped = changed, True
                    break
        return best

    def _baselines(self) -> list[Arrangement]:
        return [op_fence(self._problem), equal_compute(self._problem)]

    def _seconds(self, one: Arrangement) -> float:
        key = one.nodes, one.places
        if key not in self._known:
            self._left -= 1
            self._known[key] = simulated_s(self._problem, one)
        return self._known[key]

    def _changes(self, best: Arrangement) -> Iterator[Arrangement]:
        """Cuts moved by a block or a few, nodes dropped, neighbours swapped, the order reversed, nodes added."""
        nodes, places = best.nodes, best.places
        stages = len(nodes)
        for step in (1, -1, 3, -3):
            for at in range(1, stages):
                moved = places[at] + step
                if places[at - 1] < moved < places[at + 1]:
                    yield self._changed(nodes, (*places[:at], moved, *places[at + 1 :]))
        for at in range(stages if stages > 1 else 0):
            for fewer in without_stage(places, at):
                yield self._changed(nodes[:at] + nodes[at + 1 :], fewer)
        for at in range(stages - 1):
            swapped = (*nodes[:at], nodes[at + 1], nodes[at], *nodes[at + 2 :])
            yield self._changed(swapped, places)
        if stages > 1:
            mirrored = tuple(places[-1] - place for place in reversed(places))
            yield self._changed(nodes[::-1], mirrored)
            yield self._changed(nodes[::-1], places)
        yield from self._additions(best)

    def _additions(self, best: Arrangement) -> Iterator[Arrangement]:
        """A node that is not used takes half of another's part."""
        if len(best.nodes) >= self._problem.max_stages:
            return
        unused = [node for node in range(len(self._problem.network.flops)) if node not in best.nodes]
        for node in unused:
            for at in range(len(best.nodes)):
                first, last = best.places[at : at + 2]
                if last - first < 2:
                    continue
                places = (*best.places[: at + 1], (first + last) // 2, *best.places[at + 1 :])
                for place in (at, at + 1):
                    yield self._changed((*best.nodes[:place], node, *best.nodes[place:]), places)

    def _changed(self, nodes: tuple[int, ...], places: tuple[int, ...]) -> Arrangement:
        return Arrangement.alike(nodes, places, *self._ways)
