"""The simulator's last word on plans: their step time, and changes that only it can see the use of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.planner import Options, plan_workload
from fusion.plan.types import Cluster, JobView, Link, LinkTable, Plan
from tests.support.planner import GIGA, SGD, chain_load, cluster, node

LOAD = chain_load(12, value_bytes=100_000)
JOB = replace(SGD, micro_batches=8)


def uneven() -> Cluster:
    """Links on which the formula takes another order for the best than the simulator."""
    machines = [node("a", GIGA), node("b", 0.8 * GIGA), node("c", 1.2 * GIGA), node("d", GIGA)]
    pairs = {}
    for one, other, rate, back, delay_s in (("a", "b", 1e4, 1e4, 3.0), ("a", "c", 3e4, 1.5e4, 1.0)):
        pairs[machines["abcd".index(one)].node, machines["abcd".index(other)].node] = Link(rate, delay_s)
        pairs[machines["abcd".index(other)].node, machines["abcd".index(one)].node] = Link(back, delay_s)
    return cluster(machines, LinkTable(pairs, default=Link(1.5e4, 2.0)))


def planned(machines: Cluster, method: str = "fusion", job: JobView = JOB) -> Plan:
    return plan_workload(machines, LOAD, job, Options(method)).plan


@pytest.mark.parametrize("method", ["fusion", "op-fence", "equal-number"])
def test_a_plans_step_time_is_that_of_the_simulator(method: str) -> None:
    machines = uneven()
    plan = planned(machines, method)
    steps = simulate_plan(plan, LOAD, machines, steps=4, optimizer_bytes_per_parameter=0).steps
    assert plan.step_s == pytest.approx(steps[1].end_s - steps[0].end_s)
    assert plan.step_s == pytest.approx((steps[3].end_s - steps[0].end_s) / 3, rel=0.02)


def test_no_baseline_is_faster_by_simulation_where_the_formula_says_otherwise() -> None:
    machines = uneven()
    ours = planned(machines)
    for method in ("op-fence", "equal-compute", "equal-number"):
        assert ours.step_s <= planned(machines, method).step_s * 1.001
    by_formula = plan_workload(machines, LOAD, JOB, Options("op-fence"))
    assert by_formula.plan.step_s < 0.97 * by_formula.evaluation.step_s  # what the formula does not know


def test_small_changes_keep_what_a_job_asks_for() -> None:
    machines = uneven()
    assert len(planned(machines, job=replace(JOB, max_stages=2)).stages) <= 2
    cut = planned(machines, job=replace(JOB, cuts=(3, 7)))
    assert [stage.end_operator for stage in cut.stages] == [3, 7, 12]
    coded = planned(machines, job=replace(JOB, compression="topk:10"))
    assert {link.ratio for link in coded.links} <= {plan.ratio for plan in coded.links if plan.codec.startswith("topk")}
    for plan in (cut, coded):
        assert len({stage.node for stage in plan.stages}) == len(plan.stages)
        assert plan.stages[-1].end_operator == 12
