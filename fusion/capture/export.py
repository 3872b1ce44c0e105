"""Run torch.export over a model and its loss, leave everything as it was, and explain what goes wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from fusion.base.errors import CaptureError
from fusion.capture.entry import Step
from fusion.capture.places import place_of_error

_ASSIGNED = re.compile(r"self\.([\w.]+)")
_LOGGERS = ("torch.export", "torch._export", "torch.fx", "torch._dynamo", "torch._subclasses", "torch.fx.experimental")


class NotCapturableError(Exception):
    """Something in the model's own code that a graph cannot hold: what it does, and what to do instead."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Exported:
    """What torch.export made of a model."""

    program: ExportedProgram
    dynamic: bool  #: whether the batch dimension is a symbol
    assigned: tuple[str, ...]  #: plain attributes that forward assigned a tensor to, last part of the name


def export_step(step: Step, fields: tuple[Tensor, ...], *, dynamic: bool) -> Exported:
    """Export `step` with the batch dimension as a symbol, or fixed at that of `fields`.

    Whatever goes wrong is raised as it is; `explain` makes a CaptureError of it.
    """
    shape = {0: Dim("batch", min=1)} if dynamic else None
    shapes = {"fields": tuple(shape for _ in fields)}
    with _quiet() as caught, _neutral_state(), _only_what_a_graph_holds():
        program = torch.export.export(step, (fields,), dynamic_shapes=shapes, strict=False)
    return Exported(program, dynamic, tuple(_assigned_attributes(caught)))


def explain(error: Exception, model: nn.Module) -> CaptureError:
    """Return one clear line for an exception out of `export_step`: where in the model, what, and what to change."""
    if isinstance(error, CaptureError):
        return error
    what, remedy = _what_and_remedy(error)
    explained = CaptureError(f"{place_of_error(error, model)}: {what}; {remedy}")
    explained.__cause__ = error
    return explained


def _what_and_remedy(error: Exception) -> tuple[str, str]:
    if isinstance(error, NotCapturableError):
        return error.what, error.remedy
    text = str(error).strip() or type(error).__name__
    first_line = " ".join(text.splitlines()[0].split())
    if "data-dependent" in text or type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return (
            "it decides by the values of a tensor (an if, a loop, .item(), int() or a shape that depends on data)",
            "use torch.where, masks or fixed shapes instead, so that every batch runs the same operators",
        )
    if "fake tensor in the exported program" in text or ".numpy() is not supported" in text:
        return (
            "it takes a tensor out of PyTorch's sight (.data, .numpy() or a copy kept elsewhere)",
            "use .detach() and PyTorch operators instead",
        )
    return f"{type(error).__name__}: {first_line[:300]}", "run the model once on this batch to see whether it works at all"


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Keep torch.export's logs and graph dumps off the user's screen: errors carry what matters."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_LOGGERS)]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL + 1)
            yield caught
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _assigned_attributes(caught: list[warnings.WarningMessage]) -> Iterator[str]:
    for warning in caught:
        text = str(warning.message)
        if "assigned during export" in text:
            yield from (name.rpartition(".")[2] for name in _ASSIGNED.findall(text))


@contextmanager
def _neutral_state() -> Iterator[None]:
    """Export in the modes that training uses, and leave modes and random states as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            yield
            if random.getstate() != python_state or not _same(np.random.get_state(), numpy_state):  # noqa: NPY002
                raise CaptureError(
                    "model: its forward draws from Python's or NumPy's random numbers, which a graph would freeze; "
                    "draw with torch (torch.rand, dropout) instead"
                )
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class _Refusals(TorchFunctionMode):
    """Refuses calls that torch.export drops or freezes without a word, which would change the gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise NotCapturableError(
                "it registers a hook on a tensor's gradient, which a graph cannot hold",
                "remove the hook, or compute the effect in forward",
            )
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            raise NotCapturableError(
                "it runs a backward pass inside forward, which a graph cannot hold",
                "keep forward to the forward pass",
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _only_what_a_graph_holds() -> Iterator[None]:
    """Refuse custom backward passes (export would differentiate their forward instead), and see through checkpoints."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run: Callable[..., Any] = args[0]
            return run(*args[2:])  # a re-entrant checkpoint: (function, preserve_rng_state, *arguments)
        raise NotCapturableError(
            f"it uses {cls.__name__}, a torch.autograd.Function, whose own backward a graph cannot hold",
            "write it with PyTorch operators, for example x + (f(x) - x).detach() for a straight-through estimate",
        )

    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        with _Refusals():
            yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
