"""Running forwards again: what it costs and saves, and that planners choose it where memory is short, not time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.base.errors import PlanError
from fusion.plan.cost import Arrangement, Evaluation, Problem
from fusion.plan.inforce import in_force
from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.planner import Options, plan_workload
from fusion.plan.types import Cluster, Link, LinkTable
from fusion.plan.workload import Workload
from tests.support.planner import SGD, chain_load, cluster, node, problem

MB = 1_000_000
JOB = replace(SGD, micro_batches=16)


def load() -> Workload:
    """Four operators of 1 s forward and 2 s backward; each keeps 9 MB for its backward and sends 1 MB."""
    return chain_load(4, saved_bytes=9 * MB, weight_elements=250_000)


def need(flights: int, *, recompute: bool = False) -> float:
    """Memory of a first stage of two operators: two weights with their gradients, and 19 MB for a micro-batch."""
    return 1.05 * (4 * MB + (19 * MB if recompute else flights * 19 * MB))


def halves(memory: float, **changes: object) -> Problem:
    """Two nodes, 1 MB a second and 6 s apart; the first has so much memory."""
    machines = cluster([node("a", memory=int(memory)), node("b")], LinkTable(default=Link(1e6, 6.0)))
    return problem(load(), machines, JOB, **changes)


def evaluate(made: Problem, recompute: tuple[bool, ...] | None = None) -> Evaluation:
    return made.evaluate(Arrangement((0, 1), (0, 2, 4), recompute=recompute))


def test_a_stage_that_recomputes_takes_its_forward_more_and_holds_one_micro_batchs_results() -> None:
    found = evaluate(halves(1e12), (True, False))
    assert found.forward_s == pytest.approx([2, 2])
    assert found.backward_s == pytest.approx([2 + 4, 4])
    assert found.busiest_s == pytest.approx(8)
    assert found.memory_bytes[0] == pytest.approx(need(found.in_flight[0], recompute=True), rel=1e-3)


def test_a_later_stage_that_recomputes_holds_what_came_in_of_each_micro_batch() -> None:
    found = problem(load(), cluster([node(name) for name in "abc"]), JOB).evaluate(
        Arrangement((0, 1, 2), (0, 1, 3, 4), recompute=(False, True, False))
    )
    assert found.in_flight[1] > 1
    # two weights, 18 MB kept and 1 MB sent of the one whose backward runs, and 1 MB that came in of each
    assert found.memory_bytes[1] == pytest.approx(1.05 * (4 * MB + 19 * MB + found.in_flight[1] * MB), rel=1e-3)


def test_enough_memory_is_used_instead_of_time() -> None:
    found = evaluate(halves(1e12))
    assert found.recompute == (False, False)
    assert found.in_flight == (5, 1)  # 6 + 1 + 6 + 6 + 1 + 6 s there and back, in which the first could run four more
    assert evaluate(halves(need(5) * 1.01)).recompute == (False, False)


def test_forwards_are_run_again_where_fewer_micro_batches_in_flight_would_take_longer() -> None:
    tight = halves(need(2) * 1.01)
    waiting, chosen = evaluate(tight, (False, False)), evaluate(tight)
    assert waiting.in_flight == (2, 1)
    assert waiting.waits
    assert chosen.recompute == (True, False)
    assert chosen.in_flight == (4, 1)  # the same 26 s and 8 s a micro-batch
    assert chosen.step_s < waiting.step_s
    assert evaluate(halves(need(2) * 1.01, recompute="never")).recompute == (False, False)


def test_a_little_less_in_flight_is_better_than_a_forward_more() -> None:
    found = evaluate(
        halves(need(4) * 1.01)
    )  # 26 s of a micro-batch in 4 turns: 6.5 s, less than the 8 s of recomputing
    assert found.recompute == (False, False)
    assert found.in_flight == (4, 1)


def test_always_means_wherever_several_micro_batches_are_held() -> None:
    assert evaluate(halves(1e12, recompute="always")).recompute == (True, False)
    assert evaluate(halves(1e12, recompute="always", schedule="gpipe")).recompute == (True, True)
    assert evaluate(halves(1e12, recompute="always", micro_batches=1)).recompute == (False, False)


def small_cluster(memory: float) -> Cluster:
    nodes = [node(name, memory=int(memory)) for name in "ab"]
    return cluster(nodes, LinkTable(default=Link(1e9, 6.0)))


@pytest.mark.parametrize("method", ["fusion", "exact"])
def test_a_job_that_did_not_fit_fits_when_forwards_are_run_again(method: str) -> None:
    job, machines = replace(JOB, schedule="gpipe"), small_cluster(1.05 * (8 * MB + 16 * 2 * MB + 38 * MB))
    with pytest.raises(PlanError, match="memory"):
        plan_workload(machines, load(), replace(job, recompute="never"), Options(method))
    plan = plan_workload(machines, load(), job, Options(method)).plan
    assert any(stage.recompute for stage in plan.stages)
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in plan.stages)


def test_the_planner_recomputes_under_a_tight_memory_limit_and_says_what_it_costs() -> None:
    machines = small_cluster(need(2) * 1.01)
    roomy = plan_workload(small_cluster(1e12), load(), JOB).plan
    tight = plan_workload(machines, load(), JOB).plan
    waiting = plan_workload(machines, load(), replace(JOB, recompute="never")).plan
    assert not any(stage.recompute for stage in roomy.stages)
    assert [stage.recompute for stage in tight.stages] == [True, False]
    assert roomy.step_s < tight.step_s < waiting.step_s
    assert tight.stages[0].backward_s == pytest.approx(3 * tight.stages[0].forward_s)  # twice, and the forward again


def test_simulator_and_replanning_count_the_second_forward() -> None:
    machines = small_cluster(need(2) * 1.01)
    plan = plan_workload(machines, load(), JOB).plan
    simulated = simulate_plan(plan, load(), machines, steps=2, optimizer_bytes_per_parameter=0)
    first = [span for span in simulated.spans if span.stage == 0 and span.step == 1]
    assert sum(span.end_s - span.start_s for span in first if span.kind == "forward") == pytest.approx(16 * 2)
    assert sum(span.end_s - span.start_s for span in first if span.kind == "backward") == pytest.approx(16 * 6)
    seen = in_force(plan, machines, load(), JOB)
    assert seen.compute_s == pytest.approx((16 * 8, 16 * 6))
    kept = replace(plan, stages=tuple(replace(stage, recompute=False, in_flight=2) for stage in plan.stages))
    assert in_force(kept, machines, load(), JOB).compute_s == pytest.approx((16 * 6, 16 * 6))
