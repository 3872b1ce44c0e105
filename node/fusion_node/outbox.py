"""What the daemon has to tell the coordinator about stages: kept in order, repeated until it is answered."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from dataclasses import dataclass, field

from fusion.base.clock import Clock
from fusion.base.errors import FusionError
from fusion.links.clocks import Offset
from fusion.observe.logs import fields
from fusion.plan.timeline import Span
from fusion.protocol.timeline import StageSpans, stage_spans_to_proto
from fusion.transport.channels import backoff_s
from fusion.wire.v1 import node_pb2, tensor_pb2
from fusion_node.control import Control, may_pass
from fusion_node.events import ReportMetrics, ReportStage, StageRef
from fusion_node.ipc import LogEntry, StageStateReport, StepReport, one_line

log = logging.getLogger("fusion.node.outbox")

MAX_WAITING = 20_000  #: figures and log lines; older ones are dropped, reports of states never
BATCH = 200  #: figures and log lines in one message, far below its size limit
GATHER_S = 0.25  #: between two messages of figures

_STATES = {
    "starting": node_pb2.STAGE_STATE_STARTING,
    "ready": node_pb2.STAGE_STATE_READY,
    "running": node_pb2.STAGE_STATE_RUNNING,
    "finished": node_pb2.STAGE_STATE_FINISHED,
    "failed": node_pb2.STAGE_STATE_FAILED,
    "stopped": node_pb2.STAGE_STATE_STOPPED,
    "held": node_pb2.STAGE_STATE_HELD,
}


@dataclass(slots=True)
class _Metrics:
    """Figures and log lines of one stage, in one message."""

    ref: StageRef
    message: node_pb2.MetricsReport
    count: int = 0


@dataclass(slots=True)
class Outbox:
    """Take reports at any time with `put_stage` and `put_metrics`; `run` sends them while `open` is set."""

    node_name: str
    clock: Clock
    open: asyncio.Event = field(default_factory=asyncio.Event)  #: while the node is registered
    _waiting: deque[node_pb2.StageReport | _Metrics] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)  #: something waits, or is being sent
    _sent: asyncio.Event = field(default_factory=asyncio.Event)  #: the opposite
    _count: int = 0  #: figures and log lines that wait

    def put_stage(self, action: ReportStage) -> None:
        """Queue a stage's state."""
        self._waiting.append(stage_message(action.ref, action.incarnation, action.report))
        self._notify()

    def put_metrics(self, action: ReportMetrics) -> None:
        """Queue figures or a log line of a stage."""
        if self._count >= MAX_WAITING:
            self._drop_oldest()
        last = self._waiting[-1] if self._waiting else None
        if not isinstance(last, _Metrics) or last.ref != action.ref or last.count >= BATCH:
            ref = action.ref
            message = node_pb2.MetricsReport(job_id=ref.job, epoch=ref.epoch, incarnation=action.incarnation)
            last = _Metrics(ref, message)
            self._waiting.append(last)
        if isinstance(action.report, StepReport):
            last.message.steps.append(step_message(action.ref.stage, action.report))
            if action.report.spans:
                last.message.spans.append(spans_message(action.ref.stage, action.report))
        else:
            last.message.logs.append(self._log_line(action.report))
        last.count += 1
        self._count += 1
        self._notify()

    async def run(self, control: Control) -> None:
        """Send for ever, first in first out."""
        while True:
            if not self._waiting:
                self._arrived.clear()
                self._sent.set()
            await self._arrived.wait()
            await self.open.wait()
            if isinstance(self._waiting[0], _Metrics) and len(self._waiting) == 1:
                await asyncio.sleep(GATHER_S)  # more will come
            item = self._waiting.popleft()
            if isinstance(item, _Metrics):
                self._count -= item.count
            await self._send(control, item)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is sent; False if it was not within `timeout_s`."""
        if not self._arrived.is_set():
            return True
        try:
            await asyncio.wait_for(self._sent.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _send(self, control: Control, item: node_pb2.StageReport | _Metrics) -> None:
        attempt = 0
        while True:
            await self.open.wait()
            try:
                if isinstance(item, _Metrics):
                    await control.report_metrics(item.message)
                else:
                    await control.report_stage(item)
                return
            except FusionError as error:
                if not may_pass(error):
                    log.warning("report refused by the coordinator", extra=fields(reason=error))
                    return
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    def _notify(self) -> None:
        self._sent.clear()
        self._arrived.set()

    def _drop_oldest(self) -> None:
        for index, item in enumerate(self._waiting):
            if isinstance(item, _Metrics):
                self._count -= item.count
                del self._waiting[index]
                log.warning("too many figures wait for the coordinator; oldest dropped", extra=fields(count=item.count))
                return

    def _log_line(self, entry: LogEntry) -> node_pb2.LogLine:
        return node_pb2.LogLine(
            wall_s=self.clock.wall_s(), level=entry.level, text=_clean(entry.text), origin=self.node_name
        )


def stage_message(ref: StageRef, incarnation: int, report: StageStateReport) -> node_pb2.StageReport:
    """Return the message for a stage's state, with a request id of its own."""
    message = node_pb2.StageReport(
        request_id=str(uuid.uuid4()),
        job_id=ref.job,
        epoch=ref.epoch,
        stage=ref.stage,
        state=_STATES[report.state],
        detail=_clean(report.detail),
        cause=report.cause,
        peer_stage=report.peer_stage,
        incarnation=incarnation,
        step=report.step,
    )
    if report.held_digest:
        message.held.CopyFrom(tensor_pb2.BlobRef(digest=report.held_digest, size_bytes=report.held_size_bytes))
    if report.weights_digest:
        message.weights.CopyFrom(tensor_pb2.BlobRef(digest=report.weights_digest, size_bytes=report.weights_size_bytes))
    return message


def step_message(stage: int, report: StepReport) -> node_pb2.StageStep:
    """Return the message for a step's figures."""
    message = node_pb2.StageStep(
        stage=stage,
        step=report.step,
        learning_rate=report.learning_rate,
        skipped=report.skipped,
        step_s=report.step_s,
        compute_s=report.compute_s,
        wait_s=report.wait_s,
        samples=report.samples,
        tokens=report.tokens,
        peak_memory_bytes=report.peak_memory_bytes,
        codec_revision=report.codec_revision,
        received=[
            node_pb2.LinkReceived(
                source=source,
                bytes=one.bytes,
                busy_s=one.busy_s,
                decode_s=one.decode_s,
                waited_s=one.waited_s,
                messages=one.messages,
            )
            for source, one in sorted(report.received.items())
        ],
    )
    for target, count in sorted(report.sent.items()):
        link = message.sent.add(target=target, bytes=count)
        if target in report.sending:
            sending = report.sending[target]
            link.sending_s, link.blocked_s = sending.busy_s, sending.blocked_s
            link.raw_bytes, link.coded_bytes = sending.raw_bytes, sending.coded_bytes
            link.encode_s, link.codec = sending.encode_s, sending.codec
    for name in ("loss", "eval_loss", "grad_norm"):
        value = getattr(report, name)
        if value is not None:
            setattr(message, name, value)
    return message


def spans_message(stage: int, report: StepReport) -> node_pb2.StageSpans:
    """Return the message for what a step was spent on."""
    spans = tuple(
        Span(span.stage, span.target, span.kind, report.step, span.micro_batch, span.start_s, span.end_s)
        for span in report.spans
    )
    clocks = {peer: Offset(clock.offset_s, clock.error_s) for peer, clock in sorted(report.clocks.items())}
    return stage_spans_to_proto(StageSpans(stage, report.step, spans, clocks))


def _clean(text: str) -> str:
    """Return `text` without lone surrogates, which protobuf refuses."""
    return one_line(text).encode("utf-8", "replace").decode("utf-8")
