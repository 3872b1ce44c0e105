"""Between a stage and its transport: windows that starve no instruction, limits by the graph, words for errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.base.errors import FusionError, WireError
from fusion.base.ids import EdgeId, StageIndex
from fusion.base.layout import TensorLayout
from fusion.compress.catalog import parse_pair
from fusion.compress.linkcodecs import CodecSchedule
from fusion.graph.partition import Partition, legal_cuts, partition
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.runtime.coding import StageCoder
from fusion.runtime.machine import Key
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
    values = 2 * (4 * 6 * 4 + 56)  # two values of 4 samples by 6 floats, as they are in a frame
    uses = 2 * 10 * 6 * 4 // 2  # the other stage's use of the table
    assert window_bytes(parts, StageIndex(1)) == (max(values, uses), max(values, uses))
    assert window_bytes(parts, StageIndex(0)) == (max(values, uses), max(values, uses))


def test_a_window_holds_what_the_schedule_lets_wait_and_as_much_more_as_memory_allows(parts: Partition) -> None:
    values = 2 * (4 * 6 * 4 + 56)
    # five micro-batches may be between stage 0's forward and its backward: values at stage 1, or gradients back at 0
    for stage in (0, 1):
        assert window_bytes(parts, StageIndex(stage), [5, 1], 1000) == (5 * values, 5 * values)
        assert window_bytes(parts, StageIndex(stage), [5, 1], 5_000_000) == (5_000_000, 5_000_000)
        assert window_bytes(parts, StageIndex(stage), [5, 1], 50_000_000) == (16 * 2**20, 50_000_000)
        assert window_bytes(parts, StageIndex(stage), [5, 1], 10**12) == (16 * 2**20, 2**30)


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


EDGE = EdgeId(1)
LAYOUT = TensorLayout("float32", (4, 6), (6, 1))


def receive(
    parts: Partition, codecs: str, header: MessageHeader, payload: bytes
) -> tuple[list[object], list[FusionError]]:
    """Let stage 0 take a message from stage 1."""
    coder = StageCoder(parts, StageIndex(0), CodecSchedule.always(parse_pair(codecs)), seed=3)
    runner, failures = _Runner(), []
    receiver = MessageReceiver(runner, coder, lambda _peer, _why: None, failures.append)  # type: ignore[arg-type]
    receiver.on_message(Incoming(StageIndex(1), header, memoryview(payload), lambda: None))
    return runner.delivered, failures


def frame_of(parts: Partition, codecs: str) -> tuple[MessageHeader, bytes]:
    """A gradient as stage 1 sends it."""
    coder = StageCoder(parts, StageIndex(1), CodecSchedule.always(parse_pair(codecs)), seed=3)
    tensor = torch.arange(24.0).reshape(4, 6)
    sent = coder.encode(Key(MessageKind.GRADIENT, 7, 2, EDGE), tensor, requires_grad=False)
    return MessageHeader(MessageKind.GRADIENT, 7, 2, EDGE, sent.layout, codec=sent.codec), bytes(sent.payload)


@pytest.mark.parametrize(
    ("codecs", "changes", "payload", "words"),
    [
        ("none", {"layout": None}, b"abc", "without a layout"),
        ("none", {"codec": "frame"}, b"abc", "codec 'frame' in the header where 'none' (none) is agreed"),
        ("int8", {"codec": "none"}, b"abc", "codec 'none' in the header where 'frame' (int8) is agreed"),
        ("none", {}, b"abc", "3 bytes"),
        ("none", {"layout": TensorLayout("float32", (5, 6), (6, 1))}, b"abc", "shape [5, 6] where at most [4, 6]"),
        ("none", {"layout": TensorLayout("float32", (24,), (1,))}, bytes(96), "shape [24] where at most [4, 6]"),
        ("int8", {"codec": "frame"}, b"abc", "frame: 3 bytes are fewer"),
        ("int8", {"codec": "frame"}, bytes(100), "frame: starts with"),
        ("mask:1/8", {"codec": "frame"}, None, "for the mask of a tensor that was not sent"),
        ("none", {"edge": EdgeId(9)}, b"abc", "edge 9 is not of this stage"),
    ],
)
def test_b20_b21_what_cannot_be_decoded_fails_the_stage_with_the_messages_name(
    parts: Partition, codecs: str, changes: dict[str, Any], payload: bytes | None, words: str
) -> None:
    header = MessageHeader(MessageKind.GRADIENT, 7, 2, EDGE, LAYOUT)
    if payload is None:
        header, payload = frame_of(parts, "int4")
    delivered, failures = receive(parts, codecs, replace(header, **changes), payload)
    assert not delivered
    (failure,) = failures
    assert isinstance(failure, FusionError)
    assert words in str(failure)
    assert f"gradient of edge {changes.get('edge', 1)}, step 7, micro-batch 2 from stage 1" in str(failure)


@pytest.mark.parametrize("codecs", ["int8", "topk:4", "none+zstd", "lowrank:2"])
def test_b22_no_flipped_bit_of_a_frame_is_taken(parts: Partition, codecs: str) -> None:
    header, payload = frame_of(parts, codecs)
    assert receive(parts, codecs, header, payload)[1] == []
    for place in range(len(payload)):
        broken = bytearray(payload)
        broken[place] ^= 1 << place % 8
        delivered, (failure,) = receive(parts, codecs, header, bytes(broken))
        assert not delivered
        assert "gradient of edge 1, step 7, micro-batch 2 from stage 1: frame: " in str(failure)


@pytest.mark.parametrize(("sent", "agreed"), [("int4", "int8"), ("fp16", "bf16"), ("int8", "int4"), ("int2", "bf16")])
def test_frames_of_another_codec_than_the_links_are_refused(parts: Partition, sent: str, agreed: str) -> None:
    header, payload = frame_of(parts, sent)
    delivered, (failure,) = receive(parts, agreed, header, payload)
    assert not delivered
    assert f"where {agreed} is agreed" in str(failure)
