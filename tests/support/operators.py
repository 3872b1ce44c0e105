"""Calls of torch's operators by the table's names, seen as the table's own data types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.base.ids import ValueId
from fusion.graph.dag import Argument, DType, Operator, Ref, TensorSpec, Value


def overload(name: str) -> Any:
    """torch's overload for a name such as "aten.linear.default"."""
    namespace, base, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), kind)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class Call:
    """Runs an operator and describes the call: `operator`, over `values`; `results` are its tensors."""

    def __init__(self, name: str, *arguments: Any, no_grad: bool = False, **keywords: Any) -> None:
        self.values: list[Value] = []
        described = tuple(self._describe(item) for item in arguments)
        named = tuple((key, self._describe(item)) for key, item in keywords.items())
        result = overload(name)(*arguments, **keywords)
        self.results: Sequence[torch.Tensor] = result if isinstance(result, (tuple, list)) else (result,)
        outputs = tuple(self._value(item) for item in self.results)
        self.operator = Operator(name, described, named, outputs, no_grad=no_grad)

    def _value(self, tensor: torch.Tensor) -> ValueId:
        self.values.append(Value(spec_of(tensor), requires_grad=tensor.requires_grad))
        return ValueId(len(self.values) - 1)

    def _describe(self, item: Any) -> Argument:
        if isinstance(item, torch.Tensor):
            return Ref(self._value(item))
        if isinstance(item, (list, tuple)):
            return tuple(self._describe(part) for part in item)
        if isinstance(item, torch.dtype):
            return DType(str(item).removeprefix("torch."))
        return item  # type: ignore[no-any-return]
