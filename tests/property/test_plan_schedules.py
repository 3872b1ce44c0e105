"""The schedules of any plan that planners make run to their end, whatever memory and links allow."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fusion.plan.cost import Arrangement, Problem
from fusion.plan.finals import simulated_s
from fusion.plan.network import network_of
from fusion.plan.plan_simulation import schedules_of
from fusion.plan.plans import plan_of
from fusion.plan.profile import profile_of
from fusion.plan.schedule import check_schedule, most_in_flight
from fusion.plan.types import JobView
from tests.property.test_planner_cost import OPERATORS, cluster, workload


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_arrangement_makes_a_schedule_that_stands_still(schedule: str) -> None:
    held_back = more_than_1f1b = 0
    for seed in range(150):
        rng = random.Random(seed)
        load, machines = workload(rng, skips=seed % 3 == 0), cluster(rng, rng.randint(1, 8), uplinks=seed % 5 == 0)
        load = replace(load, operators=[replace(op, saved_bytes=10**6) for op in load.operators])
        if seed % 2:  # room for the weights and for few micro-batches
            room = [rng.randint(4, 40) * 10**6 for _ in machines.nodes]
            machines = replace(
                machines,
                nodes=tuple(replace(node, memory_bytes=size) for node, size in zip(machines.nodes, room, strict=True)),
            )
        count, micro_batches = len(machines.nodes), rng.choice([1, 4, 8, 16, 32])
        problem = Problem(profile_of(load, 8), network_of(machines), JobView(micro_batches, schedule, 8))
        order = rng.sample(range(count), count)
        bounds = (0, *sorted(rng.sample(range(1, OPERATORS), count - 1)), OPERATORS)
        found = Arrangement(tuple(order), bounds)
        evaluation = problem.evaluate(found)
        plan = plan_of(problem, found, evaluation)
        schedules = schedules_of(plan)
        check_schedule(schedules, micro_batches)
        assert tuple(map(most_in_flight, schedules)) == evaluation.in_flight
        if evaluation.fits:
            assert simulated_s(problem, found) < float("inf")
        held_back += evaluation.waits
        more_than_1f1b += evaluation.in_flight[0] > count
    if schedule == "1f1b":
        assert held_back > 5
        assert more_than_1f1b > 5
