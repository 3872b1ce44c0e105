"""Costs, shapes and gradient paths of captured operators, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusion.capture import Captured, capture
from fusion.graph.dag import Cost, TensorSpec

B, C = 8, 4
FLOAT = 4


class Model(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.ones(C))
        self.linear = nn.Linear(C, 3)
        self.register_buffer("scale", torch.ones(C))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.body(self, x, rows).sum()


def captured(body: Callable[..., Tensor]) -> Captured:
    batch = {"x": torch.ones(2, C), "rows": torch.tensor([[0, 1]] * 2)}
    return capture(Model(body), batch, micro_batch=B)


def costs(result: Captured) -> dict[str, Cost]:
    return {op.name: op.cost for op in result.graph.operators}


def saved(result: Captured) -> list[int]:
    return [op.cost.saved_bytes for op in result.graph.operators]


def test_a_linear_layer_costs_two_operations_per_weight_and_sample() -> None:
    cost = costs(captured(lambda m, x, rows: m.linear(x * m.w)))["aten.linear.default"]
    assert cost.forward_flops == 2 * B * C * 3
    assert cost.backward_flops == 2 * cost.forward_flops
    assert cost.moved_bytes == FLOAT * (B * C + C * 3 + 3 + B * 3)


def test_without_a_gradient_for_its_input_the_backward_costs_half() -> None:
    cost = costs(captured(lambda m, x, rows: m.linear(x)))["aten.linear.default"]
    assert cost.backward_flops == cost.forward_flops == 2 * B * C * 3


def test_what_exists_anyway_is_not_saved() -> None:
    # x, w and scale: a batch field, a parameter and a buffer; their product is kept by the second multiplication
    result = captured(lambda m, x, rows: (x * m.w) * (m.scale * m.w))
    assert saved(result) == [0, 0, FLOAT * (B * C + C), 0]


def test_a_tensor_counts_once_at_the_first_operator_that_keeps_it() -> None:
    # exp keeps its result, which both squares keep again; abs keeps the square
    result = captured(lambda m, x, rows: ((x * m.w).exp() ** 2 + 1).abs() + 0)
    assert [op.name for op in result.graph.operators][1:4] == [
        "aten.exp.default",
        "aten.pow.Tensor_Scalar",
        "aten.add.Tensor",
    ]
    assert saved(result)[1:5] == [FLOAT * B * C, 0, 0, FLOAT * B * C]


def test_a_view_that_is_kept_keeps_its_whole_memory() -> None:
    def body(m: Model, x: Tensor, rows: Tensor) -> Tensor:
        y = x * m.w
        return y[:, :1] * y[:, 1:2]

    assert costs(captured(body))["aten.mul.Tensor"].saved_bytes == FLOAT * B * C


def test_nothing_is_saved_where_no_gradient_flows() -> None:
    def body(m: Model, x: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * m.w).exp()
        return x * m.w + scale

    result = captured(body)
    assert costs(result)["aten.exp.default"].saved_bytes == 0
    (exp,) = [op for op in result.graph.operators if op.name == "aten.exp.default"]
    assert not result.graph.values[exp.outputs[0]].requires_grad


def test_dropout_keeps_its_mask() -> None:
    result = captured(lambda m, x, rows: nn.functional.dropout(x * m.w, 0.5))
    assert costs(result)["fusion.dropout.default"].saved_bytes == FLOAT * B * C


def test_integer_values_and_their_results_carry_no_gradient() -> None:
    result = captured(lambda m, x, rows: m.w[rows.clamp(max=2)])
    graph = result.graph
    (clamp,) = [op for op in graph.operators if op.name == "aten.clamp.default"]
    (index,) = [op for op in graph.operators if op.name == "aten.index.Tensor"]
    assert graph.values[clamp.outputs[0]].spec == TensorSpec("int64", (B, 2))
    assert not graph.values[clamp.outputs[0]].requires_grad
    assert graph.values[index.outputs[0]].spec == TensorSpec("float32", (B, 2))
    assert graph.values[index.outputs[0]].requires_grad


def test_a_shape_that_depends_on_the_data_is_stated_as_the_largest_possible() -> None:
    def body(m: Model, x: Tensor, rows: Tensor) -> Tensor:
        y = x * m.w
        (found,) = torch.where(rows[:, 0] == 0)
        return y[found].sum() + y[y > 1].sum() + torch.masked_select(y, y > 2).sum() + torch.nonzero(y).sum()

    graph = captured(body).graph
    shapes = {op.name: graph.values[op.outputs[0]].spec.shape for op in graph.operators}  # type: ignore[union-attr]
    assert shapes["aten.where.default"] == (B,)
    assert shapes["aten.masked_select.default"] == (B * C,)
    assert shapes["aten.nonzero.default"] == (B * C, 2)
    indexed = [graph.values[op.outputs[0]].spec for op in graph.operators if op.name == "aten.index.Tensor"]
    assert [spec.shape for spec in indexed if spec] == [(B, C), (B * C,)]
