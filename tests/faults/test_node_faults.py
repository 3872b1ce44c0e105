"""Nodes that stop for a while, spoil a gradient, or exist twice: what needs no recovery."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import fusion
from fusion.cli.democluster import DemoNode, free_ports
from tests.faults.test_coordinator_faults import goes_on_undisturbed
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, make_job, paced

pytestmark = pytest.mark.faults


def test_f15_a_node_that_stands_still_for_ten_seconds_makes_one_slow_step(cluster: FaultCluster) -> None:
    cluster.set_failpoints(paced(0.05))
    job = make_job(30)
    with cluster.running(job, step=3) as run:
        name = run.status().stages[1].node_name
        stopped = cluster.stop_process(name)
        time.sleep(10.0)
        cluster.continue_process(stopped)
        history = cluster.finishes(run, job)
    goes_on_undisturbed(history)


def test_f19_one_gradient_that_is_no_number_makes_all_stages_skip_that_step(cluster: FaultCluster) -> None:
    point = "stage.backward@stage={},step=5,micro_batch=2:nan"
    cluster.set_failpoints(point.format(1))
    job = make_job(12)
    with cluster.submit(job) as run:
        history = cluster.finishes(run, job, points=point.format(0))
        assert [step.step for step in run.metrics() if step.skipped] == [5]
        said = [(line.level, line.origin) for line in run.logs() if "of step 5 are not finite" in line.text]
        names = [stage.node_name for stage in run.status().stages]
    goes_on_undisturbed(history)
    assert said == [("warning", names[1])]
    after = {line["step"]: line["digests"] for line in history.steps if line["stage"] == 1}
    assert after[5] == after[4]
    assert after[6] != after[5]
    assert {line["applied"] for line in history.steps if line["step"] == 5} == {False}


def test_f19_gradients_that_stay_no_numbers_end_the_job_as_diverged(cluster: FaultCluster) -> None:
    cluster.set_failpoints(";".join(f"stage.backward@stage=2,step={step}:nan" for step in range(5, 9)))
    with cluster.submit(make_job(12)) as run, pytest.raises(fusion.JobError, match=r"diverged: .* steps 5 to 7"):
        run.wait(timeout=90.0)


def test_f21_a_copied_identity_is_refused_until_the_first_has_lost_its_lease_which_then_is_fenced(
    tmp_path: Path,
) -> None:
    with FaultCluster(tmp_path, nodes=1) as cluster:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "node-0", copy, ignore=shutil.ignore_patterns("LOCK", "logs", "cache"))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        arguments = ["start", "--name", "node-0", "--home", str(copy), "--listen", address, "--advertise", address]
        arguments += DemoNode("node-0").options()

        second = cluster.helpers.start("copy", "fusion_node.cli", arguments, cluster.environment)
        eventually(lambda: "copied credentials" in cluster.log("copy"), "the copy is told what it is")
        assert cluster.node_states() == {"node-0": "idle"}
        assert "registration lost" not in cluster.log("node-0")

        first = cluster.stop_process("node-0")
        eventually(lambda: "registered, incarnation" in cluster.log("copy"), "the copy takes over", 60.0)
        cluster.continue_process(first)
        eventually(lambda: "registration lost" in cluster.log("node-0"), "the first is fenced")
        assert second.process.poll() is None
