"""A stage that keeps only what came in and runs forwards again trains bit for bit like one that keeps everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fusion.base.ids import StageIndex
from fusion.graph.partition import partition
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.local import LocalResult
from tests.support.memory import live_bytes
from tests.support.models import tiny_gpt, tiny_resnet
from tests.support.training import Training, make_training, spread_cuts


def gpt_training() -> Training:
    tokens = torch.randint(0, 61, (16, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return make_training(tiny_gpt(dropout=0.1), rows, grad_clip=0.5, eval_rows=rows, eval_every_steps=2)


def rows_of(*shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    labels = torch.randint(0, 5, (16,), generator=generator)
    return {"x": torch.randn(16, *shape, generator=generator), "label": labels}


def class_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch["label"])


def resnet_training() -> Training:
    rows = rows_of(3, 8, 8)
    rows["image"] = rows.pop("x")
    return make_training(tiny_resnet(), rows, class_loss)


class Drifting(nn.Module):
    """Takes off an average over all micro-batches so far, which the forward itself moves on."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.mean(0))
        made: torch.Tensor = self.third(self.second((self.first(x - self.average)).tanh()).tanh())
        return made


def drifting_training() -> Training:
    torch.manual_seed(3)
    return make_training(Drifting(), rows_of(6), class_loss)


MAKERS: dict[str, Callable[[], Training]] = {
    "dropout": gpt_training,
    "batch norm": resnet_training,
    "a buffer that is read": drifting_training,
}


@pytest.fixture(scope="module", params=MAKERS)
def kept(request: pytest.FixtureRequest) -> tuple[Training, LocalResult]:
    training = MAKERS[request.param]()
    return training, training.run(schedule="gpipe")


def assert_same(one: LocalResult, other: LocalResult) -> None:
    for left, right in zip(one.steps, other.steps, strict=True):
        assert (left.loss, left.grad_norm, left.eval_loss) == (right.loss, right.grad_norm, right.eval_loss)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize(("pieces", "schedule"), [(1, "gpipe"), (2, "gpipe"), (4, "gpipe"), (3, "1f1b")])
def test_losses_weights_and_buffers_are_the_same_bit_for_bit(
    kept: tuple[Training, LocalResult], pieces: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, whole = kept
    runs: list[StageIndex] = []
    once = ShardExecutor._run

    def counted(self, inputs):  # type: ignore[no-untyped-def]
        runs.append(self.stage)
        return once(self, inputs)

    monkeypatch.setattr(ShardExecutor, "_run", counted)
    cuts = spread_cuts(training, pieces)
    assert_same(whole, training.run(cuts, schedule=schedule, recompute="always"))
    forwards = training.spec.steps * training.spec.micro_batches
    again = [schedule == "gpipe" or stage < len(cuts) for stage in range(len(cuts) + 1)]  # 1F1B's last holds but one
    assert [runs.count(StageIndex(stage)) for stage in range(len(again))] == [forwards * (1 + one) for one in again]


def test_only_what_came_in_is_kept_of_micro_batches_in_flight() -> None:
    training = gpt_training()
    parts = partition(training.captured.graph, spread_cuts(training, 2))
    tokens = training.data.rows["input_ids"][:2]

    def held_bytes(recompute: bool) -> tuple[int, int]:
        """What a first stage holds after four forwards, and the most that it held until all backwards were done."""
        executor = ShardExecutor(parts, StageIndex(0), training.captured.tensors, recompute=recompute)
        with live_bytes() as live:
            gradients = []
            for micro_batch in range(4):
                made = executor.forward(1, micro_batch, {"input_ids": tokens}, {}, 2)
                gradients.append({edge: torch.ones_like(value) for edge, value in made.edges.items()})
                del made
            held = live.now
            for micro_batch, gradient in enumerate(gradients):
                executor.backward(micro_batch, 1.0, gradient)
            return held, live.peak

    (held, peak), (held_again, peak_again) = held_bytes(False), held_bytes(True)
    gradients = 4 * sum(training.captured.graph.values[edge.value].bytes for edge in parts.edges)
    assert held_again <= gradients + 4096  # nothing but the gradients that the test itself holds
    saved = sum(training.captured.graph.operators[at].cost.saved_bytes for at in range(parts.shards[0].end_operator))
    assert held - held_again > 3 * saved / 2
    assert peak - peak_again > saved
