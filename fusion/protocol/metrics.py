"""What a step did, as its owner sees it: StepMetrics, and the figures of each stage that it is put together from."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion.base.ids import StageIndex
from fusion.links.estimate import small_messages
from fusion.wire.v1 import coordinator_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class LinkMetrics:
    """What one stage received from another in one step, in messages large enough to time: of 32 KiB and more."""

    bytes: int  #: payload, without what arrives together with a message's header
    busy_s: float  #: from each message's header to its last byte
    decode_s: float = 0.0
    waited_s: float = 0.0  #: the stage had nothing else to do than to wait for it
    messages: int = 0  #: that were timed; 0: not told

    @property
    def bytes_per_s(self) -> float:
        """Goodput as the receiver saw it; 0 where it took no time to speak of, or messages show more of the delay."""
        small = small_messages(self.bytes, self.messages)
        return self.bytes / self.busy_s if self.busy_s > 0 and not small else 0.0


@dataclass(frozen=True, slots=True)
class CodingMetrics:
    """What the codec of the link to another stage did in one step, of values and gradients."""

    codec: str
    raw_bytes: int = 0
    coded_bytes: int = 0
    encode_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Raw bytes over bytes on the wire; 1 where nothing was sent."""
        return self.raw_bytes / self.coded_bytes if self.coded_bytes else 1.0


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """What one stage did in one step."""

    stage: StageIndex
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    sent_bytes: dict[StageIndex, int] = field(default_factory=dict)  #: by the stage that they went to
    peak_memory_bytes: int = 0
    received: dict[StageIndex, LinkMetrics] = field(default_factory=dict)  #: by the stage that it came from
    blocked_s: dict[StageIndex, float] = field(default_factory=dict)  #: messages to that stage waited for credit
    coding: dict[StageIndex, CodingMetrics] = field(default_factory=dict)  #: by the stage that it went to
    codec_revision: int = 0  #: of stage 0: how often codecs were changed under this plan


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of the whole job."""

    step: int  #: from 1
    loss: float
    eval_loss: float | None = None  #: of the steps after which an evaluation ran
    grad_norm: float = 0.0  #: global 2-norm before clipping
    learning_rate: float = 0.0
    skipped: bool = False  #: gradients were not finite, nothing was changed
    step_s: float = 0.0
    samples: int = 0
    tokens: int = 0  #: 0 unless the batch holds token sequences
    bytes: int = 0  #: sent over all links
    stages: tuple[StageMetrics, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step over its duration; 0 where there are no tokens."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0

    def __str__(self) -> str:
        evaluated = "" if self.eval_loss is None else f"  eval loss {self.eval_loss:.4f}"
        skipped = "  skipped: gradients not finite" if self.skipped else ""
        return f"step {self.step}  loss {self.loss:.4f}{evaluated}{skipped}  {self.step_s:.2f} s"


_UNCODED = CodingMetrics("")


def metrics_from_proto(message: coordinator_pb2.StepMetrics) -> StepMetrics:
    """Return the metrics of a message."""
    return StepMetrics(
        step=message.step,
        loss=message.loss,
        eval_loss=message.eval_loss if message.HasField("eval_loss") else None,
        grad_norm=message.grad_norm,
        learning_rate=message.learning_rate,
        skipped=message.skipped,
        step_s=message.step_s,
        samples=message.samples,
        tokens=message.tokens,
        bytes=message.bytes,
        stages=tuple(_stage_from_proto(stage) for stage in message.stages),
    )


def metrics_to_proto(metrics: StepMetrics) -> coordinator_pb2.StepMetrics:
    """Return the message for metrics."""
    return coordinator_pb2.StepMetrics(
        step=metrics.step,
        loss=metrics.loss,
        eval_loss=metrics.eval_loss,
        grad_norm=metrics.grad_norm,
        learning_rate=metrics.learning_rate,
        skipped=metrics.skipped,
        step_s=metrics.step_s,
        samples=metrics.samples,
        tokens=metrics.tokens,
        bytes=metrics.bytes,
        stages=[_stage_to_proto(stage, metrics) for stage in metrics.stages],
    )


def _stage_from_proto(message: node_pb2.StageStep) -> StageMetrics:
    return StageMetrics(
        stage=StageIndex(message.stage),
        step_s=message.step_s,
        compute_s=message.compute_s,
        wait_s=message.wait_s,
        sent_bytes={StageIndex(link.target): link.bytes for link in message.sent},
        peak_memory_bytes=message.peak_memory_bytes,
        received={
            StageIndex(link.source): LinkMetrics(link.bytes, link.busy_s, link.decode_s, link.waited_s, link.messages)
            for link in message.received
        },
        blocked_s={StageIndex(link.target): link.blocked_s for link in message.sent if link.blocked_s},
        coding={
            StageIndex(link.target): CodingMetrics(link.codec, link.raw_bytes, link.coded_bytes, link.encode_s)
            for link in message.sent
            if link.codec
        },
        codec_revision=message.codec_revision,
    )


def _stage_to_proto(stage: StageMetrics, metrics: StepMetrics) -> node_pb2.StageStep:
    return node_pb2.StageStep(
        stage=stage.stage,
        step=metrics.step,
        learning_rate=metrics.learning_rate,
        skipped=metrics.skipped,
        step_s=stage.step_s,
        compute_s=stage.compute_s,
        wait_s=stage.wait_s,
        sent=[
            node_pb2.LinkBytes(
                target=target,
                bytes=count,
                blocked_s=stage.blocked_s.get(target, 0.0),
                codec=coding.codec,
                raw_bytes=coding.raw_bytes,
                coded_bytes=coding.coded_bytes,
                encode_s=coding.encode_s,
            )
            for target, count in stage.sent_bytes.items()
            for coding in (stage.coding.get(target, _UNCODED),)
        ],
        received=[
            node_pb2.LinkReceived(
                source=source,
                bytes=link.bytes,
                busy_s=link.busy_s,
                decode_s=link.decode_s,
                waited_s=link.waited_s,
                messages=link.messages,
            )
            for source, link in stage.received.items()
        ],
        peak_memory_bytes=stage.peak_memory_bytes,
        codec_revision=stage.codec_revision,
    )
