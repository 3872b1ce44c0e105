"""How a batch reaches the model, and where the loss comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.base.errors import CaptureError
from fusion.capture import Captured, capture
from fusion.graph.dag import InputKind
from tests.support.interpreter import interpret

X = torch.arange(12.0).reshape(3, 4)
Y = torch.ones(3, 4)


class Linear(nn.Module):
    """y = x * w, with w = 2 so that losses are easy to work out."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 2.0))


def model_with(forward: Callable[..., Any]) -> nn.Module:
    return type("Model", (Linear,), {"forward": forward})()


def fields_of(captured: Captured) -> list[str]:
    return [item.name for item in captured.graph.inputs if item.kind is InputKind.BATCH]


def mean_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return outputs.mean()


def test_fields_reach_forward_by_name_whatever_their_order() -> None:
    model = model_with(lambda self, a, b: (self.w * a - b).sum())
    captured = capture(model, {"b": Y, "a": X}, micro_batch=3)
    assert interpret(captured, {"b": Y, "a": X}).loss == 2 * X.sum() - 12


def test_other_fields_reach_only_the_loss() -> None:
    model = model_with(lambda self, x, **unused: self.w * x + len(unused))

    def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (outputs - batch["target"]).sum()

    captured = capture(model, {"x": X, "target": Y}, loss=loss, micro_batch=3)
    assert interpret(captured, {"x": X, "target": Y}).loss == 2 * X.sum() - 12
    assert fields_of(captured) == ["x", "target"]


def test_a_field_that_nothing_reads_is_no_input() -> None:
    captured = capture(model_with(lambda self, x: (self.w * x).sum()), {"x": X, "id": Y}, micro_batch=3)
    assert fields_of(captured) == ["x"]


def test_without_a_matching_name_fields_go_in_order_to_the_required_arguments() -> None:
    model = model_with(lambda self, first, second, third=3: (self.w * first).sum() - second.sum() + third)
    captured = capture(model, {"image": X, "noise": Y, "label": Y}, micro_batch=3)
    assert interpret(captured, {"image": X, "noise": Y, "label": Y}).loss == 2 * X.sum() - 12 + 3
    assert fields_of(captured) == ["image", "noise"]


@pytest.mark.parametrize(
    ("forward", "missing"),
    [
        (lambda self, x, mask: self.w.sum(), "'mask'"),
        (lambda self, x, *, mask: self.w.sum(), "'mask'"),
        (lambda self, a, b, c: self.w.sum(), "'c'"),
    ],
)
def test_a_missing_argument_is_named(forward: Callable[..., Any], missing: str) -> None:
    with pytest.raises(CaptureError, match=f"forward needs the argument {missing}.*'x', 'y'"):
        capture(model_with(forward), {"x": X, "y": Y}, micro_batch=1)


def test_fields_that_forward_has_no_argument_for_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"none of its fields \('y'\) is an argument of forward"):
        capture(model_with(lambda self, x=None: self.w.sum()), {"y": Y}, micro_batch=1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: {"loss": loss, "logits": loss * 2},
        lambda loss: SimpleNamespace(loss=loss),
    ],
    ids=["scalar", "mapping", "attribute"],
)
def test_the_loss_may_be_the_models_own(wrap: Callable[[Tensor], Any]) -> None:
    captured = capture(model_with(lambda self, x: wrap((self.w * x).mean())), {"x": X}, micro_batch=3)
    assert interpret(captured, {"x": X}).loss == 2 * X.mean()


def test_a_given_loss_wins_over_the_models_own() -> None:
    model = model_with(lambda self, x: {"loss": x.sum(), "logits": self.w * x})
    captured = capture(model, {"x": X}, loss=lambda outputs, batch: outputs["logits"].mean(), micro_batch=3)
    assert interpret(captured, {"x": X}).loss == 2 * X.mean()


@pytest.mark.parametrize(
    "output",
    [lambda x: {"logits": x}, lambda x: (x.sum(), x), lambda x: SimpleNamespace(loss=None), lambda x: x],
    ids=["no loss field", "tuple", "loss is None", "not a scalar"],
)
def test_no_loss_to_be_found_tells_the_three_ways(output: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"scalar from forward.*\.loss field.*pass loss="):
        capture(model_with(lambda self, x: output(self.w * x)), {"x": X}, micro_batch=1)


def test_a_loss_that_is_not_a_scalar_is_refused_with_its_shape() -> None:
    with pytest.raises(CaptureError, match=r"shape \(batch, 4\)"):
        capture(model_with(lambda self, x: self.w * x), {"x": X}, loss=lambda outputs, _: outputs, micro_batch=1)


def test_an_integer_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"int64 tensor of shape \(\)"):
        capture(model_with(lambda self, x: (self.w * x).argmax()), {"x": X}, micro_batch=1)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    loss = nn.Linear(4, 1)
    with pytest.raises(CaptureError, match="parameters of its own; make it part of the model"):
        capture(model_with(lambda self, x: self.w * x), {"x": X}, loss=loss, micro_batch=1)


def test_a_loss_module_with_class_weights_brings_them_as_a_constant() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            return (outputs * self.scale).sum()

    captured = capture(model_with(lambda self, x: self.w * x), {"x": Y}, loss=Weighted(), micro_batch=3)
    assert interpret(captured, {"x": Y}).loss == 2 * 3 * (1 + 2 + 3 + 4)
    assert torch.equal(captured.tensors["$constant.0"], torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "no fields"),
        ({"x": torch.tensor(1.0)}, "field 'x' must be a tensor whose first dimension counts samples"),
        ({"x": torch.zeros(0, 4)}, "field 'x' must be a tensor whose first dimension counts samples"),
        ({"x": [1.0, 2.0]}, "field 'x' must be a tensor"),
        ({"x": X, "y": torch.ones(2)}, r"must be the same in every field, but is \{'x': 3, 'y': 2\}"),
        ({"x": X.to(torch.complex128)}, "field 'x' has dtype complex128"),
        ({"x": X, "w": Y}, "field 'w' has the name of a parameter; rename the field"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(batch: dict[str, Any], message: str) -> None:
    model = model_with(lambda self, x, w=1.0: (self.w * x * w).sum())
    with pytest.raises(CaptureError, match=message):
        capture(model, batch, micro_batch=1)


def test_a_micro_batch_below_one_is_refused() -> None:
    with pytest.raises(CaptureError, match="micro_batch: 0 is not allowed"):
        capture(model_with(lambda self, x: (self.w * x).sum()), {"x": X}, micro_batch=0)


def test_another_default_dtype_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(CaptureError, match=r"torch\.float64; nodes compute with torch\.float32"):
            capture(model_with(lambda self, x: (self.w * x).sum()), {"x": X}, micro_batch=1)
    finally:
        torch.set_default_dtype(torch.float32)
