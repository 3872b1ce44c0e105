"""The stage's optimizer: torch's own numbers, one verdict for all stages, no sum that depends on the cut."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.protocol.job import BlobRef, DataSpec, JobSpec, LrScheduleSpec, OptimizerSpec
from fusion.runtime.optimizer import StageOptimizer, decide, sums_of_squares


def _job(optimizer: OptimizerSpec, schedule: LrScheduleSpec | None = None) -> JobSpec:
    blob = BlobRef("0" * 64, 0)
    return JobSpec(
        name="job",
        graph=blob,
        weights=blob,
        data=DataSpec((), (), 1),
        optimizer=optimizer,
        batch_size=1,
        micro_batches=1,
        steps=10,
        lr_schedule=schedule or LrScheduleSpec(),
    )


def _parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(3, 2, generator=generator).requires_grad_() for name in ("a.weight", "a.bias", "b.weight")
    }


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        (OptimizerSpec("adamw", 0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
        (
            OptimizerSpec("adam", 0.1, {"beta1": 0.8, "eps": 1e-3}),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.999), eps=1e-3),
        ),
        (OptimizerSpec("sgd", 0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            OptimizerSpec("sgd", 0.1, {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.1}),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
    ],
)
def test_the_update_is_torchs_bit_for_bit(spec: OptimizerSpec, make: object) -> None:
    ours, theirs = _parameters(), _parameters()
    stage = StageOptimizer(_job(spec), ours)
    reference = make(list(theirs.values()))  # type: ignore[operator]
    for step in (1, 2, 3):
        for name in ours:
            ours[name].grad = torch.full((3, 2), 0.1 * step)
            theirs[name].grad = torch.full((3, 2), 0.1 * step)
        stage.apply(step, 1.0)
        reference.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weight_decay_spares_the_named_parameters() -> None:
    parameters = _parameters()
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    stage = StageOptimizer(_job(OptimizerSpec("adamw", 0.1, {"weight_decay": 0.5}, ("*.bias",))), parameters)
    for tensor in parameters.values():
        tensor.grad = torch.zeros_like(tensor)
    stage.apply(1, 1.0)
    assert torch.equal(parameters["a.bias"], before["a.bias"])
    assert torch.allclose(parameters["a.weight"], before["a.weight"] * 0.95)


def test_frozen_parameters_stay() -> None:
    frozen = torch.ones(2)
    stage = StageOptimizer(_job(OptimizerSpec("sgd", 1.0)), {"frozen": frozen})
    stage.apply(1, 1.0)
    assert torch.equal(frozen, torch.ones(2))


def test_the_learning_rate_warms_up_and_falls_to_its_final_factor() -> None:
    schedule = LrScheduleSpec("cosine", warmup_steps=2, final_factor=0.1)
    stage = StageOptimizer(_job(OptimizerSpec("sgd", 2.0), schedule), {})
    assert stage.learning_rate(1) == pytest.approx(1.0)
    assert stage.learning_rate(2) == pytest.approx(2.0)
    assert stage.learning_rate(6) == pytest.approx(2.0 * 0.55)
    assert stage.learning_rate(10) == pytest.approx(0.2)


def test_clipping_equals_torchs_global_norm() -> None:
    gradients = [torch.randn(5, generator=torch.Generator().manual_seed(index)) for index in range(4)]
    verdict = decide(sums_of_squares(gradients), grad_clip=0.5)
    norm = torch.nn.utils.get_total_norm(gradients)
    assert verdict.norm == pytest.approx(norm.item(), rel=1e-6)
    assert verdict.factor == pytest.approx(0.5 / (norm.item() + 1e-6), rel=1e-6)


def test_the_verdict_does_not_depend_on_how_the_sums_are_cut_or_ordered() -> None:
    sums = [10.0 ** (index % 17 - 8) * 1.1 for index in range(100)]
    verdict = decide(sums, 1.0)
    assert decide(sums[::-1], 1.0) == verdict
    assert decide(sums[50:] + sums[:50], 1.0) == verdict


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_gradient_that_is_not_finite_stops_the_whole_update(bad: float) -> None:
    verdict = decide([1.0, *sums_of_squares([torch.tensor([1.0, bad])])], 1.0)
    assert not verdict.apply


def test_no_clipping_means_a_factor_of_one() -> None:
    assert decide([1e12], 0.0).factor == 1.0
