"""The codecs of a plan over its run: for each phase of what a job asks, the codecs of the links between its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion.base.errors import PlanError
from fusion.base.ids import StageIndex
from fusion.compress.catalog import CodecSpec, TensorRole
from fusion.compress.linkcodecs import Link
from fusion.plan.chain import Chain
from fusion.plan.codecs import NONE, Compression, PlanCodec, parse_compression, plan_codec
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.finals import simulated_s
from fusion.plan.inforce import problem_of
from fusion.plan.relax import SLACK, mildest, relax, strength, with_adatopk
from fusion.plan.types import Cluster, CodecChange, JobView, Plan, PlannedLink
from fusion.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run and what the job wants of the codecs in it."""

    from_step: int
    compression: Compression


def stretches(job: JobView) -> tuple[Stretch, ...]:
    """Return the parts of what is left of a job's run, in their order; all of one part if its length is unknown."""
    phases = parse_compression(job.compression)
    begins = [phase.begins(job.steps) for phase in phases]
    if not job.steps:
        return (Stretch(job.first_step, phases[0].compression),)
    ends = [*begins[1:], job.steps + 1]
    return tuple(
        Stretch(max(begin, job.first_step), phase.compression)
        for phase, begin, end in zip(phases, begins, ends, strict=True)
        if end > max(begin, job.first_step)
    ) or (Stretch(job.first_step, phases[-1].compression),)


def longest(parts: Sequence[Stretch], steps: int) -> Compression:
    """Return what is wanted in the longest part: the one to choose nodes and cuts for."""
    ends = [*(part.from_step for part in parts[1:]), steps + 1]
    return max(zip(parts, ends, strict=True), key=lambda one: one[1] - one[0].from_step)[0].compression


def compressed(problem: Problem, found: Arrangement, wanted: Compression) -> Arrangement:
    """Return an arrangement with the codecs that are wanted; with "auto" it is never slower than without any."""
    if wanted.kind == "adatopk":
        coded = with_adatopk(problem, found, wanted.ratio)
    else:
        coded = replace(Chain(problem, wanted.ladder()).arrange(found.nodes, found.places), recompute=found.recompute)
        if wanted.kind == "auto":
            coded = _as_few_as_pay(problem, coded, wanted)
    return with_links(coded, wanted.links)


def _as_few_as_pay(problem: Problem, fastest: Arrangement, wanted: Compression) -> Arrangement:
    """Return the arrangement without codecs, with few and mild ones, or with each link's fastest one.

    The formula says how far codecs can be relaxed, the simulator whether they are worth anything at all.
    """
    plain = replace(fastest, ladder=(NONE,), choice=None)
    limit_s = SLACK * min(problem.step_s(plain), problem.step_s(fastest))
    relaxed = relax(problem, fastest, wanted.ladder(), limit_s)
    return mildest(problem, [plain, relaxed, fastest], lambda one: simulated_s(problem, one))


def best_over_run(problem: Problem, found: Sequence[Arrangement], parts: Sequence[Stretch], steps: int) -> Arrangement:
    """Return the arrangement whose nodes and cuts serve the whole run best; the first is without codecs, and is not
    given up for a slower run. Of what is nearly as fast, codecs that take away less are better.
    """
    ends = [*(part.from_step for part in parts[1:]), max(steps, parts[-1].from_step) + 1]
    weights = [end - part.from_step for part, end in zip(parts, ends, strict=True)]
    plain_s = simulated_s(problem, found[0])
    runs = []
    for one in found:
        coded = [compressed(problem, one, part.compression) for part in parts]
        run_s = sum(weight * simulated_s(problem, each) for weight, each in zip(weights, coded, strict=True))
        taken = sum(weight * strength(problem, each) for weight, each in zip(weights, coded, strict=True))
        runs.append((run_s, taken, one))
    limit_s = min(sum(weight * plain_s for weight in weights), SLACK * min(run_s for run_s, _, _ in runs))
    within = [run for run in runs if run[0] <= limit_s]
    return min(within, key=lambda run: (round(run[1], 6), run[0]))[2]


def with_links(found: Arrangement, links: Mapping[Link, CodecSpec]) -> Arrangement:
    """Return the arrangement with the codecs of single links replaced; PlanError names one between no two stages."""
    stages, ladder = len(found.nodes), list(found.ladder)
    choice = np.zeros((stages, stages), dtype=np.int64) if found.choice is None else found.choice.copy()
    for (source, target), spec in links.items():
        if max(source, target) >= stages:
            raise PlanError(
                f"compression: link {source}>{target} is not in a plan of {stages} stages; give the job the cuts "
                f"that its links are meant for"
            )
        choice[source, target] = len(ladder)
        ladder.append(plan_codec(spec, TensorRole.ACTIVATION if source < target else TensorRole.GRADIENT))
    return replace(found, ladder=tuple(ladder), choice=choice)


def codec_changes(
    problem: Problem, found: Arrangement, parts: Sequence[Stretch]
) -> tuple[dict[Link, PlanCodec], tuple[CodecChange, ...]]:
    """Return each link's codec at the beginning, and what changes later."""
    raw = problem.evaluate(Arrangement(found.nodes, found.places)).raw_bytes
    used = [(int(source), int(target)) for source, target in np.argwhere(raw > 0)]
    tables = []
    for part in parts:
        arranged = compressed(problem, found, part.compression)
        tables.append({link: arranged.codec(*link) for link in used})
    changes = (
        CodecChange(part.from_step, tuple((StageIndex(a), StageIndex(b), table[a, b].name) for a, b in used))
        for part, table in zip(parts[1:], tables[1:], strict=True)
    )
    return tables[0], tuple(changes) if used else ()


def with_codecs(plan: Plan, cluster: Cluster, workload: Workload, job: JobView) -> Plan:
    """Return a plan that was made without codecs with those that the job wants."""
    problem, found = problem_of(plan, cluster, workload, job)
    first, changes = codec_changes(problem, found, stretches(job))
    return replace(plan, links=with_link_codecs(plan.links, first), codec_changes=changes)


def with_link_codecs(links: Sequence[PlannedLink], codecs: Mapping[Link, PlanCodec]) -> tuple[PlannedLink, ...]:
    """Return a plan's links with these codecs, and "none" where there is none."""
    return tuple(
        replace(link, codec=codec.name, ratio=codec.ratio)
        for link in links
        for codec in (codecs.get((link.source, link.target), NONE),)
    )
