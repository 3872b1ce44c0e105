"""Stages keep versions of their state together: the same steps on all, at most two at once, nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.integration.test_exact_training import gpt_training
from tests.support.training import spread_cuts

STEPS = 12


@dataclass
class LaggingKeeper:
    """A version is safe once it has been asked about so many times."""

    lag: int
    kept: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    asked: int = 0
    taken: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    most: int = 0
    stables: list[int] = field(default_factory=list)

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor], *, checkpoint: bool) -> None:
        under_way = [other for other in self.kept if not self.stables or other > self.stables[-1]]
        for other in under_way:
            del self.kept[other]
        self.kept[step] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.taken.append(step)
        self.checkpoints += [step] * checkpoint
        self.asked, self.most = 0, max(self.most, len(self.kept))

    def safe_step(self) -> int:
        self.asked += 1
        return max(self.kept, default=0) if self.asked > self.lag else 0

    def stable(self, step: int) -> None:
        assert step in self.kept, f"step {step} is said to be safe, and is not here"
        self.stables.append(step)
        self.kept = {other: state for other, state in self.kept.items() if other >= step}


@pytest.mark.parametrize("lags", [(0, 0, 0), (0, 3, 1), (2, 0, 0)])
def test_all_stages_keep_the_same_steps_and_never_more_than_two(lags: tuple[int, ...]) -> None:
    training = gpt_training()
    cuts = spread_cuts(training, 3)
    plain = training.run(cuts, steps=STEPS)
    keepers = [LaggingKeeper(lag) for lag in lags]
    result = training.run(cuts, steps=STEPS, keepers=keepers)
    assert [step.loss for step in result.steps] == [step.loss for step in plain.steps]
    assert all(torch.equal(result.tensors[name], plain.tensors[name]) for name in plain.tensors)
    every = max(lags) + 1
    assert [keeper.taken for keeper in keepers] == [list(range(1, STEPS, every))] * 3
    assert {keeper.most for keeper in keepers} == {2}
    assert all(keeper.stables == keeper.taken[: len(keeper.stables)] for keeper in keepers)


def test_a_job_goes_on_bit_for_bit_from_whichever_version_is_there() -> None:
    training = gpt_training()
    whole = training.run(steps=STEPS)
    keepers = [LaggingKeeper(1) for _ in range(3)]
    training.run(spread_cuts(training, 3), steps=STEPS, keepers=keepers)
    for step in keepers[0].kept:
        tensors = dict(training.captured.tensors)
        for keeper in keepers:
            tensors |= keeper.kept[step]
        moved = replace(training, captured=replace(training.captured, tensors=tensors))
        after = moved.run(spread_cuts(training, 2), first_step=step + 1, steps=STEPS)
        assert [one.loss for one in after.steps] == [one.loss for one in whole.steps[step:]]
        assert all(torch.equal(after.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_checkpoints_are_taken_on_time_whatever_is_under_way() -> None:
    training = gpt_training()
    keepers = [LaggingKeeper(lag) for lag in (0, 4, 0)]
    training.run(spread_cuts(training, 3), steps=STEPS, checkpoint_every_steps=4, keepers=keepers)
    for keeper in keepers:
        assert keeper.checkpoints == [4, 8, 12]
        assert keeper.most <= 2
        assert keeper.taken == keepers[0].taken


def test_one_stage_without_a_keeper_keeps_all_from_keeping() -> None:
    training = gpt_training()
    keepers = [LaggingKeeper(0), None, LaggingKeeper(0)]
    training.run(spread_cuts(training, 3), steps=3, keepers=keepers)
    assert keepers[0] is not None
    assert keepers[0].taken == []
