"""A tiny reference interpreter of captured graphs: what any executor has to compute, in the plainest way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.capture import Captured
from fusion.graph.dag import Argument, Device, DType, InputKind, Layout, MemoryFormat, Operator, Ref


@dataclass(frozen=True)
class Outcome:
    """What one micro-batch gives: the loss, gradients by parameter name, the buffers after it, and every value."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    values: dict[int, Any]


def interpret(captured: Captured, batch: Mapping[str, Tensor], *, seed: int = 0) -> Outcome:
    """Run forward and backward over copies of the captured tensors, drawing random numbers from `seed` on."""
    graph = captured.graph
    values: dict[int, Any] = {}
    for item in graph.inputs:
        if item.kind is InputKind.BATCH_SIZE:
            values[item.value] = len(next(iter(batch.values())))
        elif item.kind is InputKind.BATCH:
            values[item.value] = batch[item.name]
        else:
            tensor = captured.tensors[item.name].clone()
            values[item.value] = tensor.requires_grad_(graph.values[item.value].requires_grad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for op in graph.operators:
            _run(op, values)
    loss = values[graph.loss]
    loss.backward()
    by_kind = {kind: [item for item in graph.inputs if item.kind is kind] for kind in InputKind}
    return Outcome(
        loss.detach(),
        {item.name: values[item.value].grad for item in by_kind[InputKind.PARAMETER]},
        {item.name: values[item.value] for item in by_kind[InputKind.BUFFER]},
        values,
    )


def _run(op: Operator, values: dict[int, Any]) -> None:
    with ExitStack() as stack:
        if op.no_grad:
            stack.enter_context(torch.no_grad())
        if op.autocast_dtype == "off":
            stack.enter_context(torch.autocast("cpu", enabled=False))
        elif op.autocast_dtype:
            stack.enter_context(torch.autocast("cpu", dtype=getattr(torch, op.autocast_dtype)))
        result = resolve(op.name)(
            *(_value(item, values) for item in op.arguments), **{key: _value(item, values) for key, item in op.keywords}
        )
    results = result if isinstance(result, (tuple, list)) else [result]
    values.update(zip(op.outputs, results, strict=True))


def resolve(name: str) -> Callable[..., Any]:
    """Return the function behind an operator's name."""
    namespace, function, *overload = name.split(".")
    if namespace == "python":
        return {"max": max, "min": min}.get(function) or getattr(operator, function)
    if name == "fusion.dropout.default":
        return torch.nn.functional.dropout
    assert namespace == "aten", name
    return getattr(getattr(torch.ops.aten, function), overload[0])


def _value(argument: Argument, values: dict[int, Any]) -> Any:
    match argument:
        case Ref(value):
            return values[value]
        case tuple():
            return [_value(item, values) for item in argument]
        case DType(name) | MemoryFormat(name) | Layout(name):
            return getattr(torch, name)
        case Device():
            return torch.device("cpu")
        case _:
            return argument
