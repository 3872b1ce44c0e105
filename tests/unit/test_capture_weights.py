"""Names, tied tensors, frozen parameters, buffers, and models without memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion.base.errors import CaptureError
from fusion.capture import Captured, capture
from fusion.graph.dag import Input, InputKind
from tests.support.interpreter import interpret
from tests.support.models import ZOO

X = torch.arange(12.0).reshape(3, 4) / 12


class Tied(nn.Module):
    """Two linear maps with one weight."""

    def __init__(self, *, share: str = "object") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        if share == "object":
            self.second.weight = self.first.weight
        elif share == "memory":
            self.second.weight = nn.Parameter(self.first.weight.detach())
        elif share == "transposed":
            self.second.weight = nn.Parameter(self.first.weight.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().sum()


def inputs(captured: Captured, kind: InputKind) -> list[Input]:
    return [item for item in captured.graph.inputs if item.kind is kind]


@pytest.mark.parametrize("share", ["object", "memory"])
def test_tied_weights_are_one_input_under_the_first_name_and_gradients_add_up(share: str) -> None:
    model = Tied(share=share)
    captured = capture(model, {"x": X}, micro_batch=3)
    (weight,) = inputs(captured, InputKind.PARAMETER)
    assert (weight.name, weight.aliases) == ("first.weight", ("second.weight",))
    assert list(captured.tensors) == ["first.weight"]
    assert len(captured.graph.readers[weight.value]) == 2
    w = model.first.weight.detach().clone().requires_grad_()
    (X @ w.t() @ w.t()).square().sum().backward()
    torch.testing.assert_close(interpret(captured, {"x": X}).gradients["first.weight"], w.grad)


def test_equal_values_alone_tie_nothing() -> None:
    model = Tied(share="none")
    with torch.no_grad():
        model.second.weight.copy_(model.first.weight)
    captured = capture(model, {"x": X}, micro_batch=3)
    assert [item.name for item in inputs(captured, InputKind.PARAMETER)] == ["first.weight", "second.weight"]


def test_another_view_of_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"second\.weight: it is a different view of the memory of 'first\.weight'"):
        capture(Tied(share="transposed"), {"x": X}, micro_batch=3)


def test_two_names_that_disagree_about_training_are_refused() -> None:
    model = Tied(share="memory")
    model.second.weight.requires_grad_(False)
    with pytest.raises(
        CaptureError, match=r"second\.weight: it shares its memory with 'first\.weight'.*set both alike"
    ):
        capture(model, {"x": X}, micro_batch=3)


def test_a_module_used_under_two_names_gives_aliases() -> None:
    shared = nn.Linear(4, 4)
    captured = capture(nn.Sequential(shared, nn.Tanh(), shared), {"input": X}, loss=lambda y, _: y.sum(), micro_batch=3)
    assert [(item.name, item.aliases) for item in inputs(captured, InputKind.PARAMETER)] == [
        ("0.weight", ("2.weight",)),
        ("0.bias", ("2.bias",)),
    ]


def test_a_buffer_may_be_the_other_name_of_a_buffer() -> None:
    class Buffers(Tied):
        def __init__(self) -> None:
            super().__init__(share="none")
            self.register_buffer("hidden", torch.ones(4), persistent=False)
            self.register_buffer("shown", self.hidden)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.hidden) + self.shown.sum()

    (buffer,) = inputs(capture(Buffers(), {"x": X}, micro_batch=3), InputKind.BUFFER)
    assert (buffer.name, buffer.aliases) == ("shown", ("$buffer.hidden",))


def test_non_persistent_buffers_and_literals_travel_under_names_of_their_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("kept", torch.full((4,), 2.0))
            self.register_buffer("scratch", torch.full((4,), 3.0), persistent=False)
            self.table = torch.full((4,), 5.0)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w * self.kept * self.scratch * self.table + torch.tensor([7.0])).sum()

    captured = capture(Model(), {"x": X}, micro_batch=3)
    assert [item.name for item in inputs(captured, InputKind.BUFFER)] == ["kept", "$buffer.scratch"]
    assert set(captured.tensors) == {"w", "kept", "$buffer.scratch", "$constant.0", "$constant.1"}
    assert {captured.tensors[f"$constant.{n}"].flatten()[0].item() for n in (0, 1)} == {5.0, 7.0}
    torch.testing.assert_close(interpret(captured, {"x": X}).loss, 30 * X.sum() + 12 * 7)


def test_frozen_parameters_carry_no_gradient_and_unused_ones_are_no_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(4))
            self.trained = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.frozen * self.trained).sum()

    captured = capture(Model(), {"x": X}, micro_batch=3)
    grads = {
        item.name: captured.graph.values[item.value].requires_grad for item in inputs(captured, InputKind.PARAMETER)
    }
    assert grads == {"frozen": False, "trained": True}
    assert set(captured.tensors) == {"frozen", "unused", "trained"}
    first, second = captured.graph.operators[:2]
    assert not captured.graph.values[first.outputs[0]].requires_grad
    assert captured.graph.values[second.outputs[0]].requires_grad


def test_tensors_are_detached_and_share_the_models_memory() -> None:
    model = Tied()
    tensor = capture(model, {"x": X}, micro_batch=3).tensors["first.weight"]
    assert not tensor.requires_grad
    assert tensor.data_ptr() == model.first.weight.data_ptr()


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_a_model_without_memory_gives_the_same_graph(name: str) -> None:
    sample = ZOO[name]()
    real = capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2)
    with torch.device("meta"):
        twin = type(sample.model)()
    meta = capture(twin, sample.batch, loss=sample.loss, micro_batch=2)
    assert meta.graph == real.graph
    assert all(tensor.is_meta for tensor in meta.tensors.values())
    assert {key: tensor.shape for key, tensor in meta.tensors.items()} == {
        key: tensor.shape for key, tensor in real.tensors.items()
    }


def test_an_lstm_keeps_its_own_list_of_weights() -> None:
    sample = ZOO["lstm"]()
    lstm = sample.model.lstm
    capture(sample.model, sample.batch, micro_batch=2)
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_a_buffer_assigned_in_a_submodule_is_updated_where_it_is_assigned() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return x * self.w * self.steps

    model = nn.Sequential(Counting(), nn.Flatten())
    captured = capture(model, {"input": X}, loss=lambda y, _: y.sum(), micro_batch=3)
    outcome = interpret(captured, {"input": X})
    assert outcome.buffers["0.steps"] == 1
    torch.testing.assert_close(outcome.loss, X.sum())
    assert model[0].steps == 0
    assert [op.name for op in captured.graph.operators][:2] == ["aten.add.Tensor", "aten.copy_.default"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, dtype=torch.complex128), "dtype complex128 is not supported"),
        (torch.ones(4).to_sparse(), "layout torch.sparse_coo cannot be shipped"),
        (nn.UninitializedParameter(), "its shape is not known yet; run the lazy module once"),
    ],
    ids=["dtype", "sparse", "lazy"],
)
def test_tensors_that_cannot_be_shipped_are_refused_by_name(weight: Tensor, message: str) -> None:
    model = Tied()
    model.odd = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    with pytest.raises(CaptureError, match=f"odd: .*{message}"):
        capture(model, {"x": X}, micro_batch=3)


def test_modes_of_single_modules_are_taken_as_they_are() -> None:
    sample = ZOO["resnet"]()
    sample.model.stem[1].eval()
    captured = capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2)
    trains = [op.arguments[5] for op in captured.graph.operators if op.name == "aten.batch_norm.default"]
    assert trains[0] is False
    assert all(flag is True for flag in trains[1:])
