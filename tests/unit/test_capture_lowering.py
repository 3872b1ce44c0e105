"""From torch.export's nodes to operators of the table: sizes, regions, dropout, constants, dead operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.capture import Captured, capture
from fusion.graph.dag import Device, DType, InputKind, MemoryFormat, Operator, Ref
from fusion.graph.operators import TABLE
from tests.support.interpreter import interpret
from tests.support.models import ZOO

X = torch.arange(24.0).reshape(6, 4) / 24


class Model(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).sum()


def captured(body: Callable[..., Tensor], *, micro_batch: int = 4) -> Captured:
    return capture(Model(body), {"x": X}, micro_batch=micro_batch)


def names(result: Captured) -> list[str]:
    return [op.name for op in result.graph.operators]


def operator(result: Captured, name: str) -> Operator:
    (found,) = [op for op in result.graph.operators if op.name == name]
    return found


def check(body: Callable[..., Tensor], result: Captured, rows: int) -> None:
    """Compare with the model itself on `rows` samples."""
    model = Model(body)
    loss = model(X[:rows].clone())
    loss.backward()
    outcome = interpret(result, {"x": X[:rows]})
    torch.testing.assert_close(outcome.loss, loss.detach())
    torch.testing.assert_close(outcome.gradients["w"], model.w.grad)


SIZES: list[Callable[..., Tensor]] = [
    lambda m, x: (x * m.w).view(x.shape[0] * 2, 2),
    lambda m, x: (x * m.w).sum() / (x.shape[0] + 3),
    lambda m, x: (x * m.w) * torch.arange(x.shape[0])[:, None],
    lambda m, x: (x * m.w).sum() / (x.shape[0] // 2 + 1),
    lambda m, x: (x * m.w).sum() * (x.shape[0] % 3),
    lambda m, x: (x * m.w).sum() * x.shape[0] ** 2,
    lambda m, x: (x * m.w).sum() * torch.sym_max(x.shape[0] - 2, 1),
    lambda m, x: (x * m.w).sum() * torch.sym_min(4, x.shape[0]),
    lambda m, x: torch.zeros(x.shape[0], 4).copy_(x * m.w).repeat(x.shape[0], 1),
]


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_sizes_follow_the_batch_size(number: int) -> None:
    result = captured(SIZES[number])
    assert result.graph.dynamic_batch
    for rows in (1, 2, 5, 6):
        check(SIZES[number], result, rows)


def test_one_input_brings_the_batch_size_and_integers_state_their_nominal_value() -> None:
    result = captured(lambda m, x: (x * m.w).view(x.shape[0] * 2, 2), micro_batch=5)
    (size,) = [item for item in result.graph.inputs if item.kind is InputKind.BATCH_SIZE]
    assert result.graph.values[size.value].spec is None
    assert result.graph.values[size.value].nominal == 5
    product = operator(result, "python.mul")
    assert set(product.arguments) == {2, Ref(size.value)}
    assert result.graph.values[product.outputs[0]].nominal == 10


def test_a_model_without_sizes_has_no_batch_size_input() -> None:
    result = captured(lambda m, x: x * m.w)
    assert InputKind.BATCH_SIZE not in [item.kind for item in result.graph.inputs]


FIXED: list[Callable[..., Tensor]] = [
    lambda m, x: x * m.w if x.shape[0] > 3 else x - m.w,
    lambda m, x: (x * m.w).sum() * (1.0 / x.shape[0]),
    lambda m, x: (x * m.w).chunk(2)[0],
]


@pytest.mark.parametrize("number", range(len(FIXED)))
def test_a_model_that_insists_on_its_batch_size_is_captured_at_that_size(number: int) -> None:
    result = captured(FIXED[number], micro_batch=4)
    assert not result.graph.dynamic_batch
    check(FIXED[number], result, 4)


def test_a_batch_of_one_row_still_gives_a_dynamic_graph() -> None:
    model = Model(lambda m, x: x * m.w)
    result = capture(model, {"x": X[:1]}, micro_batch=1)
    assert result.graph.dynamic_batch
    assert result.graph.nominal_micro_batch == 1
    assert result.graph.values[operator(result, "aten.mul.Tensor").outputs[0]].spec.shape == (1, 4)  # type: ignore[union-attr]
    check(lambda m, x: x * m.w, result, 6)


def test_shapes_hold_at_the_micro_batch_whatever_the_example_has() -> None:
    for rows in (1, 2, 6):
        model = Model(lambda m, x: x * m.w)
        result = capture(model, {"x": X[:rows]}, micro_batch=4)
        assert result.graph.values[operator(result, "aten.mul.Tensor").outputs[0]].spec.shape == (4, 4)  # type: ignore[union-attr]


def test_autocast_regions_become_a_property_of_their_operators() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        square = m.w[:, None] * m.w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ square
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ square
        return z.exp()

    result = captured(body)
    settings = {op.name: op.autocast_dtype for op in result.graph.operators}
    assert settings["aten.exp.default"] == settings["aten.unsqueeze.default"] == ""
    products = [op for op in result.graph.operators if op.name == "aten.matmul.default"]
    assert [op.autocast_dtype for op in products] == ["bfloat16", "off"]
    dtypes = [result.graph.values[op.outputs[0]].spec.dtype for op in products]  # type: ignore[union-attr]
    assert dtypes == ["bfloat16", "float32"]
    check(body, result, 4)


def test_no_grad_regions_become_a_property_of_their_operators() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * m.w).abs()
            with torch.enable_grad():
                shift = (m.w * 2).neg()
        return x * m.w * scale + shift

    result = captured(body)
    assert operator(result, "aten.abs.default").no_grad
    assert not operator(result, "aten.neg.default").no_grad
    assert not result.graph.values[operator(result, "aten.abs.default").outputs[0]].requires_grad
    assert result.graph.values[operator(result, "aten.neg.default").outputs[0]].requires_grad
    check(body, result, 4)


def test_capture_under_no_grad_and_autocast_is_as_without() -> None:
    body: Callable[..., Tensor] = lambda m, x: (x * m.w) @ x.t()  # noqa: E731
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = captured(body)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert inside.graph == captured(body).graph


def test_dropout_is_our_own_operator_also_where_the_model_drops_in_place() -> None:
    result = captured(lambda m, x: m.drop(x * m.w))
    drop = operator(result, "fusion.dropout.default")
    assert drop.arguments[1:] == (0.5, True)
    assert drop.module_path == "drop"
    assert names(result) == ["aten.mul.Tensor", "fusion.dropout.default", "aten.sum.default"]


def test_dropout_in_place_reaches_everyone_who_sees_the_memory() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        y = x * m.w
        m.drop(y.view(-1))
        return y

    result = captured(body)
    assert "aten.copy_.default" in names(result)
    torch.manual_seed(3)
    loss = Model(body)(X)
    torch.testing.assert_close(interpret(result, {"x": X}, seed=3).loss, loss.detach())


@pytest.mark.parametrize("off", [lambda m: m.drop.eval(), lambda m: setattr(m.drop, "p", 0.0)], ids=["eval", "p=0"])
def test_dropout_that_drops_nothing_is_left_out(off: Callable[[Model], object]) -> None:
    model = Model(lambda m, x: m.drop(x * m.w))
    off(model)
    assert names(capture(model, {"x": X}, micro_batch=2)) == ["aten.mul.Tensor", "aten.sum.default"]


def test_channel_dropout_stays_an_operator_that_draws() -> None:
    result = captured(lambda m, x: F.dropout1d((x * m.w)[:, None], 0.5, training=True))
    assert TABLE[operator(result, "aten.feature_dropout.default").name].random


def test_attention_is_one_operator() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        q = (x * m.w).view(-1, 1, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert "aten.scaled_dot_product_attention.default" in names(captured(body))


def test_dead_operators_are_dropped_but_never_those_that_write() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        m.norm(x)  # only its statistics are wanted
        x.exp().sum()
        return x * m.w

    result = captured(body)
    assert "aten.exp.default" not in names(result)
    assert "aten.batch_norm.default" in names(result)
    outcome = interpret(result, {"x": X})
    torch.testing.assert_close(outcome.buffers["norm.running_mean"], 0.1 * X.mean(0))
    assert outcome.buffers["norm.num_batches_tracked"] == 1


def test_checks_that_export_adds_are_dropped() -> None:
    result = captured(lambda m, x: (x * m.w).to(torch.float64).to(torch.float32))
    assert names(result) == ["aten.mul.Tensor", "aten.to.dtype", "aten.to.dtype", "aten.sum.default"]


def test_several_results_are_several_values_of_one_operator() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        a, _, c = (x * m.w).split([1, 2, 1], dim=1)
        values, places = (x * m.w).topk(2)
        return a + c + values + places

    result = captured(body)
    split, topk = operator(result, "aten.split_with_sizes.default"), operator(result, "aten.topk.default")
    shapes = [result.graph.values[out].spec.shape for out in split.outputs]  # type: ignore[union-attr]
    assert shapes == [(4, 1), (4, 2), (4, 1)]
    assert [result.graph.values[out].requires_grad for out in topk.outputs] == [True, False]
    assert not any("getitem" in name for name in names(result))
    check(body, result, 3)


def test_a_list_of_results_can_be_passed_on_as_a_list() -> None:
    body: Callable[..., Tensor] = lambda m, x: torch.stack((x * m.w).unbind(1), 0)  # noqa: E731
    result = captured(body)
    (stacked,) = operator(result, "aten.stack.default").arguments[:1]
    assert stacked == tuple(Ref(out) for out in operator(result, "aten.unbind.int").outputs)


def test_constants_become_plain_data() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        full = torch.zeros(4, dtype=torch.bool, device=x.device).to(torch.float32)
        picked = x[:, torch.tensor([0, 1, 2, 3])].clone(memory_format=torch.contiguous_format)
        return F.gelu(picked * m.w, approximate="tanh") + full.clamp(min=0.5)

    result = captured(body)
    zeros = dict(operator(result, "aten.zeros.default").keywords)
    assert zeros["dtype"] == DType("bool")
    assert zeros["device"] == Device()
    assert "pin_memory" not in zeros
    assert dict(operator(result, "aten.clone.default").keywords) == {"memory_format": MemoryFormat("contiguous_format")}
    assert dict(operator(result, "aten.gelu.default").keywords) == {"approximate": "tanh"}
    assert operator(result, "aten.clamp.default").arguments[1] == 0.5
    index = operator(result, "aten.index.Tensor").arguments[1]
    assert isinstance(index, tuple)
    assert index[0] is None
    assert isinstance(index[1], Ref)
    check(body, result, 4)


def test_booleans_integers_and_floats_keep_their_types() -> None:
    result = captured(lambda m, x: ((x * m.w) * 2).mean(1, True) * 2.0)
    factors = [op.arguments[1] for op in result.graph.operators if op.name == "aten.mul.Tensor"][1:]
    assert [type(factor) for factor in factors] == [int, float]
    assert operator(result, "aten.mean.dim").arguments[2] is True


def test_detaching_in_place_detaches_what_follows() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        y = x * m.w
        y.detach_()
        return y * m.w

    check(body, captured(body), 4)


def test_in_place_operators_keep_their_meaning() -> None:
    def body(m: Model, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 4)
        y[:, 1:] = (x * m.w)[:, 1:]
        y[:, 0].add_(m.w[0])
        return F.relu(y, inplace=True)

    check(body, captured(body), 5)


def test_operators_say_which_module_they_come_from() -> None:
    sample = ZOO["gpt"]()
    graph = capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2).graph
    paths = {op.module_path for op in graph.operators}
    assert {"token", "blocks.0.attention.qkv", "blocks.2.mlp.0", "norm", "head", ""} <= paths
    assert graph.operators[-1].name == "aten.cross_entropy_loss.default"
    assert graph.operators[-1].module_path == ""


def test_capturing_twice_gives_equal_graphs() -> None:
    sample = ZOO["resnet"]()
    one, two = (capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2) for _ in range(2))
    assert one.graph == two.graph
