"""Between a stage and its transport: tensors to payloads on the way out, payloads to tensors on the way in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from fusion.base.errors import FusionError, WireError
from fusion.base.ids import EdgeId, StageIndex
from fusion.compress import raw
from fusion.compress.catalog import largest_frame_bytes
from fusion.graph.dag import InputKind, Value
from fusion.graph.partition import Partition
from fusion.observe.spans import SpanRecorder
from fusion.plan.timeline import Kind
from fusion.protocol.messages import MessageHeader, MessageKind
from fusion.protocol.passes import MAX_VERDICT_BYTES, NORM_BYTES
from fusion.runtime.coding import StageCoder
from fusion.runtime.executor import all_uses
from fusion.runtime.machine import Key
from fusion.runtime.stage import Arrived, StageRunner
from fusion.transport.base import Incoming, Outgoing, Payload, Transport
from fusion.transport.window import FIRST_WINDOW_BYTES, MOST_WINDOW_BYTES
from fusion_node import replicas
from fusion_node.contact import contact_bytes

_WIRE_KINDS = {
    MessageKind.ACTIVATION: Kind.ACTIVATION,
    MessageKind.EVAL: Kind.ACTIVATION,
    MessageKind.GRADIENT: Kind.GRADIENT,
    MessageKind.TIED: Kind.TIED,
    MessageKind.NORM: Kind.NORM,
    MessageKind.VERDICT: Kind.VERDICT,
}
_VALUE_KINDS = (MessageKind.ACTIVATION, MessageKind.GRADIENT, MessageKind.EVAL)


class WireOutbox:
    """Hands a stage's messages to the transport. Tensors are encoded on the link's own thread."""

    def __init__(self, transport: Transport, coder: StageCoder, spans: SpanRecorder | None = None) -> None:
        self._transport = transport
        self._coder = coder
        self._spans = spans

    def send_tensor(self, target: StageIndex, key: Key, tensor: torch.Tensor | None, *, requires_grad: bool) -> None:
        def prepare() -> tuple[MessageHeader, Payload]:
            if tensor is None:
                self._coder.absent(key)
                return MessageHeader(*_names(key), absent=True), memoryview(b"")
            start_s = time.monotonic()
            sent = self._coder.encode(key, tensor, requires_grad=requires_grad)
            if self._spans is not None:
                end_s = time.monotonic()
                self._spans.link(self._spans.stage, target, Kind.ENCODE, key.step, key.micro_batch, start_s, end_s)
            header = MessageHeader(*_names(key), sent.layout, requires_grad=requires_grad, codec=sent.codec)
            return header, sent.payload

        self._transport.send(target, Outgoing(prepare))

    def send_numbers(self, target: StageIndex, key: Key, numbers: bytes) -> None:
        self._transport.send(target, Outgoing(lambda: (MessageHeader(*_names(key)), numbers), urgent=True))

    def bytes_sent(self) -> dict[StageIndex, int]:
        return self._transport.bytes_sent()


def _names(key: Key) -> tuple[MessageKind, int, int, EdgeId]:
    return key.kind, key.step, key.micro_batch, EdgeId(key.edge)


class MessageReceiver:
    """Decodes what arrives, on the transport's threads, and delivers it to the stage."""

    def __init__(
        self,
        runner: StageRunner,
        coder: StageCoder,
        on_lost: Callable[[StageIndex, str], None],
        on_failure: Callable[[FusionError], None],
        takers: Mapping[MessageKind, Callable[[Incoming], None]] | None = None,
        spans: SpanRecorder | None = None,
    ) -> None:
        """`takers` get the messages of a kind, instead of the stage."""
        self._takers = {} if takers is None else takers
        self._spans = spans
        self._runner = runner
        self._coder = coder
        self._on_lost = on_lost
        self._on_failure = on_failure

    def on_message(self, message: Incoming) -> None:
        """Decode a message and deliver it; one that cannot be decoded fails the stage with its name."""
        header = message.header
        key = Key(header.kind, header.step, header.micro_batch, header.edge)
        try:
            if (take := self._takers.get(header.kind)) is not None:
                take(message)
                return
            arrived_s = time.monotonic()
            content = self._content(key, message)
            if self._spans is not None:
                self._note(self._spans, key, message, arrived_s)
        except WireError as error:
            self._on_failure(
                WireError(
                    f"{header.kind.name.lower()} of edge {header.edge}, step {header.step}, micro-batch "
                    f"{header.micro_batch} from stage {message.source}: {error}"
                )
            )
            return
        self._runner.deliver(key, content)

    @staticmethod
    def _note(spans: SpanRecorder, key: Key, message: Incoming, arrived_s: float) -> None:
        """Note how long a message was on its way in, and what decoding it took."""
        kind = _WIRE_KINDS.get(key.kind)
        if kind is None:
            return
        micro_batch = key.micro_batch if key.kind in _VALUE_KINDS else -1
        spans.link(message.source, spans.stage, kind, key.step, micro_batch, message.began_s, arrived_s)
        if key.kind in _VALUE_KINDS:
            spans.link(message.source, spans.stage, Kind.DECODE, key.step, micro_batch, arrived_s, time.monotonic())

    def on_lost(self, peer: StageIndex, reason: str) -> None:
        """Pass the loss of a peer on."""
        self._on_lost(peer, reason)

    def _content(self, key: Key, message: Incoming) -> Arrived:
        header = message.header
        if header.kind in (MessageKind.NORM, MessageKind.VERDICT):
            return Arrived(numbers=bytes(message.payload), release=message.release)
        if header.absent:
            self._coder.absent(key)
            return Arrived(release=message.release)
        if header.layout is None:
            raise WireError("a tensor without a layout")
        requires_grad = header.requires_grad
        tensor = self._coder.decode(key, header.layout, message.payload, header.codec, requires_grad=requires_grad)
        return Arrived(tensor, requires_grad, release=message.release)


def window_bytes(
    parts: Partition, stage: StageIndex, in_flight: Sequence[int] = (), share_bytes: int = 0
) -> tuple[int, int]:
    """Return how many payload bytes a peer may have under way to `stage` at first, and the most that may become of it.

    in_flight: by stage, how many micro-batches it holds at once. share_bytes: of the memory beyond what the plan
    needs, what one peer may take.

    Whatever the memory, a window holds what the schedule lets wait for the stage. It gives credit back as it uses
    messages, and uses those of an instruction together: with less, it would wait for a value that waits for credit.
    """
    values, shard = parts.graph.values, parts.shards[stage]
    waiting: Counter[tuple[str, StageIndex]] = Counter()
    for edge in map(parts.edges.__getitem__, (*shard.incoming, *shard.outgoing)):
        peer = edge.source if edge.target == stage else edge.target
        flights = in_flight[edge.source] if in_flight else 1  # no more are between a value's maker and its gradient
        waiting["values", peer] += flights * _frame_bytes(values[edge.value])
    for index, use in all_uses(parts):
        waiting["uses", use.stage] += values[parts.shared[index].value].bytes
    needed = max(waiting.values(), default=0)
    return max(needed, min(FIRST_WINDOW_BYTES, share_bytes)), max(needed, min(MOST_WINDOW_BYTES, share_bytes))


def _frame_bytes(value: Value) -> int:
    """Return the most bytes that a value travels as, with or without a codec."""
    return 0 if value.spec is None else largest_frame_bytes(value.spec)


class PayloadLimits:
    """The most memory that each message of a stage may take, by what the graph says about it, gaps included."""

    def __init__(self, parts: Partition, stage: StageIndex) -> None:
        values = parts.graph.values
        shard = parts.shards[stage]
        self._edges = {
            edge: max(raw.MAX_GAP_FACTOR * value.bytes, _frame_bytes(value))
            for edge in (*shard.incoming, *shard.outgoing)
            for value in (values[parts.edges[edge].value],)
        }
        self._uses = [raw.MAX_GAP_FACTOR * values[parts.shared[index].value].bytes for index, _ in all_uses(parts)]
        parameters = sum(source.kind is InputKind.PARAMETER for source in parts.graph.inputs)
        self._control = {
            MessageKind.NORM: NORM_BYTES + 8 * parameters,
            MessageKind.VERDICT: MAX_VERDICT_BYTES,
            MessageKind.REPLICA: replicas.PART_BYTES,
            MessageKind.REPLICA_ACK: replicas.ANSWER_BYTES,
            MessageKind.CONTACT: contact_bytes(len(parts.shards)),
        }

    def __call__(self, header: MessageHeader) -> int:
        """Return the limit in bytes; WireError for an edge or a use that the stage does not have."""
        if header.kind in _VALUE_KINDS:
            if header.edge not in self._edges:
                raise WireError(f"edge {header.edge} is not of this stage")
            return self._edges[header.edge]
        if header.kind is MessageKind.TIED:
            if header.edge >= len(self._uses):
                raise WireError(f"use {header.edge} does not exist")
            return self._uses[header.edge]
        return self._control[header.kind]
