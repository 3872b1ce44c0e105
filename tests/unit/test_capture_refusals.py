"""Models that cannot be captured faithfully are refused with one line: where, what, and what to change."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.base.errors import CaptureError
from fusion.capture import capture

BATCH = {"x": torch.ones(3, 4)}
HERE = Path(__file__).name


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Layer(nn.Module):
    """Calls `body(self, x)` on the last line of its forward; everything that a body may want to misuse is here."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.ones(4)
        self.stray = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Outer(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), Layer(body)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def refusal(body: Callable[..., Tensor]) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(body), BATCH, micro_batch=2)
    message = str(caught.value)
    assert "\n" not in message
    return message


def custom_function(layer: Layer, x: Tensor) -> Tensor:
    return StraightThrough.apply(x * layer.w)


def gradient_hook(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.w
    y.register_hook(lambda gradient: 2 * gradient)
    return y


def gradient_penalty(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.w
    (gradient,) = torch.autograd.grad(y.sum(), layer.w, create_graph=True)
    return y + gradient


def branch(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.w
    return y * 2 if y.sum() > 0 else y


def number_taken_out(layer: Layer, x: Tensor) -> Tensor:
    return x * layer.w * layer.w.sum().item()


def size_of_a_selection(layer: Layer, x: Tensor) -> Tensor:
    y = x * layer.w
    return y.sum() / y[y > 0].shape[0]


def out_of_sight(layer: Layer, x: Tensor) -> Tensor:
    return x * layer.w + torch.from_numpy((x * layer.w).detach().numpy())


def batch_in_place(layer: Layer, x: Tensor) -> Tensor:
    x.view(-1).mul_(2)
    return x * layer.w


def parameter_in_place(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.w.clamp_(0, 1)
    return x * layer.w


def constant_in_place(layer: Layer, x: Tensor) -> Tensor:
    return x * layer.w * layer.plain.add_(1)


def needed_by_the_backward(layer: Layer, x: Tensor) -> Tensor:
    y = (x * layer.w).exp()
    return y.sum() + y.add_(1)


def stray_parameter(layer: Layer, x: Tensor) -> Tensor:
    return x * layer.w * layer.stray[0]


def assigned_with_gradients(layer: Layer, x: Tensor) -> Tensor:
    layer.count = 0.9 * layer.count + (x * layer.w).mean()
    return x * layer.w


def assigned_another_shape(layer: Layer, x: Tensor) -> Tensor:
    layer.count = torch.zeros(2)
    return x * layer.w


def unknown_operator(layer: Layer, x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x * layer.w)


def control_flow(layer: Layer, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * layer.w,))


def complex_number(layer: Layer, x: Tensor) -> Tensor:
    return (x * layer.w * 1j).abs()


def wrong_shape(layer: Layer, x: Tensor) -> Tensor:
    return x.view(-1, 3) * layer.w


CASES: list[tuple[Callable[..., Tensor], str]] = [
    (custom_function, r"StraightThrough, a torch\.autograd\.Function.*write it with PyTorch operators"),
    (gradient_hook, "hook on a tensor's gradient.*remove the hook"),
    (gradient_penalty, "backward pass inside forward"),
    (branch, r"decides by the values of a tensor.*use torch\.where"),
    (number_taken_out, r"number is taken out of a tensor's values.*keep it a tensor"),
    (size_of_a_selection, "number is taken out of a tensor's values"),
    (out_of_sight, r"takes a tensor out of PyTorch's sight.*use \.detach\(\)"),
    (batch_in_place, r"aten\.mul_\.Tensor changes a field of the batch in place \('x'\).*clone"),
    (parameter_in_place, r"aten\.clamp_\.default changes a parameter in place \('layers\.1\.w'\)"),
    (constant_in_place, r"aten\.add_\.Tensor changes a constant in place"),
    (needed_by_the_backward, r"the backward of aten\.exp\.default needs a tensor that is changed in place"),
    (stray_parameter, "not among its parameters.*nn.ParameterList"),
    (assigned_with_gradients, "assigns a tensor that carries gradients to the buffer 'count'; detach it"),
    (assigned_another_shape, "another shape or dtype to the buffer 'count'"),
    (unknown_operator, r"operator aten\.linalg_svdvals\.default is not one that nodes run; rewrite this line"),
    (control_flow, r"control-flow operator.*use torch\.where"),
    (complex_number, r"an argument 1j of type complex cannot be captured"),
    (wrong_shape, r"RuntimeError: shape '\[-1, 3\]' is invalid.*runs on this batch by itself"),
]


@pytest.mark.parametrize(("body", "reason"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_refusal_names_the_module_the_line_and_the_remedy(body: Callable[..., Tensor], reason: str) -> None:
    message = refusal(body)
    assert re.search(reason, message), message
    match = re.match(r"module 'layers\.1' \((.*):(\d+)\): ", message)
    assert match is not None, message
    lines, first = inspect.getsourcelines(body)
    assert match[1].endswith(HERE)
    assert first < int(match[2]) < first + len(lines)


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["python", "numpy"])
def test_random_numbers_that_are_not_pytorchs_are_refused_and_not_consumed(draw: Callable[[], float]) -> None:
    state = random.getstate()
    assert "draws from Python's or NumPy's random numbers" in refusal(lambda layer, x: x * layer.w * draw())
    assert random.getstate() == state


def test_a_tensor_kept_between_steps_in_a_plain_attribute_is_refused() -> None:
    def remember(layer: Layer, x: Tensor) -> Tensor:
        y = x * layer.w * layer.plain
        layer.plain = y[0].detach()
        return y

    assert "from one step to the next in the attribute 'layers.1.plain'" in refusal(remember)


def test_a_tensor_that_is_only_noted_in_an_attribute_is_fine_and_not_left_there() -> None:
    def note(layer: Layer, x: Tensor) -> Tensor:
        layer.plain = x * layer.w
        layer.last_sum = layer.plain.sum()
        return layer.plain

    model = Outer(note)
    capture(model, BATCH, micro_batch=2)
    assert torch.equal(model.layers[1].plain, torch.ones(4))
    assert not hasattr(model.layers[1], "last_sum")


def test_what_forward_registers_is_not_left_there() -> None:
    def register(layer: Layer, x: Tensor) -> Tensor:
        layer.register_buffer("late", torch.zeros(4), persistent=False)
        layer.later = nn.Identity()
        layer.calls = 1
        return x * layer.w + layer.late

    model = Outer(register)
    before = [sorted(module.__dict__) for module in model.modules()], list(model.state_dict())
    capture(model, BATCH, micro_batch=2)
    assert ([sorted(module.__dict__) for module in model.modules()], list(model.state_dict())) == before
    assert not hasattr(model.layers[1], "late")
    assert not hasattr(model.layers[1], "later")


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Outer(branch)
    parameters = list(map(id, model.parameters()))
    with pytest.raises(CaptureError):
        capture(model, BATCH, micro_batch=2)
    assert list(map(id, model.parameters())) == parameters
    assert model(BATCH["x"].clone()).item() == 24  # runs again, custom autograd functions too
    assert StraightThrough.apply(torch.tensor(1.4)) == 1


def test_the_cause_is_what_torch_said() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(branch), BATCH, micro_batch=2)
    assert "data-dependent" in str(caught.value.__cause__)


def test_modules_and_parameters_with_gradient_hooks_are_refused() -> None:
    model = Outer(lambda layer, x: x * layer.w)
    handle = model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match=r"module 'layers\.1': it has a backward hook"):
        capture(model, BATCH, micro_batch=2)
    handle.remove()
    model.layers[1].w.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CaptureError, match=r"layers\.1\.w: it has a gradient hook"):
        capture(model, BATCH, micro_batch=2)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (torch.compile, r"wrapped in OptimizedModule; hand over .* before torch\.compile"),
        (nn.DataParallel, r"wrapped in DataParallel; hand over .*model\.module"),
    ],
)
def test_a_model_wrapped_by_another_tool_is_refused(wrap: Callable[[nn.Module], nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(wrap(Outer(branch)), BATCH, micro_batch=2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda layer, x: (x * layer.w).detach(), "does not depend on any trainable parameter"),
        (lambda layer, x: torch.zeros(()), "does not depend on any trainable parameter"),
    ],
)
def test_a_loss_without_a_path_to_parameters_is_refused(body: Callable[..., Tensor], reason: str) -> None:
    assert reason in refusal(body)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="no parameter with requires_grad=True; unfreeze"):
        capture(nn.Linear(4, 1).requires_grad_(False), {"input": torch.ones(2, 4)}, micro_batch=2)


def test_an_operator_of_the_loss_function_is_named_with_its_line() -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return torch.linalg.svdvals(outputs).sum()

    with pytest.raises(CaptureError, match=rf"the model \(.*{HERE}:\d+\): operator aten\.linalg_svdvals"):
        capture(nn.Linear(4, 4), {"input": torch.ones(3, 4)}, loss=loss, micro_batch=2)


def test_an_operator_deep_in_pytorchs_own_layers_is_named_with_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4, max_norm=1.0))

    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[1](self.inner[0](x).long()).sum()

    with pytest.raises(CaptureError, match=r"module 'inner\.1' \(.*\): operator aten\.embedding_renorm_\.default"):
        capture(Ids(), BATCH, micro_batch=2)


def test_checkpointed_layers_are_captured_with_their_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    from tests.support.interpreter import interpret

    for reentrant in (True, False):

        def body(layer: Layer, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(lambda y: F.relu(y * layer.w), x, use_reentrant=reentrant)

        outcome = interpret(capture(Outer(body), BATCH, micro_batch=2), BATCH)
        gradient = outcome.gradients["layers.1.w"]
        assert gradient is not None
        assert gradient.tolist() == [3, 3, 3, 3]
