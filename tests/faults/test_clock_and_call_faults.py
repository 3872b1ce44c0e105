"""Clocks jump and calls get lost: neither is a reason to give up a node or a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.test_coordinator_faults import goes_on_undisturbed
from tests.support.cluster import eventually
from tests.support.faultcluster import FaultCluster, make_job, paced

pytestmark = pytest.mark.faults


def test_f24_clocks_that_jump_are_named_and_change_nothing(tmp_path: Path) -> None:
    clocks = {name: tmp_path / f"clock-{name}" for name in ("coordinator", "node-1")}
    for clock in clocks.values():
        clock.write_text("0")
    variables = {name: {"FUSION_CLOCK": str(clock)} for name, clock in clocks.items()}
    with FaultCluster(tmp_path / "cluster", nodes=3, variables=variables) as cluster:
        cluster.set_failpoints(paced(0.15))
        job = make_job(40, stages=3)
        with cluster.running(job, step=2) as run:
            clocks["node-1"].write_text("312")
            eventually(lambda: "clock of node node-1 differs by +312 s" in cluster.log("coordinator"), "it is named")
            eventually(lambda: "differs from the coordinator's by +312 s" in cluster.log("node-1"), "the node says so")
            for offset_s in (3600, -3600):
                for clock in clocks.values():
                    clock.write_text(str(offset_s))
                    time.sleep(1.0)
            history = cluster.finishes(run, job)
        goes_on_undisturbed(history)
        assert set(cluster.node_states().values()) <= {"idle", "busy"}


@pytest.fixture
def unreliable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultCluster]:
    """Three in ten calls of nodes, workers and owners fail: a tenth each before, after, and while they have effect."""
    monkeypatch.setenv("FUSION_TEST", "1")
    variables = {f"node-{number}": {"FUSION_RPC_CHAOS": "0.1"} for number in range(3)}
    with FaultCluster(tmp_path, nodes=3, variables=variables) as cluster:
        monkeypatch.setenv("FUSION_RPC_CHAOS", "0.1")
        yield cluster
        monkeypatch.delenv("FUSION_RPC_CHAOS")


def test_f23_runs_finish_as_ever_though_three_in_ten_calls_get_lost(unreliable: FaultCluster) -> None:
    for _ in range(2):
        job = make_job(40, stages=3)
        with unreliable.submit(job) as run:
            history = unreliable.finishes(run, job)
        goes_on_undisturbed(history)
    lost = Counter(line["fate"] for line in history.lines if line["event"] == "rpc_chaos")
    assert set(lost) == {"request", "answer", "under way"}, "the chaos was there"
