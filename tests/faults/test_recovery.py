"""Processes are killed in the middle of a step, between two, and while they write: at most a step is done again."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import fusion
from tests.faults.test_coordinator_faults import whole_checkpoints
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, History, make_job, paced

pytestmark = pytest.mark.faults

STEP = 7  #: at which it happens
STEPS = 12


def recovers(cluster: FaultCluster, *points: str, stages: int = 4, lost: int = 1, **settings: Any) -> History:
    """Run a job that fails at these points; it ends as if nothing had happened, and says once what did."""
    cluster.set_failpoints(paced(0.1, *points))
    job = make_job(STEPS, stages, **settings)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        cluster.check_failures(run, history, *killed(history))
    assert len(killed(history)) == 1
    assert len(history.epochs()) == 2
    assert history.lost_steps() <= lost
    return history


def killed(history: History) -> list[str]:
    """Return the names of the nodes on which a worker of the job was killed, in order."""
    fired = (line for line in history.of("worker", "failpoint") if line["job"] == history.job)
    return [line["name"] for line in fired if line["action"].startswith("kill9")]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_f1_a_node_killed_in_forward(cluster: FaultCluster, stage: int) -> None:
    recovers(cluster, f"stage.forward@stage={stage},step={STEP},micro_batch=2:kill9-node")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_f2_a_worker_killed_in_backward(cluster: FaultCluster, stage: int) -> None:
    recovers(cluster, f"stage.backward@stage={stage},step={STEP},micro_batch=1:kill9")


def test_f2_a_node_killed_in_backward_with_a_spare_that_takes_over(cluster: FaultCluster) -> None:
    history = recovers(cluster, f"stage.backward@stage=1,step={STEP},micro_batch=1:kill9-node", stages=3)
    started = [line for line in history.of("worker", "started") if (line["job"], line["epoch"]) == (history.job, 2)]
    assert len({line["stage"] for line in started}) == 3


@pytest.mark.parametrize(
    "place", ["stage=0,step=7:after_update", "stage=1,step=7:before_update", "stage=3,step=7:before_update"]
)
def test_f3_a_node_killed_while_some_stages_have_applied_a_step_and_others_not(
    cluster: FaultCluster, place: str
) -> None:
    where, _, point = place.partition(":")
    recovers(cluster, f"stage.{point}@{where}:kill9-node")


@pytest.mark.parametrize("point", ["disk.write", "keep.before_rename", "keep.after_rename"])
def test_f4_a_node_killed_while_it_writes_its_state(cluster: FaultCluster, point: str) -> None:
    recovers(cluster, f"{point}@stage=1,step={STEP}:kill9-node", lost=3, checkpoint=STEP)  # which is surely kept


def test_f4_a_node_killed_while_it_uploads_its_part_of_a_checkpoint(cluster: FaultCluster) -> None:
    """The other parts of it are there: that is no checkpoint. The next one is."""
    cluster.set_failpoints(paced(0.1, "checkpoint.upload@stage=1,step=5:kill9-node"))
    job = make_job(STEPS, checkpoint=5)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        cluster.check_failures(run, history, *killed(history))
        assert len(killed(history)) == 1
        whole_checkpoints(cluster, run, 10)
    assert history.lost_steps() <= 2


def test_f5_two_stages_that_keep_each_others_copies_die_together(cluster: FaultCluster) -> None:
    """Nobody has their state: back to the last checkpoint, which the log says."""
    cluster.set_failpoints(paced(0.05))
    job = make_job(20, checkpoint=5)
    with cluster.running(job, step=8) as run:
        eventually(lambda: _checkpoints(cluster, run), "a checkpoint was committed")
        replicas = [stage.replica_stage for stage in run.status().plan.stages]
        names = [run.status().stages[stage].node_name for stage in (0, replicas[0])]  # stage 0 and who keeps its copy
        for name in names:
            os.kill(cluster.process(name).pid, signal.SIGKILL)
        history = cluster.finishes(run, job)
        said = [line.text for line in run.logs() if line.origin == "coordinator"]
    assert any(line.startswith("goes on from the checkpoint of step ") for line in said), said
    assert history.lost_steps() <= 10


def test_f6_all_nodes_die_and_come_back_and_go_on_from_the_checkpoint(cluster: FaultCluster) -> None:
    cluster.set_failpoints(paced(0.05))
    job = make_job(20, checkpoint=5)
    with cluster.running(job, step=8) as run:
        eventually(lambda: _checkpoints(cluster, run), "a checkpoint was committed")
        for name in cluster.nodes:
            cluster.kill(name)
        time.sleep(1.0)
        for name in cluster.nodes:
            cluster.helpers.again(name)
        history = cluster.finishes(run, job)
    assert history.lost_steps() <= 10


def _checkpoints(cluster: FaultCluster, run: fusion.Run) -> list[int]:
    committed = [line for line in cluster.events(run.job_id).plans if line["kind"] == "CheckpointCommitted"]
    return [line["checkpoint"]["step"] for line in committed]


def test_two_nodes_die_one_after_the_other(cluster: FaultCluster) -> None:
    cluster.set_failpoints(
        paced(0.1, "stage.forward@stage=3,step=4:kill9-node", "stage.backward@stage=1,step=9:kill9-node")
    )
    job = make_job(STEPS)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        cluster.check_failures(run, history, *killed(history))
    assert len(history.epochs()) == 3
    assert history.lost_steps() <= 2


def test_f35_with_too_few_nodes_the_job_pauses_says_what_is_missing_and_goes_on_when_one_joins(
    cluster: FaultCluster,
) -> None:
    """No node is left at all; the states of the last step are still where they were."""
    cluster.set_failpoints(paced(0.05))
    job = make_job(STEPS, stages=2)
    with cluster.running(job, step=3) as run:
        names = list(cluster.nodes)
        for name in names:
            cluster.kill(name)
        eventually(lambda: run.status().state is fusion.JobState.PAUSED, f"the job pauses ({run.status()})", 60.0)
        assert "no node is here" in run.status().reason
        for name in names[:2]:
            cluster.helpers.again(name)
        history = cluster.finishes(run, job)
    assert history.lost_steps() <= STEPS
