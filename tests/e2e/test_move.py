"""A running job goes on under other cuts on other nodes; its curve and weights are those of the undisturbed run."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion
from fusion.graph.partition import legal_cuts
from tests.support import models
from tests.support.cluster import Cluster, eventually

pytestmark = pytest.mark.slow

STEPS = 120


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("move"), nodes=3) as made:
        yield made


@pytest.fixture
def cluster(three_nodes: Cluster) -> Cluster:
    three_nodes.heal()
    return three_nodes


def gpt(**settings: Any) -> fusion.Job:
    """Tied embeddings, dropout, clipping, held-out data, frozen parameters, AdamW."""
    tokens = torch.randint(0, models.VOCABULARY, (24, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    values = {"steps": STEPS, "batch_size": 7, "micro_batches": 4, "grad_clip": 0.5, "eval_every": 20}
    values |= {"determinism": "strict", "threads": 1, "seed": 3, "eval_data": {k: v[:8] for k, v in rows.items()}}
    model = models.tiny_gpt(dropout=0.1)
    model.position.weight.requires_grad_(False)
    optimizer = fusion.AdamW(1e-2, weight_decay=0.1)
    return fusion.Job(model, rows, optimizer, lr_schedule=fusion.Cosine(warmup=2), **(values | settings))


Curve = list[tuple[int, float, float | None, float]]


def curve(metrics: list[fusion.StepMetrics]) -> Curve:
    return [(step.step, step.loss, step.eval_loss, step.grad_norm) for step in metrics]


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Curve, dict[str, torch.Tensor]]:
    run = gpt().run_local()
    return curve(run.metrics), run.state_dict()


def cuts_at(*shares: float) -> list[int]:
    """Return the legal cuts next to these shares of the operators."""
    with tempfile.TemporaryDirectory() as directory:
        graph = gpt().prepare(Path(directory)).graph
    return [min(legal_cuts(graph), key=lambda cut, at=share: abs(cut - at * len(graph.operators))) for share in shares]


def move(cluster: Cluster, run: fusion.Run, cuts: list[int], *nodes: str) -> None:
    with cluster.client() as client:
        client.move(run.job_id, cuts, nodes)


def runs_on(run: fusion.Run, *names: str) -> bool:
    status = run.status()
    return status.state is fusion.JobState.RUNNING and tuple(stage.node_name for stage in status.stages) == names


def goes_on(run: fusion.Run) -> None:
    """Wait until the job has done more steps."""
    step = run.status().step
    eventually(lambda: run.status().step > step, "it goes on")


def equals(run: fusion.Run, expected: tuple[Curve, dict[str, torch.Tensor]]) -> None:
    """Without gap or repetition, and to the last bit."""
    run.wait(timeout=120)
    assert curve(list(run.metrics())) == expected[0]
    trained = run.state_dict()
    assert trained.keys() == expected[1].keys()
    assert [name for name in trained if not torch.equal(trained[name], expected[1][name])] == []


def test_from_two_nodes_to_three_and_back_to_one_changes_nothing(
    cluster: Cluster, undisturbed: tuple[Curve, dict[str, torch.Tensor]]
) -> None:
    cuts = cuts_at(0.3, 0.8)
    with cluster.running(gpt(cuts=cuts_at(0.5), stages=2)) as run:
        followed = run.metrics(after_step=0)  # from before the first move to the end
        first = [stage.node_name for stage in run.status().stages]
        assert len(first) == 2
        move(cluster, run, cuts, "node-2", "node-0", "node-1")
        eventually(lambda: runs_on(run, "node-2", "node-0", "node-1"), "it runs on three nodes")
        goes_on(run)
        move(cluster, run, [], "node-1")
        eventually(lambda: runs_on(run, "node-1"), "it runs on one node")
        equals(run, undisturbed)
        assert curve(list(followed)) == undisturbed[0]
        stages = [len(step.stages) for step in run.metrics()]
        assert sorted(set(stages)) == [1, 2, 3]
        assert stages == [2] * stages.count(2) + [3] * stages.count(3) + [1] * stages.count(1)
    eventually(lambda: not list(cluster.directory.glob("node-*/cache/state/*")), "no state is left on the nodes")
    blobs = [path for path in (cluster.directory / "coordinator" / "blobs").glob("*/*") if path.is_file()]
    held = [path for path in blobs if b"$held." in path.read_bytes()[:4096]]
    assert held == []


@pytest.mark.faults
def test_a_coordinator_killed_between_hold_and_next_epoch_changes_nothing(
    cluster: Cluster, undisturbed: tuple[Curve, dict[str, torch.Tensor]]
) -> None:
    cuts = cuts_at(0.3, 0.8)
    with cluster.running(gpt(cuts=cuts_at(0.5), stages=2)) as run:
        second = run.status().stages[1].node_name
        daemon = cluster.process(second)
        daemon.send_signal(signal.SIGSTOP)  # its worker will hold, and cannot say so
        try:
            move(cluster, run, cuts, "node-0", "node-1", "node-2")
            eventually(
                lambda: any("stage 0" in line.text and "is held" in line.text for line in run.logs()), "one holds"
            )
            assert run.status().state is fusion.JobState.RUNNING
            cluster.kill("coordinator")
            cluster.helpers.again("coordinator")
            eventually(lambda: cluster.node_states(), "the coordinator is back")
        finally:
            daemon.send_signal(signal.SIGCONT)
        eventually(lambda: runs_on(run, "node-0", "node-1", "node-2"), "it runs on three nodes")
        equals(run, undisturbed)


def test_coded_links_lose_the_same_in_every_process_and_residuals_move_with_their_stage(cluster: Cluster) -> None:
    """A phase with masks, one with error feedback and one without; the move comes while residuals are in use."""
    cuts = cuts_at(0.3, 0.8)
    settings = {"cuts": cuts, "stages": 3, "compression": "mask:1/4 int8/topk:8+ef@10 int8/int4@110"}
    alone = gpt(**settings).run_local(cuts=cuts)
    with cluster.running(gpt(**settings)) as run:
        eventually(lambda: run.status().step > 12, "it is in the phase with error feedback")
        names = [stage.node_name for stage in run.status().stages]
        move(cluster, run, cuts, names[1], names[2], names[0])
        eventually(lambda: runs_on(run, names[1], names[2], names[0]), "it has moved")
        equals(run, (curve(alone.metrics), alone.state_dict()))
        assert {len(step.stages) for step in run.metrics()} == {3}
    plain = gpt().run_local().metrics
    assert [step.loss for step in plain][:12] != [step.loss for step in alone.metrics][:12]
