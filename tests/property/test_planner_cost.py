"""The planner's formula, T = fill + (n - 1) x bottleneck, against the simulator, on random chains and clusters."""

from __future__ import annotations

import random

import pytest

from fusion.base.ids import Epoch, Incarnation, NodeId
from fusion.plan.cost import Arrangement, Problem
from fusion.plan.network import network_of
from fusion.plan.plan_simulation import simulate_plan
from fusion.plan.profile import profile_of
from fusion.plan.types import Cluster, ClusterNode, JobView, Link, LinkTable, Plan, PlannedStage, Uplink
from fusion.plan.workload import HeldLoad, OperatorLoad, ValueLoad, Workload

OPERATORS = 24


def workload(rng: random.Random, skips: bool) -> Workload:
    """A chain of matrix products, some of whose values may also be read much later."""
    loads = [OperatorLoad("linear", flops, 2 * flops) for flops in (rng.uniform(1e9, 5e9) for _ in range(OPERATORS))]
    values = [ValueLoad(index, (index + 1,), 400_000, 400_000) for index in range(OPERATORS - 1)]
    if skips:
        values += [ValueLoad(at, (min(OPERATORS - 1, at + rng.randint(6, 15)),), 100_000, 100_000) for at in (0, 4)]
    held = [HeldLoad((index,), 4000, 1000, trainable=True) for index in range(OPERATORS)]
    return Workload(loads, values, held, list(range(1, OPERATORS)))


def cluster(rng: random.Random, count: int, uplinks: bool) -> Cluster:
    """Nodes of up to tenfold speeds, every pair with a link of its own from 8 Mbit/s to 1 Gbit/s."""
    sites = [f"site-{rng.randint(0, 2)}" for _ in range(count)]
    nodes = tuple(
        ClusterNode(NodeId(f"n{at}"), f"n{at}", "a:1", Incarnation(1), 10**12, rng.uniform(2e10, 2e11), sites[at])
        for at in range(count)
    )
    pairs = {
        (here.node, there.node): Link(rng.choice([1e6, 4e6, 12.5e6, 125e6]), rng.choice([0.001, 0.02, 0.07]))
        for here in nodes
        for there in nodes
        if here is not there
    }
    return Cluster(nodes, LinkTable(pairs, uplinks=dict.fromkeys(sites, Uplink(1e7, 1e7)) if uplinks else {}))


def ratio(seed: int, schedule: str, skips: bool, uplinks: bool) -> float:
    """Return the planner's step time over the simulated one for a random arrangement."""
    rng = random.Random(seed)
    count, micro_batches = rng.randint(2, 8), rng.choice([4, 8, 16])
    load, machines = workload(rng, skips), cluster(rng, count, uplinks)
    job = JobView(micro_batches, schedule, 8)
    bounds = (0, *sorted(rng.sample(range(1, OPERATORS), count - 1)), OPERATORS)
    found = Problem(profile_of(load, 8), network_of(machines), job).evaluate(Arrangement(tuple(range(count)), bounds))
    stages = tuple(
        PlannedStage(
            node=node.node,
            node_name=node.name,
            address=node.address,
            incarnation=node.incarnation,
            first_operator=bounds[at],
            end_operator=bounds[at + 1],
            parameters=0,
            memory_bytes=0,
            forward_s=float(found.forward_s[at]),
            backward_s=float(found.backward_s[at]),
            in_flight=found.in_flight[at],
        )
        for at, node in enumerate(machines.nodes)
    )
    plan = Plan(Epoch(1), stages, (), schedule, micro_batches)
    return found.step_s / simulate_plan(plan, load, machines, steps=3, record=False).step_s


@pytest.mark.parametrize(("skips", "uplinks"), [(False, False), (True, False), (False, True)])
def test_with_gpipe_the_formula_is_the_simulated_time(skips: bool, uplinks: bool) -> None:
    for seed in range(60):
        assert ratio(seed, "gpipe", skips, uplinks) == pytest.approx(1, abs=0.01), f"seed {seed}"


@pytest.mark.parametrize("skips", [False, True])
def test_with_1f1b_the_formula_is_near_the_simulated_time_and_rarely_below(skips: bool) -> None:
    found = sorted(ratio(seed, "1f1b", skips, False) for seed in range(100))
    assert found[0] > 0.92
    assert found[10] > 0.99
    assert found[50] < 1.05
    assert found[-1] < 1.25
