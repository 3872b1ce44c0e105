"""Memory, disks and devices that give out, and bytes that are not what they were."""

from __future__ import annotations

import pytest

from tests.faults.test_coordinator_faults import goes_on_undisturbed
from tests.support.faultcluster import FaultCluster, make_job, paced

pytestmark = pytest.mark.faults


def test_f20_a_full_disk_spoils_checkpoints_and_copies_and_training_goes_on(cluster: FaultCluster) -> None:
    points = [f"disk.write@what={what},stage=1:enospc*6" for what in ("state", "replica")]
    cluster.set_failpoints(paced(0.02, *points))
    job = make_job(20, checkpoint=5)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        said = [line.text for line in run.logs() if line.level in ("warning", "error")]
    goes_on_undisturbed(history)
    assert any("No space left on device" in line for line in said), said


def test_f27_a_node_that_runs_out_of_memory_is_never_given_as_much_again(cluster: FaultCluster) -> None:
    cluster.set_failpoints(paced(0.1, "stage.forward@stage=1,step=5:oom"))
    job = make_job(12, stages=3)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        name = next(line["name"] for line in history.of("worker", "failpoint") if line["action"] == "oom")
        (reason,) = cluster.check_failures(run, history, name)
        plans = {stage.node_name: stage.memory_bytes for stage in run.status().plan.stages}
    assert "out of memory" in reason
    (broke,) = [line for line in history.plans if line["kind"] == "JobBroke"]
    assert plans.get(name, 0) <= broke["limit_bytes"]
    assert history.lost_steps() <= 1


def test_f28_a_device_that_fails_once_is_used_again_and_one_that_fails_twice_is_not(cluster: FaultCluster) -> None:
    cluster.set_failpoints(
        paced(0.1, "stage.forward@stage=1,step=4:device-error", "stage.forward@stage=1,step=6:device-error")
    )
    job = make_job(12, stages=3)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        failed = [line["name"] for line in history.of("worker", "failpoint") if line["action"] == "device-error"]
        cluster.check_failures(run, history, *failed)
    assert history.lost_steps() <= 2
    last = max(history.epochs())
    if failed[0] == failed[1]:
        assert failed[0] not in {line["name"] for line in history.steps if line["epoch"] == last}


def test_f38_a_copy_of_a_state_that_is_damaged_on_its_way_is_never_used(cluster: FaultCluster) -> None:
    cluster.set_failpoints(
        paced(0.1, "replica.send@stage=1,step=6:corrupt", "stage.forward@stage=1,step=7,micro_batch=3:kill9-node")
    )
    job = make_job(12)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
    assert history.lost_steps() <= 2
    assert len(history.epochs()) == 2


def test_f38_a_value_that_is_damaged_beyond_tls_is_noticed_and_the_step_done_again(cluster: FaultCluster) -> None:
    cluster.set_failpoints(paced(0.1, "wire.arrived@step=6,kind=ACTIVATION:corrupt"))
    job = make_job(12)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job)
        said = [line.text for line in run.logs()]
    assert any("checksum mismatch" in line for line in said), said
    assert history.lost_steps() <= 1
