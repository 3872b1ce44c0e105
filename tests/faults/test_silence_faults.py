"""Nodes that are cut off, frozen, or whose worker hangs: one stage never has two workers, and the job goes on."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal

import pytest

import fusion
from tests.support.chaos import COORDINATOR
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, History, make_job, paced

pytestmark = pytest.mark.faults


def in_epoch(cluster: FaultCluster, run: fusion.Run, epoch: int) -> bool:
    """Whether an epoch does steps."""
    return epoch in cluster.events(run.job_id).epochs()


@pytest.mark.parametrize("stopped_s", [30.0, 40.0], ids=["f15b", "f16"])
def test_f15b_f16_a_node_that_was_frozen_too_long_is_replaced_and_knows_it_when_it_goes_on(
    cluster: FaultCluster, stopped_s: float
) -> None:
    cluster.set_failpoints(paced(0.1))
    before = {name: len(cluster.log(name)) for name in cluster.nodes}
    job = make_job(60, stages=3)
    with cluster.running(job, step=3) as run:
        name = run.status().stages[1].node_name
        stopped = cluster.stop_process(name)
        time.sleep(stopped_s)
        cluster.continue_process(stopped)
        history = cluster.finishes(run, job, 180.0)
    assert history.lost_steps() <= 1
    eventually(lambda: cluster.node_states()[name] == "idle", "it is back")
    said = cluster.log(name)[before[name] :]
    replaced = len(history.epochs()) > 1
    assert replaced or stopped_s < 40
    assert not replaced or "registration lost" in said


@pytest.mark.parametrize(
    "point",
    [
        "stage.forward@stage=1,step=6:stop",
        "stage.forward@stage=1,step=6:hold-gil=3600",
        "stage.forward@stage=1,step=6:hang",
    ],
    ids=["f17-stopped", "f18-gil", "f18-hangs"],
)
def test_f17_f18_a_worker_that_does_nothing_more_is_replaced_while_its_node_lives(
    cluster: FaultCluster, point: str
) -> None:
    cluster.set_failpoints(paced(0.1, point))
    before = {name: len(cluster.log(name)) for name in cluster.nodes}
    job = make_job(12)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job, 120.0)
        name = next(line["name"] for line in history.of("worker", "started") if line["stage"] == 1)
        cluster.check_failures(run, history, name)
    assert history.lost_steps() <= 1
    assert "registration lost" not in cluster.log(name)[before[name] :]


@pytest.mark.parametrize("how", ["both", "there"])
def test_f11_a_node_cut_off_from_the_coordinator_alone_ends_its_work_before_another_takes_it_up(
    far_cluster: FaultCluster, how: Literal["both", "there"]
) -> None:
    chaos = far_cluster.chaos
    assert chaos is not None
    far_cluster.set_failpoints(paced(0.2))
    job = make_job(60, stages=3)
    with far_cluster.running(job, step=3) as run:
        name = run.status().stages[1].node_name
        with chaos.cutting(name, COORDINATOR, how=how):
            eventually(lambda: in_epoch(far_cluster, run, 2), "another plan does steps", 80.0)
            names = {stage.node_name for stage in run.status().stages}
            assert name not in names
        history = far_cluster.finishes(run, job, 180.0)
    assert history.lost_steps() <= 1
    eventually(lambda: far_cluster.node_states()[name] == "idle", "it is back", 60.0)


def test_f12_a_node_that_was_cut_off_from_everybody_comes_back_as_a_spare(far_cluster: FaultCluster) -> None:
    chaos = far_cluster.chaos
    assert chaos is not None
    far_cluster.set_failpoints(paced(0.1))
    job = make_job(60, stages=3)
    with far_cluster.running(job, step=3) as run:
        name = run.status().stages[2].node_name
        before = _incarnation(far_cluster.events(run.job_id), name)
        chaos.isolate(name)
        eventually(lambda: in_epoch(far_cluster, run, 2), "another plan does steps", 80.0)
        chaos.heal()
        eventually(lambda: far_cluster.node_states()[name] == "idle", "it is back as a spare", 60.0)
        history = far_cluster.finishes(run, job, 180.0)
    assert history.lost_steps() <= 1
    assert _incarnation(history, name) > before


def _incarnation(history: History, name: str) -> int:
    return max(line["incarnation"] for line in history.of("daemon", "registered") if line["name"] == name)


def test_f10_two_nodes_that_cannot_reach_each_other_are_no_neighbours_any_more(far_cluster: FaultCluster) -> None:
    chaos = far_cluster.chaos
    assert chaos is not None
    far_cluster.set_failpoints(paced(0.1))
    job = make_job(40, stages=3, planner="fusion")  # the others do not look at links
    with far_cluster.running(job, step=3) as run:
        names = [stage.node_name for stage in run.status().stages]
        chaos.cut(names[0], names[1], "refuse")
        eventually(lambda: in_epoch(far_cluster, run, 2), "another plan does steps", 90.0)
        after = [stage.node_name for stage in run.status().stages]
        history = far_cluster.finishes(run, job, 180.0)
    assert not {(names[0], names[1]), (names[1], names[0])} & set(pairwise(after))
    assert history.lost_steps() <= 1
    assert history.nodes_gone() == []
