"""The small settings of a job: optimizers, learning-rate schedules, and what the loss counts by. No torch in here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.base.errors import ConfigError
from fusion.protocol.job import LossWeightSpec, LrScheduleSpec, OptimizerSpec, check_optimizer

_MOST_FACTORS = 400_000  #: a job's message holds 4 MiB


#: What the same thing is called elsewhere.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "scheduler": "lr_schedule",
    "max_steps": "steps",
}


def reject_unknown(call: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first keyword that `call` does not know, with the nearest one that it does."""
    names = sorted(known)
    for name in unknown:
        near = [_OTHER_NAMES.get(name, ""), *difflib.get_close_matches(name, names, n=1, cutoff=0.5)]
        meant = next((item for item in near if item in names), "")
        hint = f"did you mean {meant!r}?" if meant else f"it takes {', '.join(names)}"
        raise ConfigError(f"{call} has no setting {name!r}; {hint}")


class Optimizer:
    """An optimizer with its settings. Use `AdamW`, `Adam` or `SGD`; names and defaults are those of torch.optim."""

    def __init__(self, spec: OptimizerSpec) -> None:
        check_optimizer(spec)
        self.spec = spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.learning_rate:g}, {self.spec.settings})"


class _AdamFamily(Optimizer):
    _kind: str
    _weight_decay: float

    def __init__(
        self,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        no_decay: Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        call = type(self).__name__
        reject_unknown(call, unknown, ("lr", "betas", "eps", "weight_decay", "no_decay"))
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ConfigError(f"{call} betas must be two numbers below 1, got {betas!r}")
        decay = self._weight_decay if weight_decay is None else weight_decay
        settings = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}
        super().__init__(OptimizerSpec(self._kind, lr, settings, _patterns(no_decay)))


class AdamW(_AdamFamily):
    """torch.optim.AdamW. `no_decay` are glob patterns of parameter names without weight decay, such as "*.bias"."""

    _kind, _weight_decay = "adamw", 0.01


class Adam(_AdamFamily):
    """torch.optim.Adam. `no_decay` are glob patterns of parameter names without weight decay, such as "*.bias"."""

    _kind, _weight_decay = "adam", 0.0


class SGD(Optimizer):
    """torch.optim.SGD. `no_decay` are glob patterns of parameter names without weight decay, such as "*.bias"."""

    def __init__(
        self,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        no_decay: Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        known = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "no_decay")
        reject_unknown("SGD", unknown, known)
        if nesterov and (not momentum or dampening):
            raise ConfigError("SGD nesterov=True needs momentum above 0 and dampening=0")
        settings = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": 1.0 if nesterov else 0.0,
        }
        super().__init__(OptimizerSpec("sgd", lr, settings, _patterns(no_decay)))


def _patterns(no_decay: Sequence[str]) -> tuple[str, ...]:
    patterns = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"no_decay must be glob patterns over parameter names, got {pattern!r}")
    return patterns


@dataclass(frozen=True, slots=True)
class Constant:
    """The same learning rate throughout, after `warmup` steps in which it grows linearly."""

    warmup: int = 0


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear fall to `final` times the learning rate at the last step, after `warmup` steps of linear growth."""

    warmup: int = 0
    final: float = 0.0


@dataclass(frozen=True, slots=True)
class Cosine:
    """A fall along half a cosine to `final` times the learning rate, after `warmup` steps of linear growth."""

    warmup: int = 0
    final: float = 0.0


LrSchedule = Constant | Linear | Cosine | Callable[[int], float] | Sequence[float] | None


def lr_schedule_spec(schedule: LrSchedule, steps: int) -> LrScheduleSpec:
    """Return a schedule as data.

    A callable is called here, once for each step from 1 to `steps`, and a list has one factor for each of them.
    ConfigError for anything else, or for a callable that does not return numbers.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        return LrScheduleSpec()  # the check of the settings refuses `steps` itself
    match schedule:
        case None:
            return LrScheduleSpec()
        case Constant(warmup):
            return LrScheduleSpec("constant", warmup)
        case Linear(warmup, final):
            return LrScheduleSpec("linear", warmup, final)
        case Cosine(warmup, final):
            return LrScheduleSpec("cosine", warmup, final)
    if (callable(schedule) or isinstance(schedule, Sequence)) and steps > _MOST_FACTORS:
        raise ConfigError(
            f"lr_schedule: a table of {steps} factors is too long (at most {_MOST_FACTORS}); "
            f"use fusion.Constant, Linear or Cosine"
        )
    if isinstance(schedule, Sequence) and not isinstance(schedule, str):
        return LrScheduleSpec("table", factors=tuple(_factor(value) for value in schedule))
    if callable(schedule) and not isinstance(schedule, type):
        return LrScheduleSpec("table", factors=tuple(_factor(schedule(step)) for step in range(1, steps + 1)))
    raise ConfigError(
        f"lr_schedule must be fusion.Constant(), Linear() or Cosine(), a function of the step, or a list of factors; "
        f"got {schedule!r:.60}"
    )


def _factor(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_schedule must give a number for each step, got {value!r:.40}") from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How often a job's whole state is put on the coordinator's disk, and how many of the latest stay there."""

    every_steps: int  #: 0: never
    keep: int = 3


def checkpoint_of(value: int | Checkpoint | None) -> Checkpoint:
    """Return what `Job(checkpoint=...)` stands for; ConfigError for what it cannot be."""
    made = Checkpoint(value or 0) if value is None or isinstance(value, int) else value
    if not isinstance(made, Checkpoint) or isinstance(value, bool):
        raise ConfigError(f"checkpoint must be a number of steps or fusion.Checkpoint(), got {value!r:.60}")
    for name, number, least in (("every_steps", made.every_steps, 0), ("keep", made.keep, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError(f"checkpoint {name} must be a whole number from {least} on, got {number!r:.40}")
    return made


def tokens(field: str, *, ignore: int = -100) -> LossWeightSpec:
    """Let micro-batches count by the entries of `field` that are not `ignore`, for `Job(loss_weight=...)`.

    Needed where the loss is a mean over tokens and micro-batches may hold unlike numbers of them.
    """
    if not isinstance(field, str) or not field:
        raise ConfigError(f"tokens() takes the name of a data field, got {field!r}")
    return LossWeightSpec(field, ignore)
