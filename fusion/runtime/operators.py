"""From a name in the operators' table to a call: the only place where a graph meets torch.

Names are looked up in a dictionary that is made from our own table, never with getattr on text from a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fusion.base.errors import GraphError
from fusion.graph.dag import Argument, Device, DType, Layout, MemoryFormat, Operator, Ref
from fusion.graph.integers import ARITHMETIC
from fusion.graph.operators import TABLE, argument_of

Call = Callable[..., Any]


def dropout(generator: torch.Generator, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Zero elements of `x` with probability `p` by the generator's numbers, and scale the others by 1 / (1 - p).

    Drawn like torch draws its own dropout, but from a generator that the caller has seeded.
    """
    if not train or p == 0.0:
        return x
    if p == 1.0:
        return x * torch.zeros_like(x)
    if generator.device == x.device:
        noise = torch.empty_like(x)
    else:  # strict mode across kinds of devices: everyone draws with the CPU's generator
        noise = torch.empty_like(x, device=generator.device)
    noise.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
    return x * noise.to(x.device)


@cache
def _calls() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name in TABLE:
        space, _, rest = name.partition(".")
        if space == "aten":
            packet, _, overload = rest.rpartition(".")
            calls[name] = getattr(getattr(torch.ops.aten, packet), overload)
    calls.update(ARITHMETIC)
    calls["fusion.dropout.default"] = dropout
    return calls


def find_call(name: str) -> Call:
    """Return the function behind an operator of the table; GraphError for any other name."""
    try:
        return _calls()[name]
    except KeyError:
        raise GraphError(f"operator {name[:80]!r} is not in the table of operators") from None


#: For evaluation: arguments of operators that behave otherwise in training, and what they become.
_EVAL_ARGUMENTS: dict[str, dict[str, Argument]] = {
    "fusion.dropout.default": {"train": False},
    "aten.batch_norm.default": {"training": False},
    "aten.instance_norm.default": {"use_input_stats": False},
    "aten.scaled_dot_product_attention.default": {"dropout_p": 0.0},
    "aten.lstm.input": {"train": False},
    "aten.gru.input": {"train": False},
    "aten.rnn_tanh.input": {"train": False},
    "aten.rnn_relu.input": {"train": False},
    "aten.rrelu.default": {"training": False},
    "aten.alpha_dropout.default": {"train": False},
    "aten.feature_dropout.default": {"train": False},
    "aten.feature_alpha_dropout.default": {"train": False},
}
NORMALISE_BY_BATCH = ("aten.batch_norm.default", "aten.instance_norm.default")


def for_evaluation(op: Operator) -> Operator:
    """Return the operator as it runs in evaluation: no dropout, batch norm by its running statistics."""
    changes = _EVAL_ARGUMENTS.get(op.name)
    if changes is None or (op.name in NORMALISE_BY_BATCH and argument_of(op, "running_mean") is None):
        return op  # without running statistics there is only the batch to normalise by
    arguments = list(op.arguments)
    keywords = dict(op.keywords)
    for name, value in changes.items():
        place = TABLE[op.name].index_of[name]
        if place < len(arguments):
            arguments[place] = value
        elif name in keywords:
            keywords[name] = value
    return replace(op, arguments=tuple(arguments), keywords=tuple(keywords.items()))


_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
    )
}


def constant(argument: Argument, device: torch.device) -> Any:
    """Return the Python object for an argument that is not a value."""
    match argument:
        case DType(name):
            return _DTYPES[name]
        case MemoryFormat(name):
            return _MEMORY_FORMATS[name]
        case Layout():
            return torch.strided
        case Device():
            return device
        case tuple():
            return [constant(item, device) for item in argument]
        case Ref():
            raise AssertionError("a value is not a constant")
        case _:
            return argument


def dtype_of(name: str) -> torch.dtype:
    """Return torch's element type of this name."""
    return _DTYPES[name]  # type: ignore[no-any-return]
