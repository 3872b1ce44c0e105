"""In strict determinism a cut model trains like a whole one, bit for bit: losses, and weights at the end."""

from __future__ import annotations

import pytest
import torch

from fusion.runtime.local import LocalResult
from tests.support.models import tiny_gpt, tiny_resnet
from tests.support.training import Training, make_training, spread_cuts


def gpt_training() -> Training:
    tokens = torch.randint(0, 61, (16, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return make_training(tiny_gpt(dropout=0.1), rows, grad_clip=0.5, shuffle=True, eval_rows=rows, eval_every_steps=2)


def resnet_training() -> Training:
    generator = torch.Generator().manual_seed(6)
    rows = {
        "image": torch.randn(16, 3, 8, 8, generator=generator),
        "label": torch.randint(0, 5, (16,), generator=generator),
    }
    return make_training(
        tiny_resnet(),
        rows,
        lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch["label"]),
        grad_clip=1.0,
        eval_rows=rows,
        eval_every_steps=3,
    )


def same(one: LocalResult, other: LocalResult) -> bool:
    curves = [[(step.loss, step.eval_loss, step.grad_norm) for step in run.steps] for run in (one, other)]
    weights = all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    return curves[0] == curves[1] and weights and one.tensors.keys() == other.tensors.keys()


@pytest.fixture(scope="module")
def gpt() -> tuple[Training, LocalResult]:
    training = gpt_training()
    return training, training.run()


@pytest.fixture(scope="module")
def resnet() -> tuple[Training, LocalResult]:
    training = resnet_training()
    return training, training.run()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
@pytest.mark.parametrize("shift", [0.0, 0.37])
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_pieces_train_bit_for_bit_like_the_whole(
    name: str, shift: float, pieces: int, schedule: str, request: pytest.FixtureRequest
) -> None:
    training, whole = request.getfixturevalue(name)
    cut = training.run(spread_cuts(training, pieces, shift), schedule=schedule)
    assert same(whole, cut)
    assert len(whole.steps) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_every_legal_cut_trains_bit_for_bit_like_the_whole(name: str, request: pytest.FixtureRequest) -> None:
    training, whole = request.getfixturevalue(name)
    from fusion.graph.partition import legal_cuts

    first = whole.steps[0]
    for cut in legal_cuts(training.captured.graph):
        step = training.run([cut], steps=1, eval_every_steps=0).steps[0]
        assert (step.loss, step.grad_norm) == (first.loss, first.grad_norm), f"cut at {cut}"


def test_dropout_is_on_and_differs_between_micro_batches_and_steps(gpt: tuple[Training, LocalResult]) -> None:
    training, _ = gpt
    one = training.run(steps=2, optimizer=training.spec.optimizer.__class__("sgd", 0.0), shuffle=False, batch_size=16)
    losses = [step.loss for step in one.steps]
    assert losses[0] != losses[1]  # the same samples and weights, other masks


def test_the_seed_changes_the_training(gpt: tuple[Training, LocalResult]) -> None:
    training, whole = gpt
    assert training.run(seed=1).steps[0].loss != whole.steps[0].loss
