"""Gradients of a model in pieces equal those of eager PyTorch, for every architecture of the zoo."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fusion.base.ids import EdgeId
from fusion.capture import Captured, capture
from fusion.graph.partition import Partition, legal_cuts, partition
from fusion.runtime.executor import ShardExecutor, all_uses
from tests.support.models import ZOO, Sample
from tests.support.training import carry

#: Rounding of float32 where a sum over uses or consumers is grouped otherwise than eagerly.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}

Gradients = dict[str, torch.Tensor | None]


def eager(sample: Sample) -> tuple[float, Gradients]:
    sample.model.zero_grad()
    loss = sample.compute_loss()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in sample.model.named_parameters()}


def in_pieces(captured: Captured, parts: Partition, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """Run one micro-batch forward through all pieces and back, every tensor through bytes on its way."""
    executors = [ShardExecutor(parts, shard.index, captured.tensors) for shard in parts.shards]
    samples = len(next(iter(batch.values())))
    values: dict[EdgeId, tuple[torch.Tensor, bool]] = {}
    loss = None
    for executor in executors:
        fields = {name: batch[name] for name in executor.batch_fields}
        result = executor.forward(1, 0, fields, values, samples)
        values |= {edge: (carry(tensor.detach()), tensor.requires_grad) for edge, tensor in result.edges.items()}
        loss = result.loss if result.loss is not None else loss
    assert loss is not None
    gradients: dict[EdgeId, torch.Tensor | None] = {}

    for executor in reversed(executors):
        for edge, gradient in executor.backward(0, 1.0, gradients).items():
            gradients[edge] = None if gradient is None else carry(gradient)
    return loss.item(), total_gradients(executors, parts)


def total_gradients(executors: list[ShardExecutor], parts: Partition) -> Gradients:
    found: Gradients = {}
    for executor in executors:
        for name, tensor in executor.parameters.items():
            if found.get(name) is None:
                found[name] = tensor.grad
    uses = {number: grad for executor in executors for number, grad in executor.use_gradients().items()}
    for number, (index, _) in enumerate(all_uses(parts)):
        name = parts.graph.input_of[parts.shared[index].value].name
        gradient = uses[number]
        if gradient is not None:
            before = found.get(name)
            found[name] = gradient if before is None else before + gradient
    return found


def cuts_for(captured: Captured, pieces: int) -> Sequence[int]:
    legal = legal_cuts(captured.graph)
    return sorted({legal[len(legal) * index // pieces] for index in range(1, pieces)})


@pytest.fixture(scope="module", params=list(ZOO))
def case(request: pytest.FixtureRequest) -> tuple[Sample, Captured, float, Gradients]:
    sample = ZOO[request.param](dropout=0.0)
    micro_batch = len(next(iter(sample.batch.values())))
    captured = capture(sample.model, sample.batch, loss=sample.loss, micro_batch=micro_batch)
    loss, gradients = eager(sample)
    return sample, captured, loss, gradients


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2, 4, 9])
def test_pieces_have_the_gradients_of_the_whole(pieces: int, case: tuple[Sample, Captured, float, Gradients]) -> None:
    sample, captured, loss, gradients = case
    parts = partition(captured.graph, cuts_for(captured, pieces))
    assert len(parts.shards) == min(pieces, len(legal_cuts(captured.graph)) + 1)
    ours_loss, ours = in_pieces(captured, parts, dict(sample.batch))
    assert ours_loss == pytest.approx(loss, rel=1e-6)
    canonical = {alias: item.name for item in captured.graph.inputs for alias in (item.name, *item.aliases)}
    for name, expected in gradients.items():
        got = ours.get(canonical.get(name, name))
        if expected is None or not expected.any():
            assert got is None or not got.any(), name
        else:
            assert got is not None, name
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


@pytest.mark.slow
def test_batch_norm_statistics_move_as_they_do_eagerly() -> None:
    sample = ZOO["resnet"](dropout=0.0)
    captured = capture(sample.model, sample.batch, loss=sample.loss, micro_batch=len(next(iter(sample.batch.values()))))
    parts = partition(captured.graph, cuts_for(captured, 4))
    executors = [ShardExecutor(parts, shard.index, captured.tensors) for shard in parts.shards]
    values: dict[EdgeId, tuple[torch.Tensor, bool]] = {}
    for executor in executors:
        fields = {name: sample.batch[name] for name in executor.batch_fields}
        result = executor.forward(1, 0, fields, values, len(next(iter(sample.batch.values()))))
        values |= {edge: (tensor.detach(), tensor.requires_grad) for edge, tensor in result.edges.items()}
    ours = {name: tensor for executor in executors for name, tensor in executor.buffers.items()}
    sample.compute_loss()
    expected = dict(sample.model.named_buffers())
    assert any(isinstance(module, nn.BatchNorm2d) for module in sample.model.modules())
    assert ours
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), name
