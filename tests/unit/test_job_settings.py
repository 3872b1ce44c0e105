"""Every setting of a job is checked when the job is made: one line that names field, value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusion
from fusion.base.errors import ConfigError, DataError
from fusion.job.settings import lr_schedule_spec
from fusion.protocol.job import LossWeightSpec, LrScheduleSpec, OptimizerSpec


def _job(**changes: Any) -> fusion.Job:
    settings: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "data": {"input": torch.zeros(8, 2), "target": torch.zeros(8, dtype=torch.int64)},
        "optimizer": fusion.SGD(0.1),
        "loss": lambda out, batch: out.sum(),
        "steps": 3,
        "batch_size": 4,
    }
    return fusion.Job(**(settings | changes))


def test_optimizers_become_data_with_torchs_defaults() -> None:
    expected = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    assert fusion.AdamW(3e-4).spec == OptimizerSpec("adamw", 3e-4, expected)
    assert fusion.Adam().spec.settings["weight_decay"] == 0.0
    assert fusion.Adam().spec.learning_rate == 1e-3
    made = fusion.AdamW(1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, no_decay="*.bias").spec
    assert made.settings == {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2}
    assert made.no_decay == ("*.bias",)
    assert fusion.SGD(0.1, momentum=0.9, nesterov=True).spec.settings["nesterov"] == 1.0
    for kind, ours in (("AdamW", fusion.AdamW()), ("Adam", fusion.Adam()), ("SGD", fusion.SGD())):
        theirs = getattr(torch.optim, kind)([torch.zeros(1)]).defaults
        assert ours.spec.learning_rate == theirs["lr"]
        assert ours.spec.settings["weight_decay"] == theirs["weight_decay"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fusion.AdamW(learning_rate=1.0), "did you mean 'lr'"),
        (lambda: fusion.AdamW(weight_deacy=0.1), "AdamW has no setting 'weight_deacy'; did you mean 'weight_decay'"),
        (lambda: fusion.SGD(momentun=0.9), "did you mean 'momentum'"),
        (lambda: fusion.SGD(xyz=1), "it takes dampening, lr, momentum"),
        (lambda: fusion.AdamW(-1.0), r"optimizer.learning_rate must be a number 0..1e\+06, got -1.0"),
        (lambda: fusion.AdamW(math.nan), "got nan"),
        (lambda: fusion.AdamW("fast"), "got 'fast'"),
        (lambda: fusion.AdamW(betas=(0.9, 1.0)), "optimizer.beta2"),
        (lambda: fusion.AdamW(betas=0.9), "betas must be two numbers"),
        (lambda: fusion.SGD(nesterov=True), "nesterov=True needs momentum"),
        (lambda: fusion.AdamW(no_decay=[1]), "no_decay must be glob patterns"),
    ],
)
def test_b3_b6_bad_optimizer_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_schedules_become_data() -> None:
    assert lr_schedule_spec(None, 5) == LrScheduleSpec()
    assert lr_schedule_spec(fusion.Constant(warmup=2), 5) == LrScheduleSpec("constant", 2)
    assert lr_schedule_spec(fusion.Linear(2, 0.5), 5) == LrScheduleSpec("linear", 2, 0.5)
    assert lr_schedule_spec(fusion.Cosine(final=0.1), 5) == LrScheduleSpec("cosine", 0, 0.1)
    assert lr_schedule_spec([1, 0.5], 2) == LrScheduleSpec("table", factors=(1.0, 0.5))
    seen: list[int] = []
    table = lr_schedule_spec(lambda step: seen.append(step) or torch.tensor(1 / step), 4)
    assert table.factors == pytest.approx((1.0, 0.5, 1 / 3, 0.25))
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("schedule", "steps", "message"),
    [
        ([1.0], 2, "has 1 factors, the job has steps=2"),
        ([1.0, -1.0], 2, "lr_schedule factor"),
        ([1.0, math.inf], 2, "lr_schedule factor"),
        (lambda step: "high", 2, "must give a number for each step, got 'high'"),
        ("cosine", 2, "must be fusion.Constant"),
        (0.5, 2, "must be fusion.Constant"),
        (fusion.Cosine(warmup=9), 2, "lr_schedule.warmup_steps must be an integer 0..2, got 9"),
        (lambda step: 1.0, 1_000_000, "too long"),
    ],
)
def test_bad_schedules_are_named(schedule: Any, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _job(lr_schedule=schedule, steps=steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lerning_rate": 1}, "Job has no setting 'lerning_rate'"),
        ({"lr_shedule": None}, "did you mean 'lr_schedule'"),
        ({"microbatches": 2}, "did you mean 'micro_batches'"),
        ({"steps": "many"}, "steps must be an integer 1..1000000000, got 'many'"),
        ({"steps": True}, "steps must be an integer .* got True"),
        ({"steps": 1e999}, "steps must be an integer .* got inf"),
        ({"steps": -1}, "steps must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 2**63}, "steps must be"),
        ({"steps": 1.0}, "steps must be"),
        ({"batch_size": None}, "batch_size must be"),
        ({"seed": -1}, "seed must be"),
        ({"micro_batches": 5}, "micro_batches=5 must not exceed batch_size=4"),
        ({"micro_batches": 3}, "batch_size=4 cannot be cut into micro_batches=3 .* micro_batches=2 works"),
        ({"determinism": "exact"}, "determinism must be one of fast, strict; got 'exact'"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16"),
        ({"schedule": "zero-bubble"}, "schedule must be one of 1f1b, gpipe"),
        ({"grad_clip": math.nan}, "grad_clip must be a number"),
        ({"grad_clip": -1}, "grad_clip must be a number"),
        ({"shuffle": "yes"}, "shuffle must be True or False"),
        ({"eval_every": 2}, "eval_every_steps=2 needs eval_data"),
        ({"optimizer": "adamw"}, "optimizer must be fusion.AdamW"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer must be fusion.AdamW"),
        ({"loss": "mse"}, "loss must be a function"),
        ({"loss_weight": "labels"}, r"loss_weight must be fusion.tokens\(field\)"),
        ({"loss_weight": fusion.tokens("labels")}, "loss_weight names field 'labels'; data has input, target"),
        ({"loss_weight": fusion.tokens("input")}, "loss_weight field 'input' must hold integers"),
        ({"model": lambda x: x}, "model must be a torch.nn.Module"),
        ({"model": nn.Linear(2, 1, device="meta")}, "on the meta device"),
        ({"model": nn.ReLU()}, "no trainable parameter"),
        ({"model": nn.Linear(2, 1).requires_grad_(False)}, "no trainable parameter"),
        ({"data": [1, 2]}, "data must be fusion.TextData"),
        ({"data": {}}, "data has no fields"),
        ({"eval_data": {"input": torch.zeros(2, 2)}}, "eval_data has no field 'target'"),
        (
            {"eval_data": {"input": torch.zeros(2, 3), "target": torch.zeros(2, dtype=torch.int64)}},
            r"float32 \(3,\) in eval_data, float32 \(2,\) in data",
        ),
    ],
)
def test_b3_b4_b5_bad_job_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _job(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a" * 65, "../a", "a/b", "-rf", "a\0", "a\nb", "\u202ex", "😀", "<script>", "a."])
def test_b8_bad_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a usable name; allowed: 1 to 63 of"):
        _job(name=name)


def test_b27_data_shorter_than_one_batch() -> None:
    with pytest.raises(DataError, match=r"8 samples, fewer than one batch \(batch_size=9\)"):
        _job(batch_size=9)


def test_eval_batches_beyond_the_held_out_data() -> None:
    held_out = {"input": torch.zeros(7, 2), "target": torch.zeros(7, dtype=torch.int64)}
    _job(eval_data=held_out, eval_every=1, eval_batches=1)
    with pytest.raises(ConfigError, match="need 8 samples, eval_data has 7"):
        _job(eval_data=held_out, eval_every=1, eval_batches=2)


def test_whole_numbers_of_numpy_and_torch_are_taken() -> None:
    job = _job(steps=np.int64(3), batch_size=torch.tensor(4), cuts=np.array([1, 2]))
    assert (job.steps, job.batch_size, job.cuts) == (3, 4, (1, 2))
    assert type(job.steps) is int


def test_codecs_are_chosen_by_default_but_strict_losses_need_them_asked_for_by_name() -> None:
    assert _job().compression == "auto"
    assert _job(determinism="strict").compression == "none"
    assert _job(determinism="strict", compression="int8").compression == "int8"
    assert _job(compression="none").compression == "none"


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_auto_goes_with_runs_too_short_for_its_later_part(steps: int) -> None:
    assert _job(steps=steps).steps == steps
    with pytest.raises(ConfigError, match="the phases of 'int8 none@70%' begin with the steps"):
        _job(steps=1, compression="int8 none@70%")


def test_name_defaults_to_the_models_class() -> None:
    assert _job().name == "linear"


def test_loss_weight_by_tokens() -> None:
    assert fusion.tokens("labels") == LossWeightSpec("labels", -100)
    assert fusion.tokens("labels", ignore=0) == LossWeightSpec("labels", 0)
    with pytest.raises(ConfigError, match="name of a data field"):
        fusion.tokens("")
