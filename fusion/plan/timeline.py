"""What happened when, on every stage and link: the spans of a simulated or a measured run, and their Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What a span was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"  #: the optimizer
    EVALUATE = "evaluate"
    WAIT = "wait"  #: a stage had nothing that it could do
    ENCODE = "encode"
    DECODE = "decode"
    ACTIVATION = "activation"  #: this and the following: on the wire, from the first byte to the last
    GRADIENT = "gradient"
    TIED = "tied"
    NORM = "norm"
    VERDICT = "verdict"


class Span(NamedTuple):
    """A stretch of time on one stage, or on the link from one stage to another."""

    stage: int
    target: int  #: of a link the stage at its far end; -1: the stage's own work
    kind: Kind
    step: int  #: from 1
    micro_batch: int  #: from 0; -1 where there is none
    start_s: float
    end_s: float


#: rows of one process in the trace; what may overlap has rows of its own
_THREADS = {Kind.ENCODE: 3, Kind.DECODE: 4, Kind.NORM: 2, Kind.VERDICT: 2}
_THREAD_NAMES = {1: "wire", 2: "control", 3: "encode", 4: "decode"}
#: Chrome's own trace viewer has these colours by name; Perfetto colours by the words of a span's name
_COLOURS = {
    Kind.FORWARD: "thread_state_runnable",
    Kind.BACKWARD: "thread_state_running",
    Kind.UPDATE: "thread_state_iowait",
    Kind.EVALUATE: "rail_idle",
    Kind.WAIT: "grey",
    Kind.ENCODE: "rail_load",
    Kind.DECODE: "rail_load",
    Kind.ACTIVATION: "rail_response",
    Kind.GRADIENT: "rail_animation",
    Kind.TIED: "vsync_highlight_color",
    Kind.NORM: "black",
    Kind.VERDICT: "black",
}
Row = tuple[int, int]  #: stage and target, as in a span


def rows_of(spans: Iterable[Span]) -> list[Row]:
    """Return the stages and links that the spans touch: every stage, then its links by their far end."""
    return sorted({(span.stage, span.target) for span in spans})


def row_label(row: Row, names: Sequence[str]) -> str:
    """Return the words for a row: "stage 2 paris" or "link 2 → 3"."""
    stage, target = row
    if target >= 0:
        return f"link {stage} → {target}"
    name = names[stage] if stage < len(names) else ""
    return f"stage {stage} {name}".rstrip()


def span_label(span: Span) -> str:
    """Return the words for a span: "forward 3", "update"."""
    return span.kind.value if span.micro_batch < 0 else f"{span.kind.value} {span.micro_batch}"


def chrome_trace(spans: Sequence[Span], names: Sequence[str]) -> dict[str, Any]:
    """Return the spans as an object of the Chrome trace format, which Perfetto opens too.

    Every stage and every link is a process, in the order of the pipeline; `names` are the nodes' by stage. A link has
    threads for its wire, small control messages, encoding and decoding. Times are in microseconds.
    """
    rows = rows_of(spans)
    process = {row: index + 1 for index, row in enumerate(rows)}
    threads = sorted({(process[span.stage, span.target], _thread(span), span.target >= 0) for span in spans})
    events: list[dict[str, Any]] = []
    for row in rows:
        events.append(_metadata("process_name", process[row], 0, {"name": row_label(row, names)}))
        events.append(_metadata("process_sort_index", process[row], 0, {"sort_index": process[row]}))
    for pid, tid, is_link in threads:
        name = _THREAD_NAMES[tid] if is_link else "compute"
        events.append(_metadata("thread_name", pid, tid, {"name": name}))
    events += [_event(span, process[span.stage, span.target]) for span in spans]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def chrome_trace_json(spans: Sequence[Span], names: Sequence[str]) -> str:
    """Return `chrome_trace` as the text of a .json file."""
    return json.dumps(chrome_trace(spans, names), separators=(",", ":"), allow_nan=False)


def _thread(span: Span) -> int:
    return _THREADS.get(span.kind, 1) if span.target >= 0 else 1


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(span: Span, pid: int) -> dict[str, Any]:
    args: dict[str, int] = {"step": span.step}
    if span.micro_batch >= 0:
        args["micro_batch"] = span.micro_batch
    start_us = round(span.start_s * 1e6, 3)
    return {
        "ph": "X",
        "name": span_label(span),
        "cat": span.kind.value,
        "pid": pid,
        "tid": _thread(span),
        "ts": start_us,
        # the difference of rounded ends, so that spans which touch do not overlap
        "dur": max(0.0, round(round(span.end_s * 1e6, 3) - start_us, 3)),
        "cname": _COLOURS[span.kind],
        "args": args,
    }
