"""Captured graphs compute what the models compute: loss, every gradient, every buffer, for any batch size."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusion.capture import Captured, capture
from fusion.graph.check import check_graph
from fusion.graph.dag import InputKind
from tests.support.interpreter import interpret
from tests.support.models import OWN, SAMPLES, TRANSFORMERS, ZOO, Sample

#: Shapes inside the mixture of experts depend on the data, so the graph can only bound them.
FIXED_SHAPES = [name for name in ZOO if name != "moe"]

#: T5 builds its masks another way while it is being traced, so eager PyTorch keeps other masks.
SAME_CODE = [name for name in FIXED_SHAPES if name != "t5"]


@functools.cache
def captured_sample(name: str) -> tuple[Sample, Captured]:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    sample = ZOO[name]()
    return sample, capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2)


def eager(sample: Sample, batch: dict[str, Tensor], seed: int) -> tuple[Tensor, Sample]:
    """Run a copy of the model as PyTorch does, drawing random numbers from `seed` on."""
    twin = copy.deepcopy(sample)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = twin.compute_loss(batch)
    loss.backward()
    return loss.detach(), twin


@pytest.mark.parametrize("name", ZOO)
def test_loss_gradients_and_buffers_equal_those_of_the_model_at_any_batch_size(name: str) -> None:
    sample, captured = captured_sample(name)
    check_graph(captured.graph)
    assert captured.graph.dynamic_batch
    for rows in (1, 3, SAMPLES):  # captured at 2; dropout is on and draws the same numbers in both
        batch = {field: tensor[:rows] for field, tensor in sample.batch.items()}
        expected, twin = eager(sample, batch, seed=rows)
        outcome = interpret(captured, batch, seed=rows)
        torch.testing.assert_close(outcome.loss, expected, rtol=1e-6, atol=1e-7)
        for parameter, tensor in twin.model.named_parameters():
            gradient = outcome.gradients.get(parameter)
            assert (gradient is None) == (tensor.grad is None), parameter
            if gradient is not None and tensor.grad is not None:
                torch.testing.assert_close(
                    gradient, tensor.grad, rtol=1e-5, atol=1e-7, msg=lambda m, p=parameter: f"{p}: {m}"
                )
        for buffer, tensor in twin.model.named_buffers():
            if buffer in outcome.buffers:
                torch.testing.assert_close(outcome.buffers[buffer], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", FIXED_SHAPES)
def test_types_shapes_and_paths_of_gradients_are_those_of_a_real_run(name: str) -> None:
    sample, captured = captured_sample(name)
    outcome = interpret(captured, {field: tensor[:2] for field, tensor in sample.batch.items()})
    for number, value in enumerate(captured.graph.values):
        real = outcome.values[number]
        if value.spec is None:
            assert real == value.nominal
            continue
        assert (str(real.dtype), tuple(real.shape)) == (f"torch.{value.spec.dtype}", value.spec.shape)
        assert real.requires_grad == value.requires_grad


@pytest.mark.parametrize("name", SAME_CODE)
def test_saved_bytes_are_those_that_pytorch_keeps_for_the_backward(name: str) -> None:
    sample, captured = captured_sample(name)
    sample = copy.deepcopy(sample)
    batch = {field: tensor[:2].clone() for field, tensor in sample.batch.items()}
    held = [*sample.model.parameters(), *sample.model.buffers(), *batch.values()]
    seen = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: list[Tensor] = []
    counted = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal counted
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and tensor.dtype is not torch.uint8:  # a workspace of the CPU's LSTM library
            seen.add(storage.data_ptr())
            counted += storage.nbytes()
        kept.append(tensor)  # so that no other tensor gets its memory
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sample.compute_loss(batch)
    del loss
    assert sum(op.cost.saved_bytes for op in captured.graph.operators) == counted


@pytest.mark.parametrize("name", OWN)
def test_capturing_changes_nothing_about_the_model(name: str) -> None:
    sample = ZOO[name]()
    before = {key: tensor.clone() for key, tensor in sample.model.state_dict().items()}
    identities = [id(tensor) for tensor in (*sample.model.parameters(), *sample.model.buffers())]
    attributes = [dict(module.__dict__) for module in sample.model.modules()]
    random_state = torch.get_rng_state()
    capture(sample.model, sample.batch, loss=sample.loss, micro_batch=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    assert [id(tensor) for tensor in (*sample.model.parameters(), *sample.model.buffers())] == identities
    for key, tensor in sample.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    for module, known in zip(sample.model.modules(), attributes, strict=True):
        assert module.training
        assert module.__dict__.keys() == known.keys()
    assert all(parameter.grad is None for parameter in sample.model.parameters())


@pytest.mark.parametrize("name", OWN)
def test_names_are_those_of_the_state_dict(name: str) -> None:
    sample, captured = captured_sample(name)
    aliases = {alias for item in captured.graph.inputs for alias in item.aliases}
    named = {key for key in captured.tensors if not key.startswith("$")}
    assert named | aliases == set(sample.model.state_dict())
    assert not named & aliases
    for key, tensor in sample.model.state_dict().items():
        if key in named:
            assert captured.tensors[key].data_ptr() == tensor.data_ptr()  # no copy
    assert [item.name for item in captured.graph.inputs if item.kind is InputKind.BATCH] == list(sample.batch)
