"""Nodes that leave in order, are thrown out, renew their certificates, or join while a job runs."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

import fusion
from tests.faults.test_coordinator_faults import goes_on_undisturbed
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, make_job, paced

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("stages", [4, 3], ids=["without-a-spare", "with-a-spare"])
def test_f31_a_node_that_is_told_to_end_hands_its_state_over_and_nothing_is_lost(
    cluster: FaultCluster, stages: int
) -> None:
    cluster.set_failpoints(paced(0.05))
    job = make_job(40, stages)
    with cluster.running(job, step=3) as run:
        name = run.status().stages[1].node_name
        process = cluster.helpers.named[name].process
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert run.status().state in (fusion.JobState.RUNNING, fusion.JobState.STARTING, fusion.JobState.QUEUED)
        assert cluster.node_states()[name] == "left"
        history = cluster.finishes(run, job)
        cluster.check_failures(run, history)  # it was none
    assert len(history.epochs()) == 2
    assert history.lost_steps() == 0
    assert name not in {line["name"] for line in history.steps if line["epoch"] == 2}


def test_f31_a_second_signal_ends_a_node_at_once(cluster: FaultCluster) -> None:
    cluster.set_failpoints(paced(0.4))
    job = make_job(20)
    with cluster.running(job, step=2) as run:
        name = run.status().stages[2].node_name
        process = cluster.helpers.named[name].process
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        history = cluster.finishes(run, job, 180.0)
    assert history.lost_steps() <= 1


def test_f34_a_node_that_is_revoked_is_out_at_once_and_the_job_goes_on_without_it(tmp_path: Path) -> None:
    with FaultCluster(tmp_path, nodes=4) as cluster:
        cluster.set_failpoints(paced(0.1))
        job = make_job(30, stages=3)
        with cluster.running(job, step=3) as run:
            stage = run.status().stages[1]
            revoked_s = time.monotonic()
            cluster.command("fusion_coordinator.cli", "revoke", stage.node)
            process = cluster.helpers.named[stage.node_name].process
            assert process.wait(20) == fusion.AuthError.exit_code
            history = cluster.finishes(run, job)
            cluster.check_failures(run, history, stage.node_name)
        assert history.lost_steps() <= 1
        mine = [line["at_s"] for line in history.steps if line["name"] == stage.node_name]
        assert max(mine) < revoked_s + 6.0


def test_f33_a_certificate_is_renewed_while_the_node_works_and_no_stream_breaks(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    with FaultCluster(tmp_path / "cluster", nodes=2, variables={"node-1": {"FUSION_CLOCK": str(clock)}}) as cluster:
        cluster.set_failpoints(paced(0.4))
        certificate = cluster.directory / "node-1" / "certificate.pem"
        job = make_job(40, stages=2)
        with cluster.running(job, step=2) as run:
            before = certificate.read_bytes()
            clock.write_text(str(5.2 * 86400))  # of the seven days that it is valid
            eventually(lambda: certificate.read_bytes() != before, "it is renewed", 75.0)
            clock.write_text("0")
            history = cluster.finishes(run, job, 180.0)
        goes_on_undisturbed(history)
        assert "certificate renewed" in cluster.log("node-1")


def test_a_node_that_joins_while_a_job_runs_is_used_when_the_job_needs_it(cluster: FaultCluster) -> None:
    cluster.kill("node-3")
    eventually(lambda: cluster.node_states()["node-3"] == "lost", "it is lost", 45.0)
    cluster.set_failpoints(paced(0.1, "stage.forward@stage=1,step=9:kill9-node"))
    job = make_job(14, stages=3)
    with cluster.running(job, step=2) as run:
        cluster.helpers.again("node-3")
        history = cluster.finishes(run, job)
    assert "node-3" in {line["name"] for line in history.steps if line["epoch"] == 2}
    assert history.lost_steps() <= 1
    assert json.loads(cluster.command("fusion_coordinator.cli", "nodes", "--json"))
