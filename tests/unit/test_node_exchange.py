"""Between a stage and its transport: windows that starve no instruction, limits by the graph, words for errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion.base.errors import FusionError, WireError
from fusion.base.ids import EdgeId, StageIndex
from fusion.base.layout import TensorLayout
from fusion.graph.partition import Partition, legal_cuts, partition
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.transport.base import Incoming
from fusion_node.exchange import MessageReceiver, PayloadLimits, window_bytes
from tests.support.training import make_training


class Tied(nn.Module):
    """A table of 10 x 6 floats at both ends, and two values that cross the cut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 6)
        self.middle = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)  # (B, 6)
        y = torch.tanh(self.middle(x))
        return nn.functional.cross_entropy((x + y) @ self.table.weight.t(), ids)


@pytest.fixture(scope="module")
def parts() -> Partition:
    training = make_training(Tied(), {"ids": torch.arange(8)}, batch_size=8, micro_batches=2)
    graph = training.captured.graph
    cut = next(cut for cut in legal_cuts(graph) if len(partition(graph, [cut]).edges) == 2)
    return partition(graph, [cut])


def test_a_window_holds_all_that_one_instruction_waits_for(parts: Partition) -> None:
    values = 2 * 4 * 6 * 4  # two values of 4 samples by 6 floats
    uses = 2 * 10 * 6 * 4 // 2  # the other stage's use of the table
    assert window_bytes(parts, StageIndex(1), 1) == max(values, uses)
    assert window_bytes(parts, StageIndex(0), 1) == max(values, uses)
    assert window_bytes(parts, StageIndex(1), 10**6) == 10**6


def test_limits_follow_the_graph(parts: Partition) -> None:
    limits = PayloadLimits(parts, StageIndex(1))
    assert limits(MessageHeader(MessageKind.ACTIVATION, 1, 0, EdgeId(0))) == 4 * (4 * 6 * 4)
    assert limits(MessageHeader(MessageKind.TIED, 1, 0, EdgeId(0))) == 4 * (10 * 6 * 4)
    assert limits(MessageHeader(MessageKind.NORM, 1, 0, EdgeId(0))) < 1000
    for kind in (MessageKind.ACTIVATION, MessageKind.TIED):
        with pytest.raises(WireError):
            limits(MessageHeader(kind, 1, 0, EdgeId(99)))


class _Runner:
    def __init__(self) -> None:
        self.delivered: list[object] = []

    def deliver(self, key: object, content: object) -> None:
        self.delivered.append(key)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (MessageHeader(MessageKind.GRADIENT, 7, 2, EdgeId(3)), "without a layout"),
        (MessageHeader(MessageKind.GRADIENT, 7, 2, EdgeId(3), TensorLayout("float32", (2,), (1,)), codec="x"), "'x'"),
        (MessageHeader(MessageKind.GRADIENT, 7, 2, EdgeId(3), TensorLayout("float32", (2,), (1,))), "3 bytes"),
    ],
)
def test_what_cannot_be_decoded_fails_the_stage_with_the_messages_name(header: MessageHeader, words: str) -> None:
    runner, failures = _Runner(), []
    receiver = MessageReceiver(runner, "cpu", lambda _peer, _why: None, failures.append)  # type: ignore[arg-type]
    receiver.on_message(Incoming(StageIndex(1), header, memoryview(b"abc"), lambda: None))
    assert not runner.delivered
    (failure,) = failures
    assert isinstance(failure, FusionError)
    assert words in str(failure)
    assert "gradient of edge 3, step 7, micro-batch 2 from stage 1" in str(failure)
