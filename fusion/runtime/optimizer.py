"""The optimizer of one stage: torch's own, over the parameters that the stage holds, driven by the step's number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from fusion.protocol.job import OPTIMIZER_SETTINGS, JobSpec, OptimizerSpec


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What all stages do with the step's gradients, decided once for all of them."""

    apply: bool  #: False: some gradient is not finite, and nobody changes anything
    factor: float  #: that every gradient is multiplied by, at most 1
    norm: float  #: the global 2-norm before that


OPTIMIZER_PREFIX = "$optimizer."


def state_name(key: str, parameter: str) -> str:
    """Return the name in files of a parameter's optimizer tensor, such as "$optimizer.exp_avg.head.weight"."""
    return f"{OPTIMIZER_PREFIX}{key}.{parameter}"


def split_state_name(name: str) -> tuple[str, str]:
    """Return the optimizer's key and the parameter that `state_name` was made of."""
    key, _, parameter = name.removeprefix(OPTIMIZER_PREFIX).partition(".")
    return key, parameter


def decide(sums_of_squares: Iterable[float], grad_clip: float) -> StepVerdict:
    """Return the verdict over the per-parameter sums of squares of all stages.

    `math.fsum` rounds once, so the order and the grouping of the sums, and with them the cut, do not matter. The factor
    is that of `torch.nn.utils.clip_grad_norm_`.
    """
    sums = list(sums_of_squares)
    if not all(map(math.isfinite, sums)):
        return StepVerdict(False, 1.0, math.nan)
    norm = math.sqrt(math.fsum(sums))
    factor = min(1.0, grad_clip / (norm + 1e-6)) if grad_clip else 1.0
    return StepVerdict(True, factor, norm)


def sums_of_squares(gradients: Iterable[torch.Tensor]) -> list[float]:
    """Return each gradient's sum of squares, accumulated in float64 where the device has it."""
    norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)) for gradient in gradients]
    if not norms:
        return []
    return [norm * norm for norm in torch.stack([norm.to("cpu", torch.float64) for norm in norms]).tolist()]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


class StageOptimizer:
    """Applies a job's optimizer and learning-rate schedule to a stage's trainable parameters."""

    def __init__(self, job: JobSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        self._job = job
        trainable = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        self._trainable = trainable
        self._parameters = list(trainable.values())
        self._optimizer = _make(job.optimizer, trainable) if trainable else None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`, from 1."""
        return self._job.optimizer.learning_rate * self._job.lr_schedule.factor(step, self._job.steps)

    def apply(self, step: int, factor: float) -> None:
        """Scale the gradients by `factor` and update the parameters in place."""
        if self._optimizer is None:
            return
        if factor < 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything beside the parameters that the next update depends on, by OPTIMIZER_PREFIX names."""
        if self._optimizer is None:
            return {}
        return {
            state_name(key, name): value
            for name, parameter in self._trainable.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned, under any cut; tensors of parameters held elsewhere are ignored."""
        if self._optimizer is None:
            return
        for full_name, value in tensors.items():
            key, name = split_state_name(full_name)
            parameter = self._trainable.get(name)
            if parameter is not None:
                device = "cpu" if key == "step" else parameter.device
                self._optimizer.state[parameter][key] = value.to(device, copy=True)


def _make(spec: OptimizerSpec, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
    settings = OPTIMIZER_SETTINGS[spec.kind] | spec.settings
    decay = settings.pop("weight_decay")
    spared = {name for name in parameters if any(fnmatchcase(name, pattern) for pattern in spec.no_decay)}
    groups: list[dict[str, Any]] = []
    for names, group_decay in ((parameters.keys() - spared, decay), (spared, 0.0)):
        if names:
            members = [parameters[name] for name in parameters if name in names]
            groups.append({"params": members, "weight_decay": group_decay})
    if spec.kind == "sgd":
        return torch.optim.SGD(
            groups,
            lr=spec.learning_rate,
            momentum=settings["momentum"],
            dampening=settings["dampening"],
            nesterov=bool(settings["nesterov"]),
        )
    kind = torch.optim.AdamW if spec.kind == "adamw" else torch.optim.Adam
    betas = (settings["beta1"], settings["beta2"])
    return kind(groups, lr=spec.learning_rate, betas=betas, eps=settings["eps"])
