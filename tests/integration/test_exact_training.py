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


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_pieces_train_bit_for_bit_like_the_whole_in_bf16_too(name: str, request: pytest.FixtureRequest) -> None:
    training, single = request.getfixturevalue(name)
    whole = training.run(precision="bf16", steps=2)
    assert same(whole, training.run(spread_cuts(training, 3, 0.2), precision="bf16", steps=2))
    assert whole.steps[0].loss != single.steps[0].loss
    assert whole.steps[0].loss == pytest.approx(single.steps[0].loss, rel=0.05)


def test_values_cross_in_bf16_where_autocast_makes_them(gpt: tuple[Training, LocalResult]) -> None:
    training, _ = gpt
    linear = next(
        position + 1
        for position, op in enumerate(training.captured.graph.operators)
        if op.name == "aten.linear.default" and op.cost.forward_flops > 0
    )
    full = training.run([linear], steps=1, eval_every_steps=0).steps[0].bytes
    half = training.run([linear], steps=1, eval_every_steps=0, precision="bf16").steps[0].bytes
    assert half < full


def eval_model(training: Training, model: torch.nn.Module, result: LocalResult) -> torch.nn.Module:
    """Load what was trained into a fresh model, as a user does who takes the weights elsewhere."""
    names = {alias: item.name for item in training.captured.graph.inputs for alias in (item.name, *item.aliases)}
    state = model.state_dict()
    model.load_state_dict({name: result.tensors.get(names.get(name, name), state[name]) for name in state})
    return model.eval()


def test_evaluation_has_no_dropout(gpt: tuple[Training, LocalResult]) -> None:
    training, whole = gpt
    model = eval_model(training, tiny_gpt(dropout=0.1), whole)
    assert training.eval_data is not None
    expected = model(**training.eval_data.rows).item()
    assert whole.steps[-1].eval_loss == pytest.approx(expected, rel=1e-6)
    assert whole.steps[0].eval_loss is None


def test_evaluation_normalises_by_the_running_statistics(resnet: tuple[Training, LocalResult]) -> None:
    training, whole = resnet
    model = eval_model(training, tiny_resnet(), whole)
    assert training.eval_data is not None
    rows = training.eval_data.rows
    expected = torch.nn.functional.cross_entropy(model(rows["image"]), rows["label"]).item()
    assert whole.steps[-1].eval_loss == pytest.approx(expected, rel=1e-5)


def test_evaluation_changes_nothing_in_the_training(resnet: tuple[Training, LocalResult]) -> None:
    training, whole = resnet
    without = training.run(eval_every_steps=0)
    assert [step.loss for step in without.steps] == [step.loss for step in whole.steps]
    assert all(torch.equal(without.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_running_a_job_here_changes_neither_the_given_weights_nor_torchs_settings(
    gpt: tuple[Training, LocalResult],
) -> None:
    training, _ = gpt
    before = {name: tensor.clone() for name, tensor in training.captured.tensors.items()}
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    training.run(steps=1)
    assert torch.equal(torch.rand(1), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.captured.tensors.items())
