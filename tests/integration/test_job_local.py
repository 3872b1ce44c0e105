"""A job run in this process: the losses and weights of a plain PyTorch loop, and the owner's model left alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from fusion.base.errors import CaptureError, ConfigError, DataError
from fusion.runtime.sampling import sample_ids


class Tied(nn.Module):
    """Tied embedding, a buffer, a frozen parameter, and weights that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 2)
        self.unused_too = self.unused
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm((self.embedding(input_ids) * self.frozen * self.scratch).flatten(0, 1))
        return F.cross_entropy(self.head(x), labels.flatten())


def _tokens() -> torch.Tensor:
    return torch.randint(0, 11, (300,), generator=torch.Generator().manual_seed(1))


def _job(model: nn.Module, **changes: Any) -> fusion.Job:
    settings: dict[str, Any] = {
        "data": fusion.TokenData(_tokens(), 5),
        "optimizer": fusion.AdamW(1e-2, weight_decay=0.1, no_decay=["norm.*"]),
        "lr_schedule": fusion.Linear(warmup=2, final=0.5),
        "steps": 6,
        "batch_size": 8,
        "micro_batches": 2,
        "seed": 3,
        "determinism": "strict",
    }
    return fusion.Job(model, **(settings | changes))


def _eager(model: nn.Module, steps: int) -> list[float]:
    """The same training, written out by hand: two micro-batches of 4, mean over the batch."""
    tokens, block, samples = _tokens(), 5, 59
    decayed = [value for name, value in model.named_parameters() if not name.startswith("norm") and value.requires_grad]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": list(model.norm.parameters()), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    losses = []
    for step in range(steps):
        factor = (step + 1) / 2 if step < 2 else 1 - 0.5 * (step + 1 - 2) / (steps - 2)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        ids = sample_ids(3, samples, True, step * 8, 8).tolist()
        total = 0.0
        optimizer.zero_grad()
        for part in (ids[:4], ids[4:]):
            x = torch.stack([tokens[i * block : i * block + block] for i in part])
            y = torch.stack([tokens[i * block + 1 : i * block + block + 1] for i in part])
            loss = model(x, y) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def test_losses_and_weights_equal_a_plain_loop_and_the_model_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Tied()
    before, expected = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    seen: list[int] = []
    run = _job(model).run_local(lambda step: seen.append(step.step))
    losses = _eager(expected, 6)
    assert run.losses == pytest.approx(losses, abs=1e-5)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [step.samples for step in run.metrics] == [8] * 6
    assert [step.tokens for step in run.metrics] == [40] * 6
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    trained = run.state_dict()
    assert set(trained) == set(before)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-4, rtol=1e-4, msg=name)
    assert trained["head.weight"] is trained["embedding.weight"]
    run.load_into(model)
    assert torch.equal(model.embedding.weight, trained["embedding.weight"])
    assert model.head.weight is model.embedding.weight


def test_the_same_job_gives_the_same_losses_and_another_seed_does_not() -> None:
    torch.manual_seed(0)
    model = Tied()
    assert _job(model).run_local().losses == _job(model).run_local().losses
    assert _job(model).run_local().losses != _job(model, seed=4).run_local().losses


def test_pieces_without_a_network_give_the_same_losses() -> None:
    torch.manual_seed(0)
    model = Tied()
    whole = _job(model).run_local()
    cut = _job(model).run_local(cuts=[2])
    assert cut.losses == whole.losses
    assert all(torch.equal(cut.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert sum(step.bytes for step in cut.metrics) > 0


def test_held_out_data_is_evaluated() -> None:
    torch.manual_seed(0)
    train, held_out = fusion.TokenData(_tokens(), 5).split(0.2)
    run = _job(Tied(), data=train, eval_data=held_out, eval_every=3).run_local()
    assert [step.step for step in run.metrics if step.eval_loss is not None] == [3, 6]


def test_p14_the_number_of_micro_batches_does_not_change_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = {"input": torch.rand(32, 3), "target": torch.rand(32, 1)}

    def losses(micro_batches: int) -> list[float]:
        job = fusion.Job(
            model,
            data,
            fusion.SGD(0.1, momentum=0.9),
            loss=lambda out, batch: F.mse_loss(out, batch["target"]),
            steps=5,
            batch_size=10,
            micro_batches=micro_batches,
        )
        return job.run_local().losses

    assert losses(4) == pytest.approx(losses(1), rel=1e-5)  # 3, 3, 3 and 1 samples


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"data": fusion.TokenData(list(range(12)) * 10, 5)},
            DataError,
            "data field 'input_ids' holds 11, but the embedding embedding has 11 rows; allowed are 0..10",
        ),
        (
            {"data": fusion.TokenData(list(range(11)) * 10, 5, inputs="ids")},
            CaptureError,
            "ids|input_ids",
        ),
        ({"model": nn.Linear(5, 5)}, CaptureError, "forward must return the loss"),
        ({"cuts": [10_000]}, ConfigError, "cut"),
    ],
)
def test_b27_b31_what_does_not_fit_is_told_before_training(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    changes = {"model": Tied(), **changes}
    job = _job(**changes)
    with pytest.raises(kind, match=message) as caught:
        job.run_local(cuts=job.cuts)
    assert "\n" not in str(caught.value)


def test_b27_labels_beyond_the_classes_are_found_and_ignored_ones_are_not() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x), labels.view(-1))

    def run(*labels: int) -> list[float]:
        data = {"x": torch.ones(4, 2), "labels": torch.tensor(labels)}
        return fusion.Job(Classifier(), data, fusion.SGD(), steps=1, batch_size=4).run_local().losses

    assert run(0, 1, 2, -100)
    with pytest.raises(DataError, match=r"'labels' holds 3, but the loss has 3 classes; allowed are 0\.\.2"):
        run(0, 1, 3, -100)
    with pytest.raises(DataError, match="'labels' holds -1"):
        run(0, 1, 2, -1)


def test_only_the_fields_that_the_model_reads_are_stored(tmp_path: Path) -> None:
    class TakesMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return self.linear(x).mean()

    job = fusion.Job(
        TakesMore(),
        {"x": torch.ones(4, 2), "unused": torch.ones(4, 99)},
        fusion.SGD(),
        steps=1,
        batch_size=2,
    )
    prepared = job.prepare(tmp_path)
    assert [item.name for item in prepared.spec.data.fields] == ["x"]
    assert len(list(tmp_path.iterdir())) == 1


def test_data_that_only_nodes_have_cannot_be_run_here() -> None:
    data = fusion.NodePath("/nowhere/data.safetensors", fields={"input": fusion.Rows("float32", (2,))}, samples=8)
    job = fusion.Job(nn.Linear(2, 1), data, fusion.SGD(), loss=lambda out, batch: out.mean(), steps=1, batch_size=2)
    with pytest.raises(DataError, match="can only be submitted"):
        job.run_local()
