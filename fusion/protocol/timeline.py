"""Measured spans to and from protobuf, and put on one line of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion.base.errors import WireError
from fusion.links.clocks import Offset, offsets_to
from fusion.plan.timeline import Kind, Span
from fusion.wire.v1 import node_pb2

MOST_SPANS = 4000
_KINDS = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class StageSpans:
    """What one stage did when in one step, by its own clock."""

    stage: int
    step: int
    spans: tuple[Span, ...]
    clocks: dict[int, Offset]  #: of its peers: how far they are ahead


def stage_spans_to_proto(measured: StageSpans) -> node_pb2.StageSpans:
    """Return the message for spans."""
    message = node_pb2.StageSpans(stage=measured.stage, step=measured.step)
    for span in measured.spans:
        message.spans.add(
            stage=span.stage,
            target=span.target,
            kind=span.kind.value,
            micro_batch=span.micro_batch,
            start_s=span.start_s,
            end_s=span.end_s,
        )
    for peer, clock in measured.clocks.items():
        message.clocks.add(peer=peer, offset_s=clock.offset_s, error_s=clock.error_s)
    return message


def stage_spans_from_proto(message: node_pb2.StageSpans) -> StageSpans:
    """Return the spans of a message; WireError if they are too many or not of this world."""
    if len(message.spans) > MOST_SPANS:
        raise WireError(f"spans: {len(message.spans)} of one step; at most {MOST_SPANS} are allowed")
    return StageSpans(
        message.stage,
        message.step,
        tuple(_span(item, message.step) for item in message.spans),
        {clock.peer: Offset(clock.offset_s, clock.error_s) for clock in message.clocks},
    )


def _span(item: node_pb2.TimedSpan, step: int) -> Span:
    kind = _KINDS.get(item.kind)
    if kind is None:
        raise WireError(f"spans: kind {item.kind[:20]!r} is none of {', '.join(_KINDS)}")
    if not (math.isfinite(item.start_s) and math.isfinite(item.end_s) and item.start_s <= item.end_s):
        raise WireError(f"spans: {item.kind} from {item.start_s} to {item.end_s}")
    return Span(item.stage, item.target, kind, step, item.micro_batch, item.start_s, item.end_s)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of several stages on one line of time, which begins with the first of them."""

    spans: tuple[Span, ...]
    error_s: float  #: the most by which one stage may be shifted against another
    missing: tuple[int, ...]  #: stages whose clock nobody knows; they are left out


def align(measured: Sequence[StageSpans]) -> Timeline:
    """Put the spans of all stages on the clock of the first one."""
    if not measured:
        return Timeline((), 0.0, ())
    latest: dict[tuple[int, int], Offset] = {}
    for item in sorted(measured, key=lambda one: one.step):
        latest |= {(item.stage, peer): clock for peer, clock in item.clocks.items()}
    stages = sorted({item.stage for item in measured})
    known = offsets_to(stages[0], latest)
    moved = [
        span._replace(start_s=span.start_s - clock.offset_s, end_s=span.end_s - clock.offset_s)
        for item in measured
        if (clock := known.get(item.stage)) is not None
        for span in item.spans
    ]
    begin_s = min((span.start_s for span in moved), default=0.0)
    spans = sorted(
        (span._replace(start_s=span.start_s - begin_s, end_s=span.end_s - begin_s) for span in moved),
        key=lambda span: span.start_s,
    )
    error_s = max((known[stage].error_s for stage in stages if stage in known), default=0.0)
    return Timeline(tuple(spans), error_s, tuple(stage for stage in stages if stage not in known))


def whole_steps(measured: Iterable[StageSpans]) -> list[StageSpans]:
    """Return the spans of those steps of which every stage has told."""
    items = list(measured)
    stages = {item.stage for item in items}
    told: dict[int, set[int]] = {}
    for item in items:
        told.setdefault(item.step, set()).add(item.stage)
    return [item for item in items if told[item.step] == stages]
