"""FLOP rules against torch's own counter, forward and backward, and the bytes that the forward moves."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fusion.base.ids import ValueId
from fusion.graph.costs import flops, moved_bytes, operator_cost
from fusion.graph.dag import Operator, Ref, TensorSpec, Value
from tests.support.operators import Call


def _forward_count(*shapes: Any, **_: Any) -> int:
    return int(sdpa_flop_count(*shapes[:3]))


def _backward_count(*shapes: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(*shapes[:4]))


#: torch has these formulas for the kernels of GPUs, and leaves out the one that a CPU runs.
ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_count,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_count,
}


def counted(name: str, *arguments: Any, **keywords: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """Our (forward, backward) and torch's."""
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        call = Call(name, *arguments, **keywords)
        forward = counter.get_total_flops()
        total = sum(item.sum() for item in call.results if item.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        backward = counter.get_total_flops() - forward
    return flops(call.operator, call.values), (forward, backward)


def tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


PRODUCTS = [
    ("aten.linear.default", [(5, 3), (4, 3)]),
    ("aten.linear.default", [(2, 5, 3), (4, 3), (4,)]),
    ("aten.mm.default", [(5, 3), (3, 7)]),
    ("aten.bmm.default", [(2, 5, 3), (2, 3, 7)]),
    ("aten.matmul.default", [(5, 3), (3, 7)]),
    ("aten.matmul.default", [(2, 6, 5, 3), (3, 7)]),
    ("aten.matmul.default", [(2, 6, 5, 3), (2, 6, 3, 7)]),
    ("aten.matmul.default", [(2, 1, 5, 3), (6, 3, 7)]),
    ("aten.addmm.default", [(7,), (5, 3), (3, 7)]),
    ("aten.baddbmm.default", [(2, 5, 7), (2, 5, 3), (2, 3, 7)]),
    ("aten.conv1d.default", [(2, 4, 9), (6, 4, 3), (6,)]),
    ("aten.conv2d.default", [(2, 4, 9, 8), (6, 4, 3, 2)]),
    ("aten.conv3d.default", [(2, 4, 5, 6, 7), (3, 4, 2, 2, 2)]),
    ("aten.conv_transpose1d.default", [(2, 4, 9), (4, 6, 3)]),
    ("aten.conv_transpose2d.input", [(2, 4, 9, 8), (4, 6, 3, 2)]),
    ("aten.conv_transpose3d.input", [(2, 4, 3, 4, 5), (4, 3, 2, 2, 2)]),
]


@pytest.mark.parametrize(("name", "shapes"), PRODUCTS)
def test_products_and_convolutions_cost_what_torch_counts_for_every_choice_of_wanted_gradients(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    for wanted in product([True, False], repeat=len(shapes)):
        arguments = [tensor(*shape, grad=grad) for shape, grad in zip(shapes, wanted, strict=True)]
        ours, theirs = counted(name, *arguments)
        assert ours == theirs, wanted
    assert ours[0] > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.conv2d.default", ([1, 1], [2, 1], [0, 1], [1, 2])),
        ("aten.conv2d.padding", ([1, 1], "same")),
        ("aten.conv2d.padding", ([2, 2], "valid")),
    ],
)
def test_strided_padded_and_dilated_convolutions_cost_what_torch_counts(name: str, arguments: tuple[Any, ...]) -> None:
    x, weight, bias = tensor(2, 4, 9, 8), tensor(6, 4, 3, 3), tensor(6)
    rest = (bias, *arguments[1:]) if name.endswith("default") else (bias, *arguments)
    ours, theirs = counted(name, x, weight, *rest)
    assert ours == theirs


def test_a_convolution_of_one_unbatched_sample_costs_what_torch_counts() -> None:
    ours, theirs = counted("aten.conv2d.default", tensor(4, 9, 8), tensor(6, 4, 3, 3))
    assert ours == theirs


@pytest.mark.parametrize("name", ["aten.conv2d.default", "aten.conv_transpose2d.input"])
def test_a_grouped_convolution_costs_as_much_per_gradient_as_forward_where_torch_counts_the_weight_too_high(
    name: str,
) -> None:
    groups = 3
    x, bias = tensor(2, 6, 9, 8), tensor(6)
    weight = tensor(6, 2, 3, 3)
    tail = ([1, 1], [0, 0], [1, 1], groups) if name == "aten.conv2d.default" else ([1, 1], [0, 0], [0, 0], groups)
    (forward, backward), (their_forward, their_backward) = counted(name, x, weight, bias, *tail)
    assert forward == their_forward
    assert backward == 2 * forward
    assert their_backward == forward + groups * forward


EINSUMS = [
    ("ij,jk->ik", [(4, 3), (3, 5)]),
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("...ij,...jk->...ik", [(2, 3, 4, 5), (3, 5, 6)]),
    ("bi,bj->bij", [(2, 3), (2, 4)]),
    ("bij,jk", [(2, 3, 4), (4, 5)]),
    ("ij->ji", [(3, 4)]),
    ("ijk,jl->il", [(3, 4, 6), (4, 5)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("bi,ij,bj->b", [(2, 3), (3, 4), (2, 4)]),
    ("bnd,ndk->bnk", [(2, 1, 4), (3, 4, 5)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EINSUMS)
def test_einsum_costs_what_torch_counts(equation: str, shapes: list[tuple[int, ...]]) -> None:
    for wanted in product([True, False], repeat=len(shapes)):
        tensors = [tensor(*shape, grad=grad) for shape, grad in zip(shapes, wanted, strict=True)]
        ours, theirs = counted("aten.einsum.default", equation, tensors)
        assert ours == theirs, wanted


def test_einsum_follows_the_path_that_it_is_given() -> None:
    shapes = [(2, 3), (3, 40), (40, 5)]
    ours, theirs = counted("aten.einsum.default", "ij,jk,kl->il", [tensor(*s) for s in shapes], path=[1, 2, 0, 1])
    assert ours == theirs
    assert ours[0] == 2 * (3 * 40 * 5 + 2 * 3 * 5)


def test_tensordot_costs_what_torch_counts() -> None:
    ours, theirs = counted("aten.tensordot.default", tensor(2, 3, 4), tensor(4, 3, 5), [1, -1], [1, 0])
    assert ours == theirs
    assert ours == (2 * 2 * 5 * 12, 2 * 2 * 2 * 5 * 12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_costs_what_torch_counts_for_its_fused_kernel(causal: bool, kv_heads: int) -> None:
    query, key, value = tensor(2, 4, 6, 8), tensor(2, kv_heads, 6, 8), tensor(2, kv_heads, 6, 8)
    ours, theirs = counted(
        "aten.scaled_dot_product_attention.default", query, key, value, None, 0.0, causal, enable_gqa=kv_heads != 4
    )
    assert ours == theirs
    scores = 2 * 2 * 4 * 6 * 6 * 8
    assert ours == (2 * scores, 5 * scores)


def test_attention_without_a_wanted_gradient_costs_nothing_backward() -> None:
    query, key, value = (tensor(2, 4, 6, 8, grad=False) for _ in range(3))
    ours, theirs = counted("aten.scaled_dot_product_attention.default", query, key, value)
    assert ours == theirs
    assert ours[1] == 0


@pytest.mark.parametrize(("layers", "bidirectional", "projected"), [(1, False, 0), (2, True, 0), (2, False, 3)])
def test_lstm_costs_what_its_products_cost(layers: int, bidirectional: bool, projected: int) -> None:
    # float64 has no fused kernel on a CPU, so that torch's counter sees the products
    module = torch.nn.LSTM(
        5, 4, layers, bidirectional=bidirectional, batch_first=True, proj_size=projected, dtype=torch.float64
    )
    directions = 2 if bidirectional else 1
    hidden = [
        tensor(layers * directions, 2, projected or 4, dtype=torch.float64),
        tensor(layers * directions, 2, 4, dtype=torch.float64),
    ]
    x = tensor(2, 7, 5, dtype=torch.float64)
    ours, theirs = counted(
        "aten.lstm.input", x, hidden, list(module.parameters()), True, layers, 0.0, True, bidirectional, True
    )
    assert ours == theirs


@pytest.mark.parametrize(("kind", "name"), [(torch.nn.GRU, "aten.gru.input"), (torch.nn.RNN, "aten.rnn_tanh.input")])
def test_other_recurrent_layers_cost_what_their_products_cost(kind: Any, name: str) -> None:
    module = kind(5, 4, 2, dtype=torch.float64)
    x, hidden = tensor(7, 2, 5, dtype=torch.float64, grad=False), tensor(2, 2, 4, dtype=torch.float64)
    ours, theirs = counted(name, x, hidden, list(module.parameters()), True, 2, 0.0, True, False, False)
    assert ours == theirs


def test_a_recurrent_cell_costs_what_torch_counts() -> None:
    module = torch.nn.LSTMCell(5, 4)
    for grad in (True, False):
        x, hidden = tensor(3, 5, grad=grad), [tensor(3, 4, grad=grad), tensor(3, 4)]
        ours, theirs = counted("aten.lstm_cell.default", x, hidden, *module.parameters())
        assert ours == theirs


def test_products_with_vectors_count_although_torch_passes_over_them() -> None:
    (forward, backward), theirs = counted("aten.mv.default", tensor(5, 3), tensor(3))
    assert theirs == (0, 0)
    assert (forward, backward) == (30, 60)
    assert counted("aten.matmul.default", tensor(2, 5, 3), tensor(3))[0] == (60, 120)
    assert counted("aten.dot.default", tensor(3), tensor(3))[0] == (6, 12)


def test_bilinear_and_cdist_count_by_formula() -> None:
    assert counted("aten.bilinear.default", tensor(7, 3), tensor(7, 4), tensor(5, 3, 4))[0][0] == 2 * 7 * (60 + 20)
    assert counted("aten.cdist.default", tensor(2, 5, 3), tensor(2, 4, 3))[0] == (2 * 40 * 3, 4 * 40 * 3)


@pytest.mark.parametrize("name", ["aten.relu.default", "aten.exp.default", "aten.sum.default"])
def test_elementwise_operators_count_no_operations(name: str) -> None:
    ours, theirs = counted(name, tensor(4, 5))
    assert ours == theirs == (0, 0)


def test_without_gradients_in_the_model_the_backward_is_free() -> None:
    call = Call("aten.linear.default", tensor(5, 3), tensor(4, 3), no_grad=True)
    assert flops(call.operator, call.values) == (2 * 5 * 3 * 4, 0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: Call("aten.add.Tensor", tensor(4, 5), tensor(5)), (20 + 5 + 20) * 4),
        (lambda: Call("aten.view.default", tensor(4, 5), [20]), 0),
        (lambda: Call("aten.to.dtype", tensor(4, 5), torch.float32), 0),
        (lambda: Call("aten.to.dtype", tensor(4, 5), torch.bfloat16), 20 * 4 + 20 * 2),
        (lambda: Call("aten.contiguous.default", tensor(4, 5).t()), 2 * 20 * 4),
        (lambda: Call("aten.embedding.default", tensor(1000, 8), torch.zeros(3, 2, dtype=torch.int64)), 2 * 192 + 48),
        (lambda: Call("aten.zeros.default", [4, 5]), 80),
        (lambda: Call("aten.fill_.Scalar", tensor(4, 5, grad=False), 1.0), 80),
        (lambda: Call("aten.relu_.default", tensor(4, 5, grad=False)), 160),
        (lambda: Call("aten.max.dim", tensor(4, 5), 1), 80 + 4 * 4 + 4 * 8),
    ],
)
def test_moved_bytes_are_what_is_read_and_written(call: Any, expected: int) -> None:
    made = call()
    assert moved_bytes(made.operator, made.values) == expected


def test_a_value_that_is_read_twice_moves_once() -> None:
    values = [Value(TensorSpec("float32", (4,))), Value(TensorSpec("float32", (4,)))]
    square = Operator("aten.mul.Tensor", (Ref(ValueId(0)), Ref(ValueId(0))), outputs=(ValueId(1),))
    assert moved_bytes(square, values) == 32


def test_operator_cost_carries_the_measured_saved_bytes() -> None:
    call = Call("aten.mm.default", tensor(5, 3), tensor(3, 7))
    cost = operator_cost(call.operator, call.values, saved_bytes=144)
    assert (cost.forward_flops, cost.backward_flops, cost.saved_bytes) == (210, 420, 144)
    assert cost.moved_bytes == (15 + 21 + 35) * 4
