"""The planner: cluster, model and job in, plan out. Pure, and deterministic for a seed while its time suffices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusion.base.errors import PlanError
from fusion.base.units import format_bytes
from fusion.graph.dag import Graph
from fusion.graph.partition import partition
from fusion.plan.chain import Chain
from fusion.plan.codecs import PLAIN_LADDER, Compression, Ladder
from fusion.plan.cost import Arrangement, Evaluation, Problem
from fusion.plan.finals import improved, simulated_s
from fusion.plan.layers import layered_plans
from fusion.plan.methods import Settings, arrange, promising
from fusion.plan.need import stage_bytes
from fusion.plan.network import network_of
from fusion.plan.phases import (
    Stretch,
    best_over_run,
    codec_changes,
    compressed,
    longest,
    stretches,
    with_link_codecs,
)
from fusion.plan.plans import plan_of
from fusion.plan.profile import profile_of
from fusion.plan.timing import TimeModel
from fusion.plan.types import Cluster, JobView, Plan, PlannedStage
from fusion.plan.workload import Workload, workload_of

BUDGET_S = 10.0
_ROUNDS = 6  #: of making room for what only the whole graph shows
_DIAGNOSIS_NODES = 24
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; the codecs are the job's."""

    method: str = "fusion"  #: one of `methods.METHODS`
    seed: int = 0
    budget_s: float = BUDGET_S  #: after which the best plan so far is taken
    clock_s: Callable[[], float] | None = None  #: monotonic; None: the budget does not count
    model: TimeModel | None = None


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from."""

    plan: Plan
    problem: Problem
    arrangement: Arrangement
    evaluation: Evaluation
    ladder: Ladder = PLAIN_LADDER  #: that the links chose from

    @property
    def bottleneck(self) -> str:
        """What limits the speed, in words."""
        first, second = self.evaluation.bottleneck
        stages = self.plan.stages
        if self.evaluation.waits:
            return "memory: too few micro-batches in flight"
        if first < 0:
            site = next(
                index for index, node in enumerate(self.arrangement.nodes) if self.problem.network.site[node] == second
            )
            return f"uplink of the site of {stages[site].node_name}"
        if first == second:
            return f"stage {first} on {stages[first].node_name}"
        return f"link {stages[first].node_name} -> {stages[second].node_name}"


def make_plan(cluster: Cluster, graph: Graph, job: JobView, options: Options | None = None) -> Planned:
    """Return the best plan (epoch 1) that the method finds for a checked graph.

    PlanError: no plan fits; it says what is missing. ConfigError: a method or compression that does not exist.
    GraphError: `job.cuts` are not legal.
    """
    options = options or Options()
    workload = workload_of(graph)
    partition(graph, job.cuts)  # refuses cuts that are not legal
    limits = {node.node: node.memory_bytes for node in cluster.nodes}
    for _ in range(_ROUNDS):
        nodes = tuple(replace(node, memory_bytes=limits[node.node]) for node in cluster.nodes)
        planned = plan_workload(replace(cluster, nodes=nodes), workload, job, options)
        parts = partition(graph, [stage.first_operator for stage in planned.plan.stages[1:]])
        over = False
        stages = []
        for index, stage in enumerate(planned.plan.stages):
            need = stage_bytes(parts, index, job, stage.in_flight, recompute=stage.recompute)
            limit = _limit(cluster, stage)
            if need > limit:
                limits[stage.node] -= need - limit
                over = True
            stages.append(replace(stage, memory_bytes=need, memory_limit_bytes=limit))
        if not over:
            return replace(planned, plan=replace(planned.plan, stages=tuple(stages)))
    raise PlanError("memory: what stages compute again fits no node; add memory or a node")


def _limit(cluster: Cluster, stage: PlannedStage) -> int:
    return next(node.memory_bytes for node in cluster.nodes if node.node == stage.node)


def plan_workload(cluster: Cluster, workload: Workload, job: JobView, options: Options | None = None) -> Planned:
    """Return the best plan for a workload; errors as `make_plan`."""
    options = options or Options()
    if not cluster.nodes:
        raise PlanError("no node is idle; start one with 'fusion-node start'")
    parts = stretches(job)
    settings = Settings(options.method, longest(parts, job.steps), options.seed)
    settings.check()
    profile = profile_of(workload, job.optimizer_bytes_per_parameter, options.model, cuts=job.cuts)
    problem = Problem(profile, network_of(cluster), job)
    _check_cuts(problem)
    out_of_time = _timer(options)
    found = _arranged(problem, settings, parts, out_of_time)
    if found is None:
        raise PlanError(_what_is_missing(problem, options))
    evaluation = problem.evaluate(found)
    plan = replace(plan_of(problem, found, evaluation), step_s=simulated_s(problem, found))
    plan = _with_phases(plan, problem, found, parts)
    ladder = settings.compression.ladder() if settings.compression.kind != "adatopk" else PLAIN_LADDER
    return Planned(plan, problem, found, evaluation, ladder)


def _arranged(
    problem: Problem, settings: Settings, parts: Sequence[Stretch], out_of_time: Callable[[], bool]
) -> Arrangement | None:
    """Return what is best for the run, with the codecs of its longest part; "auto" is held against "none"."""
    wanted, ours = settings.compression, settings.method == "fusion"
    if wanted.kind != "auto" or wanted.links:
        found = arrange(problem, settings, out_of_time)
        return improved(problem, found, out_of_time) if ours and found is not None else found
    plain = arrange(problem, replace(settings, compression=Compression()), out_of_time)
    if plain is None:
        return None  # codecs need no memory less
    if ours:
        plain = improved(problem, plain, out_of_time)
    coded = arrange(problem, settings, out_of_time, plain)
    candidates = [plain] if coded is None else [plain, coded]
    return compressed(problem, best_over_run(problem, candidates, parts, problem.job.steps), wanted)


def _check_cuts(problem: Problem) -> None:
    if problem.whole_blocks and problem.max_stages < problem.profile.blocks:
        raise PlanError(
            f"cuts: {len(problem.job.cuts)} cuts make {problem.profile.blocks} stages, "
            f"only {problem.max_stages} nodes may be used"
        )


def _timer(options: Options) -> Callable[[], bool]:
    clock_s = options.clock_s
    if clock_s is None:
        return lambda: False
    end_s = clock_s() + options.budget_s
    return lambda: clock_s() >= end_s


def _with_phases(plan: Plan, problem: Problem, found: Arrangement, parts: Sequence[Stretch]) -> Plan:
    """Return the plan with the codecs of each part of the run; `found` has those of the longest."""
    if len(parts) == 1:
        return plan
    first, changes = codec_changes(problem, found, parts)
    return replace(plan, links=with_link_codecs(plan.links, first), codec_changes=changes)


# ---- why there is none ----


def _what_is_missing(problem: Problem, options: Options) -> str:
    """Say in one line what is missing for any plan: links, memory, or freedom of the method."""
    network = problem.network
    closest = _closest(problem)
    if closest is None:
        stages = f"{problem.profile.blocks} nodes" if problem.whole_blocks else "two nodes"
        return f"links: no {stages} of {len(network.flops)} connect in a row, both ways; check that they are reachable"
    missing = float(problem.evaluate(closest).missing_bytes.sum())
    if missing <= 0:
        return f"method {options.method} finds no plan that fits its order of nodes; method fusion may leave nodes out"
    offered = format_bytes(float(network.memory_bytes.sum()))
    return (
        f"memory: {format_bytes(missing)} more are needed even on the best {len(closest.nodes)} node(s); there are "
        f"{len(network.flops)} with {offered} in all; add a node, raise --max-memory, or take more micro_batches"
    )


def _closest(problem: Problem) -> Arrangement | None:
    """Return an arrangement that fits once every node has so much more memory that just one fits."""
    pool = promising(problem, _DIAGNOSIS_NODES)
    may = problem.job.recompute != "never"

    def fitting(more_bytes: float) -> Arrangement | None:
        network = problem.network.subset(pool)
        richer = replace(network, memory_bytes=network.memory_bytes + more_bytes)
        chain = Chain(Problem(problem.profile, richer, problem.job), PLAIN_LADDER, 0.0, recompute=may)
        return next(iter(layered_plans(chain, lambda: False)), None)

    low, high = 0.0, float(problem.profile.memory_bytes(problem.micro_batches).max())
    best = fitting(high)
    for _ in range(_HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        found = fitting(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    if best is None:
        return None
    return Arrangement(tuple(int(pool[node]) for node in best.nodes), best.places)
