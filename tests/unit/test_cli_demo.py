"""The demo's report and its models."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fusion.base.errors import ConfigError
from fusion.base.ids import NodeId, StageIndex
from fusion.cli import models
from fusion.cli.demoreport import Display, Outcome, describe
from fusion.protocol.jobstatus import StageStatus
from fusion.protocol.metrics import StageMetrics, StepMetrics, metrics_from_proto, metrics_to_proto


def _step(number: int, loss: float, step_s: float = 1.0, tokens: int = 100) -> StepMetrics:
    zero, one = StageIndex(0), StageIndex(1)
    stages = (
        StageMetrics(zero, step_s, 0.5, 0.1, {one: 10 * number}),
        StageMetrics(one, step_s, 0.5, 0.1, {zero: 3, one: 0}),
    )
    return StepMetrics(
        number, loss, step_s=step_s, samples=8, tokens=tokens, bytes=10 * number + 3, grad_norm=0.5, stages=stages
    )


def _outcome(tokens: int = 100) -> Outcome:
    metrics = [_step(1, 5.0, 9.0, tokens), _step(2, 4.0, 1.0, tokens), _step(3, 3.0, 3.0, tokens)]
    reference = [_step(1, 5.0), _step(2, 4.25), _step(3, 3.0)]
    stages = [StageStatus(NodeId("a"), "node-0", 0, 7, 1000), StageStatus(NodeId("b"), "node-1", 7, 12, 234)]
    return Outcome("gpt", metrics, reference, stages, {("node-0", "node-1"): "20 ms, 50 Mbit/s"}, 12.5)


def test_the_json_report_has_the_figures() -> None:
    report = json.loads(json.dumps(_outcome().as_json()))
    assert report["steps"] == 3
    assert (report["first_loss"], report["last_loss"]) == (5.0, 3.0)
    assert report["reference_max_abs_diff"] == 0.25
    assert report["tokens_per_s"] == 50.0  # 200 tokens in 4 s: the first step, which warms up, is left out
    assert report["bytes_per_step"] == 23.0
    assert report["stages"] == [
        {"node": "node-0", "operators": 7, "parameters": 1000},
        {"node": "node-1", "operators": 5, "parameters": 234},
    ]
    assert report["links"][0] == {"from": "node-0", "to": "node-1", "bytes": 60, "shaped": "20 ms, 50 Mbit/s"}
    assert report["links"][1] == {"from": "node-1", "to": "node-0", "bytes": 9, "shaped": None}


def test_the_table_has_the_same_figures() -> None:
    text = "\n".join(_outcome().lines())
    for figure in ("5.000000", "3.000000", "0.25", "50 tokens/s", "1,000 parameters", "60 B  20 ms", "12.5 s in all"):
        assert figure in text
    assert "samples/s" in "\n".join(_outcome(tokens=0).lines())


def test_one_step_is_enough_for_a_report() -> None:
    one = Outcome("gpt", [_step(1, 5.0, 2.0)], [_step(1, 5.0)], [], {}, 1.0)
    assert one.tokens_per_s == 50.0


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(10) as display:
        for number in range(1, 11):
            display.step("4 nodes", _step(number, 1.0))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 6
    assert describe(_step(2, 1.0), 10) == "step 2/10  loss 1.0000  100 tokens/s  23 B/step"


def test_metrics_survive_the_wire() -> None:
    for metrics in (_step(3, 1.5), StepMetrics(1, math.inf, eval_loss=2.0, skipped=True, learning_rate=1e-3)):
        assert metrics_from_proto(metrics_to_proto(metrics)) == metrics


def test_the_gpt_has_about_three_million_parameters_with_tied_embeddings_and_dropout() -> None:
    job = models.gpt_job(steps=2)
    count = sum(parameter.numel() for parameter in job.model.parameters())
    assert 2_500_000 < count < 3_500_000
    assert job.model.head.weight is job.model.tokens.weight
    assert any(isinstance(module, torch.nn.Dropout) and module.p == 0.1 for module in job.model.modules())
    assert job.micro_batches == 8
    assert job.data.samples > 10_000
    again = models.gpt_job(steps=2)
    assert torch.equal(again.model.head.weight, job.model.head.weight)
    assert (again.data.tokens == job.data.tokens).all()


def test_the_resnet_trains_on_real_images_with_batch_norm() -> None:
    pytest.importorskip("sklearn")
    job = models.resnet_job(steps=2)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in job.model.modules())
    first = job.data.first(64)
    assert first["image"].shape == (64, 1, 8, 8)
    assert first["image"].max() <= 1.0
    assert len(set(first["label"].tolist())) == 10


def test_without_the_images_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fusionllm\[demo\]'"):
        models.digit_images()
