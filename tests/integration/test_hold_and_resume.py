"""A job may hold at a step's end and go on under another cut: curve and weights are those of the undisturbed run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion.compress.linkcodecs import CodecSchedule
from fusion.graph.partition import partition
from fusion.protocol.job import OptimizerSpec
from fusion.protocol.metrics import StepMetrics
from fusion.runtime.local import compute_settings, make_coders, make_runners
from tests.integration.test_exact_training import gpt_training, resnet_training
from tests.support.training import Training, spread_cuts


def run_until_hold(
    training: Training, cuts: list[int], ask_in_step: int
) -> tuple[list[StepMetrics], dict[str, torch.Tensor]]:
    """Run in pieces, ask the first stage to hold while `ask_in_step` is under way; return metrics and state."""
    steps: list[StepMetrics] = []
    parts = partition(training.captured.graph, cuts)
    with compute_settings(training.spec):
        runners = make_runners(
            training.spec,
            parts,
            training.captured.tensors,
            training.data,
            training.eval_data,
            steps.append,
            coders=make_coders(training.spec, parts, CodecSchedule()),
        )
        while not all(runner.finished for runner in runners):
            if len(steps) == ask_in_step - 1:
                runners[0].hold()
            assert any(runner.advance() for runner in runners)
    assert {runner.held_after for runner in runners} == {len(steps)}
    return steps, {name: tensor for runner in runners for name, tensor in runner.state().items()}


@pytest.mark.parametrize("make", [gpt_training, resnet_training])
@pytest.mark.parametrize("pieces", [(3, 2), (1, 4), (4, 1)])
def test_going_on_under_another_cut_changes_nothing(make: object, pieces: tuple[int, int]) -> None:
    training = make()  # type: ignore[operator]
    spec = {"steps": 6}
    whole = training.run(**spec)
    longer = replace(training, spec=replace(training.spec, **spec))
    before, state = run_until_hold(longer, spread_cuts(longer, pieces[0]), 3)
    assert 3 <= len(before) < 6
    tensors = longer.captured.tensors | {name: tensor.detach().clone() for name, tensor in state.items()}
    moved = replace(longer, captured=replace(longer.captured, tensors=tensors))
    after = moved.run(spread_cuts(longer, pieces[1], 0.2), first_step=len(before) + 1)
    curve = [(step.step, step.loss, step.grad_norm) for step in (*before, *after.steps)]
    assert curve == [(step.step, step.loss, step.grad_norm) for step in whole.steps]
    assert after.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(after.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_hold_in_the_last_step_ends_the_job_as_usual() -> None:
    training = gpt_training()
    parts = partition(training.captured.graph, spread_cuts(training, 2))
    steps: list[StepMetrics] = []
    with compute_settings(training.spec):
        runners = make_runners(
            training.spec, parts, training.captured.tensors, training.data, training.eval_data, steps.append
        )
        while not all(runner.finished for runner in runners):
            if len(steps) == training.spec.steps - 1:
                runners[0].hold()
            assert any(runner.advance() for runner in runners)
    assert len(steps) == training.spec.steps
    assert {runner.held_after for runner in runners} == {None}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_the_state_holds_all_that_each_optimizer_needs(kind: str) -> None:
    settings = {"momentum": 0.9} if kind == "sgd" else {}
    training = resnet_training()
    training = replace(training, spec=replace(training.spec, steps=4, optimizer=OptimizerSpec(kind, 1e-2, settings)))
    whole = training.run()
    before, state = run_until_hold(training, spread_cuts(training, 2), 2)
    tensors = training.captured.tensors | {name: tensor.detach().clone() for name, tensor in state.items()}
    moved = replace(training, captured=replace(training.captured, tensors=tensors))
    after = moved.run(first_step=len(before) + 1)
    assert [step.loss for step in (*before, *after.steps)] == [step.loss for step in whole.steps]
