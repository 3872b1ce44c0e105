"""The planner against baselines, a lower bound and the exact optimum, on generated clusters.

    python -m benchmarks.planner --json

Seconds per step are predicted by one cost model for all methods; `benchmarks.prediction` measures that model against
real runs. "ours" is the planner with codecs of at most 7.5x, as few and mild as stay within 5 % of its best time. The
baselines' top-k runs at the speed measured for the paper's exact top-k on one thread; keys that end in
`_fast_topk` give the baseline the faster top-k of this package, `_free_codec` one that takes no time. Links encode and
decode beside the stages (see `fusion.plan.cost`). Ratios are geometric means over models and seeds.
Planning seconds are processor seconds of this one thread, so that other programs do not count; the worst case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.planner_bound import lower_bound_s
from benchmarks.planner_cases import MILD, WILD, ClusterKind, gpt2_xl, llama_7b, make_cluster, small_chain, t5_3b
from fusion.plan.codecs import PlanCodec, parse_compression
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.methods import Settings, arrange
from fusion.plan.network import network_of
from fusion.plan.profile import Profile, profile_of
from fusion.plan.types import JobView

JOB = JobView(micro_batches=8, schedule="1f1b", optimizer_bytes_per_parameter=8)
MODELS = {"gpt2-xl": gpt2_xl, "llama-7b": llama_7b, "t5-3b": t5_3b}
OURS = ("fusion", "auto:7.5")
EXACT_TOPK_BYTES_PER_S = 257e6, 25e9  #: to encode with exact `torch.topk`, and to decode
COLUMNS = (
    ("equal-number", "none"),
    ("equal-number", "topk:100"),
    ("equal-compute", "none"),
    ("op-fence", "none"),
    ("op-fence", "adatopk:100"),
    ("fusion", "none"),
    OURS,
)
SEEDS = {8: 4, 24: 4, 48: 6, 200: 2, 1000: 1}
BOUND_UP_TO = 48
SMALL_OPERATORS, SMALL_NODES, SMALL_SEEDS = 24, (6, 8, 10), 4


@dataclass(frozen=True)
class Row:
    """One model on one cluster."""

    model: str
    kind: str
    nodes: int
    seed: int
    step_s: dict[str, float]  #: by "method compression"; inf where the method finds no plan that fits
    fast_s: dict[str, float]  #: of the baselines with top-k as this package finds it, instead of exactly
    free_s: dict[str, float]  #: of the baselines with top-k whose codec takes no time
    bound_s: float  #: dense; 0 where it was not computed
    plan_s: float  #: of ours


def measure(model: str, profile: Profile, kind: ClusterKind, nodes: int, seed: int) -> Row:
    """Plan by all methods."""
    problem = Problem(profile, network_of(make_cluster(kind, nodes, seed)), JOB)
    step_s: dict[str, float] = {}
    fast_s: dict[str, float] = {}
    free_s: dict[str, float] = {}
    plan_s = 0.0
    for method, compression in COLUMNS:
        begin = time.process_time()
        found = arrange(problem, Settings(method, parse_compression(compression)[0].compression, seed), lambda: False)
        if (method, compression) == OURS:
            plan_s = time.process_time() - begin
        name = f"{method} {compression}"
        step_s[name] = inf if found is None else problem.step_s(found)
        if "topk" in compression:
            fast_s[name] = step_s[name]
            step_s[name] = inf if found is None else problem.step_s(_at_speeds(found, *EXACT_TOPK_BYTES_PER_S))
            free_s[name] = inf if found is None else problem.step_s(_at_speeds(found, inf, inf))
    bound_s = lower_bound_s(problem) if nodes <= BOUND_UP_TO else 0.0
    return Row(model, kind.name, nodes, seed, step_s, fast_s, free_s, bound_s, plan_s)


def _at_speeds(found: Arrangement, encode_bytes_per_s: float, decode_bytes_per_s: float) -> Arrangement:
    """Return an arrangement whose codecs, where they do anything, take so long."""
    ladder = tuple(
        PlanCodec(codec.name, codec.ratio, encode_bytes_per_s, decode_bytes_per_s) if codec.ratio > 1 else codec
        for codec in found.ladder
    )
    return Arrangement(found.nodes, found.places, ladder, found.choice)


def gaps_to_exact() -> list[float]:
    """Return our time over the optimum, dense, for small chains on small clusters."""
    gaps = []
    for kind in (WILD, MILD):
        for nodes in SMALL_NODES:
            for seed in range(SMALL_SEEDS):
                profile = profile_of(small_chain(SMALL_OPERATORS, seed), JOB.optimizer_bytes_per_parameter)
                problem = Problem(profile, network_of(make_cluster(kind, nodes, seed)), JOB)
                best, ours = (
                    arrange(problem, Settings(method, seed=seed), lambda: False) for method in ("exact", "fusion")
                )
                assert best is not None
                assert ours is not None
                gaps.append(problem.step_s(ours) / problem.step_s(best))
    return gaps


def tied_step_s() -> float:
    """Return our step time for GPT-2 XL with its embedding tied to the head, on the first mild cluster of 48 nodes."""
    profile = profile_of(gpt2_xl(tied=True), JOB.optimizer_bytes_per_parameter)
    problem = Problem(profile, network_of(make_cluster(MILD, 48, 0)), JOB)
    found = arrange(problem, Settings(OURS[0], parse_compression(OURS[1])[0].compression), lambda: False)
    assert found is not None
    return problem.step_s(found)


def summarise(rows: Sequence[Row], gaps: Sequence[float], tied_s: float) -> dict[str, float]:
    """Return the figures that the targets are about, and those that put them into proportion."""

    def of(nodes: int, kind: str = "") -> list[Row]:
        return [row for row in rows if row.nodes == nodes and kind in ("", row.kind)]

    def versus(baseline: str, chosen: Sequence[Row], speeds: str = "step_s") -> float:
        return _mean_ratio(lambda row: getattr(row, speeds)[baseline], chosen)

    fence, number = "op-fence adatopk:100", "equal-number topk:100"
    figures = {}
    for kind in ("wild", "mild"):
        chosen = of(48, kind)
        figures[f"vs_op_fence_adatopk_{kind}48"] = versus(fence, chosen)
        figures[f"vs_op_fence_adatopk_{kind}48_fast_topk"] = versus(fence, chosen, "fast_s")
        figures[f"vs_op_fence_adatopk_{kind}48_free_codec"] = versus(fence, chosen, "free_s")
        figures[f"vs_equal_number_topk_{kind}48"] = versus(number, chosen)
        figures[f"vs_equal_number_topk_{kind}48_fast_topk"] = versus(number, chosen, "fast_s")
        figures[f"vs_equal_number_topk_{kind}48_free_codec"] = versus(number, chosen, "free_s")
        figures[f"vs_op_fence_dense_{kind}48"] = versus("op-fence none", chosen)
        figures[f"over_dense_bound_{kind}48"] = _mean(row.step_s[_name(OURS)] / row.bound_s for row in chosen)
    figures["over_dense_bound_48_max"] = max(row.step_s[_name(OURS)] / row.bound_s for row in of(48))
    figures["dense_over_dense_bound_48_max"] = max(row.step_s["fusion none"] / row.bound_s for row in of(48))
    figures["gap_to_exact_max"], figures["gap_to_exact_mean"] = max(gaps), statistics.fmean(gaps)
    for nodes in SEEDS:
        figures[f"plan_seconds_{nodes}"] = max(row.plan_s for row in of(nodes))
    figures["gpt2_xl_tied_step_s_mild48"] = tied_s
    return figures


def _name(column: tuple[str, str]) -> str:
    return " ".join(column)


def _mean(values: object) -> float:
    return statistics.geometric_mean(values)  # type: ignore[arg-type]


def _mean_ratio(of: Callable[[Row], float], rows: Sequence[Row]) -> float:
    ratios = [of(row) / row.step_s[_name(OURS)] for row in rows]
    return _mean([ratio for ratio in ratios if ratio < inf])


def show(rows: Sequence[Row], figures: dict[str, float]) -> None:
    """Print tables for people: means over seeds, and how many plans did not fit."""
    for model in MODELS:
        for kind in ("wild", "mild"):
            print(f"\n{model}, {kind}: seconds per step (mean over the seeds that fit), ratio to the dense bound")
            print(f"{'nodes':>28}" + "".join(f"{nodes:>16}" for nodes in SEEDS))
            for column in COLUMNS:
                cells = [
                    _cell([row for row in rows if (row.model, row.kind, row.nodes) == (model, kind, nodes)], column)
                    for nodes in SEEDS
                ]
                print(f"{_name(column):>28}" + "".join(f"{cell:>16}" for cell in cells))
    print()
    for name, figure in figures.items():
        print(f"{name:44} {figure:8.3f}")


def _cell(rows: Sequence[Row], column: tuple[str, str]) -> str:
    fitting = [row for row in rows if row.step_s[_name(column)] < inf]
    if not fitting:
        return "no plan fits"
    mean = _mean([row.step_s[_name(column)] for row in fitting])
    bound = [row.step_s[_name(column)] / row.bound_s for row in fitting if row.bound_s]
    return f"{mean:.3g}" + (f" ({_mean(bound):.2f}x)" if bound else "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for model, build in MODELS.items():
        profile = profile_of(build(), JOB.optimizer_bytes_per_parameter)
        for kind in (WILD, MILD):
            for nodes, seeds in SEEDS.items():
                rows += [measure(model, profile, kind, nodes, seed) for seed in range(seeds)]
                print(f"{model} {kind.name} {nodes} done", file=sys.stderr)
    figures = summarise(rows, gaps_to_exact(), tied_step_s())
    if options.json:
        print(json.dumps({name: round(figure, 4) for name, figure in figures.items()}))
    else:
        show(rows, figures)


if __name__ == "__main__":
    main()
