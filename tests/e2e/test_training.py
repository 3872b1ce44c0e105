"""A model trained by up to four node processes equals the same job in one process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.graph.partition import legal_cuts
from fusion.plan.types import Plan
from tests.support import models
from tests.support.cluster import Cluster

pytestmark = pytest.mark.slow

MakeJob = Callable[..., fusion.Job]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("training")) as made:
        yield made


def gpt(**settings: Any) -> fusion.Job:
    """Tied embeddings, dropout, clipping, held-out data; the last micro-batch is smaller than the others."""
    tokens = torch.randint(0, models.VOCABULARY, (24, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    values = {"steps": 4, "batch_size": 7, "micro_batches": 4, "grad_clip": 0.5, "eval_every": 2, "eval_batches": 1}
    values |= {
        "determinism": "strict",
        "threads": 1,
        "seed": 3,
        "planner": "equal-compute",
        "eval_data": {k: v[:8] for k, v in rows.items()},
    }
    optimizer = fusion.AdamW(1e-2, weight_decay=0.1)
    schedule = fusion.Cosine(warmup=2)
    return fusion.Job(models.tiny_gpt(dropout=0.1), rows, optimizer, lr_schedule=schedule, **(values | settings))


def resnet(**settings: Any) -> fusion.Job:
    """Batch norm, in-place activations, shortcuts, momentum; evaluation uses the running statistics."""
    generator = torch.Generator().manual_seed(6)
    rows = {"image": torch.randn(32, 3, 8, 8, generator=generator)}
    rows["label"] = torch.randint(0, 5, (32,), generator=generator)
    values = {"steps": 3, "batch_size": 8, "micro_batches": 4, "grad_clip": 1.0, "eval_every": 2, "eval_data": rows}
    values |= {"determinism": "strict", "threads": 1, "loss": _class_loss, "planner": "equal-compute"}
    return fusion.Job(models.tiny_resnet(), rows, fusion.SGD(0.05, momentum=0.9), **(values | settings))


def _class_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, batch["label"])


def t5(**settings: Any) -> fusion.Job:
    """Encoder and decoder of transformers: the encoder's output is read by every layer of the decoder."""
    sample = models.t5(dropout=0.1)
    rows = {name: tensor.repeat(4, 1) for name, tensor in sample.batch.items()}
    values = {"steps": 3, "batch_size": 8, "micro_batches": 2, "determinism": "strict", "threads": 1, "grad_clip": 1.0}
    values["planner"] = "equal-compute"
    return fusion.Job(sample.model, rows, fusion.AdamW(1e-3), **(values | settings))


Curve = list[tuple[float, float | None, float]]


def curve(metrics: list[fusion.StepMetrics]) -> Curve:
    return [(step.loss, step.eval_loss, step.grad_norm) for step in metrics]


def train(cluster: Cluster, job: fusion.Job) -> tuple[Curve, dict[str, Tensor], int, Plan]:
    """Train on the cluster; return each step's figures, the state dict, the number of stages, and the plan."""
    with cluster.submit(job) as run:
        metrics = list(run.metrics())
        status = run.wait()
        assert [step.step for step in metrics] == list(range(1, job.steps + 1))
        assert len({stage.node for stage in status.stages}) == len(status.stages)
        assert status.plan is not None
        return curve(metrics), run.state_dict(), len(status.stages), status.plan


Reference = tuple[Curve, dict[str, Tensor]]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """One run in one process; neither cuts nor schedules have a part in it."""
    found = {}
    for make in (gpt, resnet):
        run = make().run_local()
        found[make.__name__] = (curve(run.metrics), run.state_dict())
    return found


def cuts_at(job: fusion.Job, *shares: float) -> list[int]:
    """Return the legal cuts next to these shares of the operators."""
    with tempfile.TemporaryDirectory() as directory:
        graph = job.prepare(Path(directory)).graph
    return [min(legal_cuts(graph), key=lambda cut, at=share: abs(cut - at * len(graph.operators))) for share in shares]


@pytest.mark.parametrize(
    ("make", "schedule", "stages", "shares", "recompute"),
    [
        (gpt, "gpipe", 1, (), "auto"),
        (gpt, "1f1b", 4, (), "auto"),  # the planner's own cuts
        (gpt, "gpipe", 4, (0.05, 0.37, 0.96), "always"),  # in the middle of blocks, and nearly nothing at either end
        (gpt, "1f1b", 2, (0.61,), "auto"),
        (resnet, "gpipe", 3, (), "auto"),
        (resnet, "1f1b", 4, (0.13, 0.48, 0.71), "always"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_strict_training_on_nodes_equals_one_process_bit_for_bit(
    cluster: Cluster,
    references: dict[str, Reference],
    make: MakeJob,
    schedule: str,
    stages: int,
    shares: tuple[float, ...],
    recompute: str,
) -> None:
    cuts = cuts_at(make(), *shares) if shares else []
    job = make(schedule=schedule, stages=stages, cuts=cuts, recompute=recompute)
    figures, trained, used, plan = train(cluster, job)
    several = [stage.in_flight > 1 for stage in plan.stages]
    assert [stage.recompute for stage in plan.stages] == [recompute == "always" and one for one in several]
    expected_figures, expected = references[make.__name__]
    assert used == stages
    assert figures == expected_figures
    assert [loss for _, loss, _ in figures].count(None) == len(figures) // 2  # evaluated in between and at the end
    assert trained.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(trained[name], expected[name])] == []

    fresh = job.model  # training has not touched it
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in fresh.state_dict().items())
    fresh.load_state_dict(trained, strict=True)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in fresh.state_dict().items())


def test_the_reference_has_what_the_strict_runs_must_reproduce(references: dict[str, Reference]) -> None:
    """Clipping bites, the losses move, batch norm's statistics move, and the tied weight has both names."""
    figures, trained = references["gpt"]
    assert len({loss for loss, _, _ in figures}) == 4
    assert all(norm > 0.5 for _, _, norm in figures)
    assert torch.equal(trained["head.weight"], trained["token.weight"])
    assert not torch.equal(trained["head.weight"], models.tiny_gpt().head.weight)
    _, trained = references["resnet"]
    assert trained["stem.1.num_batches_tracked"] == 3 * 4
    assert not torch.equal(trained["stem.1.running_mean"], torch.zeros(8))


def test_auto_compression_leaves_links_that_are_fast_enough_alone_and_losses_exactly_as_they_are(
    cluster: Cluster, references: dict[str, Reference]
) -> None:
    job = gpt(compression="auto", stages=3)
    with cluster.submit(job) as run:
        metrics = list(run.metrics())
        plan = run.wait().plan
    assert plan is not None
    assert len(plan.stages) == 3
    assert {link.codec for link in plan.links} == {"none"}
    assert {codec for change in plan.codec_changes for _, _, codec in change.links} <= {"none"}
    assert curve(metrics) == references["gpt"][0]


def test_fast_training_is_within_1e_5_of_one_process(cluster: Cluster) -> None:
    assert gpt(determinism="fast").compression == "auto"  # which chooses nothing on this machine
    figures, trained, used, _ = train(cluster, gpt(determinism="fast", stages=2))
    local = gpt(determinism="fast").run_local()
    assert used == 2
    for (loss, eval_loss, norm), expected in zip(figures, local.metrics, strict=True):
        assert math.isclose(loss, expected.loss, abs_tol=1e-5)
        assert (eval_loss is None) == (expected.eval_loss is None)
        assert math.isclose(eval_loss or 0.0, expected.eval_loss or 0.0, abs_tol=1e-5)
        assert math.isclose(norm, expected.grad_norm, rel_tol=1e-4)
    for name, tensor in local.state_dict().items():
        assert torch.allclose(trained[name], tensor, rtol=0.0, atol=1e-4), name


def test_bf16_autocast_trains_on_nodes_as_it_does_in_one_process(
    cluster: Cluster, references: dict[str, Reference]
) -> None:
    figures, trained, used, _ = train(cluster, gpt(precision="bf16", stages=2))
    local = gpt(precision="bf16").run_local()
    assert used == 2
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    for (loss, _, _), expected, (full, _, _) in zip(figures, local.metrics, references["gpt"][0], strict=True):
        assert math.isclose(loss, expected.loss, rel_tol=1e-2)
        assert loss != full  # it did compute in bf16


def test_t5_over_three_stages_is_within_1e_6_of_one_process(cluster: Cluster) -> None:
    figures, trained, used, _ = train(cluster, t5(stages=3))
    local = t5().run_local()
    assert used == 3
    for (loss, _, norm), expected in zip(figures, local.metrics, strict=True):
        assert math.isclose(loss, expected.loss, abs_tol=1e-6)
        assert math.isclose(norm, expected.grad_norm, rel_tol=1e-5)
    t5().model.load_state_dict(trained, strict=True)
