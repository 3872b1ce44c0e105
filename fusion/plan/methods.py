"""All planning methods behind one function: from a problem to the best arrangement that the method knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion.base.errors import ConfigError
from fusion.plan.baselines import equal_compute, equal_number, op_fence
from fusion.plan.chain import Chain, Ints
from fusion.plan.codecs import Compression, Ladder
from fusion.plan.communities import communities
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.exact import exact_plan
from fusion.plan.finals import WORTH, without_stage
from fusion.plan.layers import layered_plans
from fusion.plan.phases import compressed, with_links
from fusion.plan.relax import SLACK, mildest, relax, with_adatopk
from fusion.plan.search import Annealing, Effort

METHODS = ("fusion", "op-fence", "equal-number", "equal-compute", "exact")
POOL = 96  #: nodes that the search looks at
#: Micro-batches in flight more at each stage than at the next: room for slow links, 1F1B's own, and fewer.
SLOPES = (2.0, 1.0, 0.5, 0.0)
RECOMPUTING = (2.0, 1.0)  #: the same where stages run forwards again
_FEW_NODES, _FEW_BLOCKS = 16, 64
_REPEATS = 3  #: searches with other random numbers, where they cost little

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to plan."""

    method: str = "fusion"
    compression: Compression = Compression()  # noqa: RUF009 - frozen
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for a method that does not exist."""
        if self.method not in METHODS:
            raise ConfigError(f"method: {self.method[:40]!r} is none of {', '.join(METHODS)}")


def arrange(
    problem: Problem, settings: Settings, out_of_time: Stop, plain: Arrangement | None = None
) -> Arrangement | None:
    """Return the best arrangement that the method finds; None if it finds none that fits.

    plain: the best one without codecs, if it is known already; "auto" begins there.
    """
    settings.check()
    baseline = {"op-fence": op_fence, "equal-number": equal_number, "equal-compute": equal_compute}.get(settings.method)
    if baseline is not None:
        return _fitting(problem, compressed(problem, baseline(problem), settings.compression))
    search: _Search = _exact if settings.method == "exact" else _ours
    wanted = settings.compression
    if wanted.kind == "auto":
        found = _auto(problem, settings, search, out_of_time, plain)
    else:
        found = search(problem, wanted.ladder(), _Task(settings.seed, out_of_time))
    if found is not None and wanted.kind == "adatopk":
        found = with_adatopk(problem, found, wanted.ratio)
    return None if found is None else with_links(found, wanted.links)


@dataclass(frozen=True)
class _Task:
    """How one search is to be made."""

    seed: int
    out_of_time: Stop
    starts: Sequence[Arrangement] = ()


_Search = Callable[[Problem, Ladder, _Task], Arrangement | None]


def _fitting(problem: Problem, found: Arrangement) -> Arrangement | None:
    return found if problem.evaluate(found).fits else None


def _auto(
    problem: Problem, settings: Settings, search: _Search, out_of_time: Stop, plain: Arrangement | None
) -> Arrangement | None:
    """Search without codecs just as "none" does, then with them from that plan on; then relax the codecs.

    Of all plans that stay within SLACK of the fastest, the one whose codecs take away least is returned.
    """
    ladder = settings.compression.ladder()
    plain = plain or search(problem, ladder.upto(0), _Task(settings.seed, out_of_time))
    found = [] if plain is None else [plain]
    if len(ladder) > 1:
        best = search(problem, ladder, _Task(settings.seed, out_of_time, tuple(found)))
        found += [] if best is None else [best]
    if not found:
        return None
    limit_s = SLACK * min(problem.step_s(one) for one in found)
    relaxed = [relax(problem, one, ladder, limit_s) for one in found if problem.step_s(one) <= limit_s]
    return mildest(problem, relaxed, problem.step_s)


# ---- ours ----


def _ours(problem: Problem, ladder: Ladder, task: _Task) -> Arrangement | None:
    """The layered program over the most promising nodes, then the annealing from there and from the task's starts."""
    if len(problem.network.flops) > POOL:
        return _on_pool(problem, ladder, task)
    found = [Chain(problem, ladder).arrange(one.nodes, one.places) for one in task.starts]
    chains: list[Chain] = []  #: the most useful last
    for chain in _chains(problem, ladder):
        best_s = min((problem.step_s(one) for one in found), default=np.inf)
        better = layered_plans(chain, task.out_of_time, best_s)
        chains.insert(len(chains) if better else 0, chain)
        found = better + found
    best = _annealed(problem, chains, found, task)
    if best is None or problem.whole_blocks:
        return best
    return _without_useless(problem, chains[-1], best)


def _chains(problem: Problem, ladder: Ladder) -> Iterator[Chain]:
    """Yield the chain models to search in: where memory is short, for fewer micro-batches in it and less of each."""
    for slope in SLOPES:
        chain = Chain(problem, ladder, slope)
        yield chain
        if not chain.memory_binds:
            return
        if problem.gpipe:
            break
    if problem.job.recompute == "auto":
        for slope in RECOMPUTING[: 1 if problem.gpipe else None]:
            yield Chain(problem, ladder, slope, recompute=True)


def _annealed(problem: Problem, chains: Sequence[Chain], found: list[Arrangement], task: _Task) -> Arrangement | None:
    """Improve what was found; small clusters are searched more thoroughly."""
    if len(problem.network.flops) > _FEW_NODES:
        return Annealing(chains[-1], task.seed, Effort(16, 40), task.out_of_time).run(found)
    rounds = min(120, 15 * (len(problem.network.flops) - 1))
    main, spare = Effort(24, rounds, random=12), Effort(24, rounds // 3, random=4)
    again = _REPEATS if problem.profile.blocks <= _FEW_BLOCKS else 1
    for chain, effort in [(chains[-1], main)] * again + [(chain, spare) for chain in chains[:-1]]:
        best = Annealing(chain, task.seed + len(found), effort, task.out_of_time).run(found)
        found = found if best is None else [best, *found]
    return min(found, key=problem.step_s, default=None)


def _without_useless(problem: Problem, chain: Chain, best: Arrangement) -> Arrangement:
    """Drop nodes one after another while a step takes hardly longer: each could fail, and none is worth nothing."""
    limit_s = problem.step_s(best) * WORTH
    dropped = True
    while dropped and len(best.nodes) > 1:
        dropped, busiest_s = False, problem.evaluate(best).busiest_s
        fewer: list[Arrangement | None] = []
        for at in range(len(best.nodes)):
            rest = best.nodes[:at] + best.nodes[at + 1 :]
            fewer.append(chain.best_cuts(rest, chain.caps_near(chain.cap_of(busiest_s), range(-3, 4))))
            fewer += [chain.arrange(rest, places) for places in without_stage(best.places, at)]
        candidate = min((one for one in fewer if one is not None), key=problem.step_s, default=best)
        if len(candidate.nodes) < len(best.nodes) and problem.step_s(candidate) <= limit_s:
            best, dropped = candidate, True
    return best


def _on_pool(problem: Problem, ladder: Ladder, task: _Task) -> Arrangement | None:
    """Search on a part of the nodes, and translate their numbers there and back."""
    pool = promising(problem, POOL, [node for one in task.starts for node in one.nodes])
    place = {int(node): index for index, node in enumerate(pool)}
    inside = tuple(
        Arrangement(tuple(place[node] for node in one.nodes), one.places, one.ladder, one.choice) for one in task.starts
    )
    found = _ours(problem.subset(pool), ladder, replace(task, starts=inside))
    if found is None:
        return None
    return Arrangement(tuple(int(pool[node]) for node in found.nodes), found.places, found.ladder, found.choice)


def promising(problem: Problem, most: int, needed: Sequence[int] = ()) -> Ints:
    """Return the nodes worth a search: of every community the fastest with good links, and those that are `needed`.

    A node counts by the time of a stage of common size on it and its fourth best link, both ways.
    """
    network, profile = problem.network, problem.profile
    stages = min(16, problem.max_stages)
    out = float(np.min(profile.forward_out[1:-1] + profile.backward_out[1:-1], initial=np.inf))
    slowness = np.minimum(network.s_per_byte + network.s_per_byte.T, 1e9) * (out if np.isfinite(out) else 1.0) / 2
    good_link = np.partition(slowness, min(3, len(slowness) - 1), axis=1)[:, min(3, len(slowness) - 1)]
    score = problem.seconds[:, -1] / stages + good_link
    groups = [sorted(group, key=lambda node: (score[node], node)) for group in communities(network)]
    chosen = list(dict.fromkeys(needed))
    fair = [node for group in groups for node in group[: max(4, most // (2 * len(groups)))]]
    ranked = sorted(range(len(score)), key=lambda node: (score[node], node))
    for node in (*sorted(fair, key=lambda node: (score[node], node)), *ranked):
        if len(chosen) >= most:
            break
        if node not in chosen:
            chosen.append(node)
    return np.array(sorted(chosen), dtype=np.int64)


# ---- the reference ----


def _exact(problem: Problem, ladder: Ladder, task: _Task) -> Arrangement | None:
    """The optimum of the chain model, for the best of a few assumptions on micro-batches in flight."""
    found = [exact_plan(chain, task.out_of_time) for chain in _chains(problem, ladder)]
    fitting = [one for one in found if one is not None]
    return min(fitting, key=problem.step_s, default=None)
