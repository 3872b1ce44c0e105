"""Run torch.export over a model and its loss, leave everything as it was, and explain what goes wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import Dim, ExportedProgram

from fusion.base.errors import CaptureError
from fusion.capture.entry import Step
from fusion.capture.guards import NotCapturableError
from fusion.capture.places import came_through, place_of_error, readable_places

_ASSIGNED = re.compile(r"self\.([\w.]+)")
_LOGGERS = ("torch.export", "torch._export", "torch.fx", "torch._dynamo", "torch._subclasses", "torch.fx.experimental")


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
    with _quiet() as caught, readable_places():
        program = torch.export.export(step, (fields,), dynamic_shapes=shapes, strict=False)
    return Exported(program, dynamic, tuple(_assigned_attributes(caught)))


def explain(error: Exception, model: nn.Module) -> CaptureError:
    """Return one clear line for an exception out of `export_step`: where in the model, what, and what to change."""
    what, remedy = _what_and_remedy(error)
    return CaptureError(f"{place_of_error(error, model)}: {what}; {remedy}")


def _what_and_remedy(error: Exception) -> tuple[str, str]:
    if isinstance(error, NotCapturableError):
        return error.what, error.remedy
    if came_through(error, "_higher_order_ops"):
        return (
            "it uses a control-flow operator (torch.cond, while_loop, scan, ...), which cannot be captured",
            "use torch.where, masks or a plain Python loop of fixed length",
        )
    text = str(error).strip() or type(error).__name__
    first_line = " ".join(text.splitlines()[0].split())
    if "data-dependent" in text or isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            "it decides by the values of a tensor (an if, a loop, .item(), int() or a shape that depends on data)",
            "use torch.where, masks or fixed shapes instead, so that every batch runs the same operators",
        )
    if "fake tensor in the exported program" in text or ".numpy() is not supported" in text:
        return (
            "it takes a tensor out of PyTorch's sight (.data, .numpy() or a copy kept elsewhere)",
            "use .detach() and PyTorch operators instead",
        )
    return f"{type(error).__name__}: {first_line[:300]}", "see whether the model runs on this batch by itself"


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
def neutral_state() -> Iterator[None]:
    """Run the block in the modes that training uses, and leave modes and random states as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            yield
            if random.getstate() != python_state or not _same(np.random.get_state(), numpy_state):
                raise CaptureError(
                    "model: its forward draws from Python's or NumPy's random numbers, which a graph would freeze; "
                    "draw with torch (torch.rand, dropout) instead"
                )
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
