"""A timeline as one self-contained SVG picture: a row for every stage and link, time from left to right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import floor, log10
from xml.sax.saxutils import escape

from fusion.plan.timeline import Kind, Row, Span, row_label, rows_of, span_label

MOST_ROWS = 64  #: drawn; of more, the busiest stages are kept, and some from all along the pipeline
_BUSIEST = 8
_MOST_HINTS = 4000  #: spans that get a text to be seen under the pointer
_PLOT_PX, _LABEL_PX, _SHARE_PX, _PAD_PX = 1120.0, 168.0, 64.0, 20.0
_HEAD_PX, _AXIS_PX, _LEGEND_PX = 34.0, 26.0, 34.0
_STAGE_PX, _LINK_PX, _GAP_PX = 24.0, 13.0, 3.0
_DENSE_ROWS, _DENSE_PX = 30, 16.0  #: with more rows than that, stages are drawn lower
_STRIP_PX = 4.0  #: encoding above and decoding below the wire
_NARROW_PX = 0.6  #: narrower spans of one kind are drawn together
_TICKS = 12

#: fill, and whether white text is read on it; light where something only travels, dark where something works
_FILLS = {
    Kind.FORWARD: ("#3b76b8", True),
    Kind.BACKWARD: ("#2f8f5b", True),
    Kind.UPDATE: ("#e08a1e", True),
    Kind.EVALUATE: ("#7d6bb3", True),
    Kind.ACTIVATION: ("#b3cdea", False),
    Kind.GRADIENT: ("#aedcc0", False),
    Kind.TIED: ("#f0c9a0", False),
    Kind.NORM: ("#39424e", True),
    Kind.VERDICT: ("#39424e", True),
    Kind.ENCODE: ("#a0569b", True),
    Kind.DECODE: ("#d08cc4", True),
}
_CONTROL = (Kind.NORM, Kind.VERDICT)
_STRIPS = (Kind.ENCODE, Kind.DECODE)
_STYLE = (
    "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:11px;fill:#27313d}"
    ".t{font-size:15px;font-weight:600}.q{fill:#66717f}.e{text-anchor:end}.m{text-anchor:middle}"
    ".k{font-size:10px}.n{font-size:10px;text-anchor:middle}.s{font-size:9px}"
    ".w{fill:#ffffff}"
)


def timeline_svg(spans: Sequence[Span], names: Sequence[str], title: str) -> str:
    """Return the picture of the spans; `names` are the nodes' by stage, `title` is the line at the top.

    Waiting is left empty. At the right of each row stands the share of the time that it was busy. Of more than
    `MOST_ROWS` rows the links are left out; of more stages some from all along the pipeline and the busiest are
    drawn. A line says so.
    """
    return _Picture(spans, names, title).text()


@dataclass(frozen=True, slots=True)
class _Band:
    """Where a row is drawn."""

    row: Row
    top: float
    height: float


class _Picture:
    def __init__(self, spans: Sequence[Span], names: Sequence[str], title: str) -> None:
        self._names, self._title = names, title
        self._begin_s = min((span.start_s for span in spans), default=0.0)
        self._total_s = max((span.end_s for span in spans), default=1.0) - self._begin_s or 1.0
        self._by_row: dict[Row, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.start_s):
            if span.kind is not Kind.WAIT:
                self._by_row[span.stage, span.target].append(span)
        self._shares = {row: _busy_s(found) / self._total_s for row, found in self._by_row.items()}
        rows = rows_of(spans)
        kept = self._kept(rows)
        self._left_out = len(rows) - len(kept)
        self._coded = {row for row in kept for span in self._by_row[row] if span.kind in _STRIPS}
        self._bands = self._place(kept)
        self._bottom = self._bands[-1].top + self._bands[-1].height if kept else _HEAD_PX + _AXIS_PX
        self._hints = sum(len(self._by_row[row]) for row in kept) <= _MOST_HINTS
        self._out: list[str] = []

    def text(self) -> str:
        width = _LABEL_PX + _PLOT_PX + _SHARE_PX + 2 * _PAD_PX
        height = self._bottom + _LEGEND_PX + (18.0 if self._left_out else 0.0) + 6.0
        self._out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img">',
            f"<title>{_plain(self._title)}</title><style>{_STYLE}</style>",
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]
        self._put_text(_PAD_PX, 24.0, self._title, "t")
        self._put_text(_LABEL_PX + _PLOT_PX + _SHARE_PX + _PAD_PX, _HEAD_PX + 16.0, "busy", "e q")
        self._axis()
        for band in self._bands:
            self._row(band)
        self._steps()
        self._legend()
        if self._left_out:
            words = f"{self._left_out} more rows are not drawn; these stages are from all along the pipeline"
            self._put_text(_PAD_PX, self._bottom + _LEGEND_PX + 14.0, words, "q")
        return "\n".join([*self._out, "</svg>\n"])

    def _kept(self, rows: list[Row]) -> list[Row]:
        if len(rows) <= MOST_ROWS:
            return rows
        stages = [row for row in rows if row[1] < 0]
        if len(stages) <= MOST_ROWS:
            return stages
        busiest = sorted(stages, key=lambda row: -round(self._shares.get(row, 0.0), 6))[:_BUSIEST]
        last = MOST_ROWS - _BUSIEST - 1
        spread = [stages[index * (len(stages) - 1) // last] for index in range(last + 1)]
        return sorted({*busiest, *spread})

    def _place(self, rows: Sequence[Row]) -> list[_Band]:
        bands: list[_Band] = []
        top = _HEAD_PX + _AXIS_PX
        for row in rows:
            if row[1] < 0:
                height = _STAGE_PX if len(rows) <= _DENSE_ROWS else _DENSE_PX
                top += 5.0 if any(other[1] >= 0 for other in rows) and bands else 0.0  # its links belong to a stage
            else:
                height = _LINK_PX + (2 * _STRIP_PX if row in self._coded else 0.0)
            bands.append(_Band(row, top, height))
            top += height + _GAP_PX
        return bands

    def _x(self, time_s: float) -> float:
        return _PAD_PX + _LABEL_PX + (time_s - self._begin_s) / self._total_s * _PLOT_PX

    def _axis(self) -> None:
        tick_s = nice_step(self._total_s / _TICKS)
        top, bottom = _HEAD_PX + _AXIS_PX - 4.0, self._bottom + 2.0
        for index in count():
            if index * tick_s > self._total_s * (1 + 1e-9):
                return
            x = self._x(self._begin_s + index * tick_s)
            self._out.append(f'<path d="M{x:.1f} {top:g}V{bottom:g}" stroke="#e3e7ec"/>')
            self._put_text(x, top - 6.0, tick_label(index * tick_s, tick_s), "m q")

    def _row(self, band: _Band) -> None:
        left, middle = _PAD_PX + _LABEL_PX, band.top + band.height / 2 + 4.0
        is_stage = band.row[1] < 0
        fill = "#eef1f5" if is_stage else "#f8f9fb"
        self._out.append(
            f'<rect x="{left:g}" y="{band.top:g}" width="{_PLOT_PX:g}" height="{band.height:g}" fill="{fill}"/>'
        )
        label = row_label(band.row, self._names)
        self._put_text(_PAD_PX + (0 if is_stage else 12), middle, _cut(label, 26), "" if is_stage else "k q")
        share = f"{100 * self._shares.get(band.row, 0.0):.0f} %"
        self._put_text(left + _PLOT_PX + _SHARE_PX, middle, share, "e" if is_stage else "e k q")
        for spans in _together(self._by_row[band.row], self._total_s / _PLOT_PX * _NARROW_PX):
            self._span(band, spans)

    def _span(self, band: _Band, spans: list[Span]) -> None:
        """Draw one span, or several that are too narrow to tell apart."""
        first = spans[0]
        x = self._x(first.start_s)
        width = max(0.5, self._x(max(span.end_s for span in spans)) - x)
        top, height = band.top + 1.0, band.height - 2.0
        if band.row in self._coded:
            top, height = top + _STRIP_PX, height - 2 * _STRIP_PX
        if first.kind in _STRIPS:
            top += -_STRIP_PX if first.kind is Kind.ENCODE else height
            height = _STRIP_PX
        elif first.kind in _CONTROL:
            width = max(1.5, width)
        fill, white = _FILLS[first.kind]
        corner = ' rx="1.5"' if width > 3 else ""
        edge = ' stroke="#ffffff" stroke-width="0.7"' if width > 4 and height > 4 else ""
        shape = f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}"{corner} fill="{fill}"{edge}'
        self._out.append(f"{shape}><title>{_plain(_hint(spans))}</title></rect>" if self._hints else f"{shape}/>")
        number = str(first.micro_batch)
        fits = len(spans) == 1 and first.micro_batch >= 0 and width >= 6.0 * len(number) + 4.0
        if fits and first.kind not in _STRIPS and first.kind not in _CONTROL:
            classes = "n" + (" s" if height < 14 else "") + (" w" if white else "")
            y = top + height / 2 + (3.6 if height >= 14 else 3.2)
            self._out.append(f'<text class="{classes}" x="{x + width / 2:.2f}" y="{y:.1f}">{number}</text>')

    def _steps(self) -> None:
        """Mark where the first stage begins each step after the first."""
        first = next((found for row, found in sorted(self._by_row.items()) if row[1] < 0), [])
        begins: dict[int, float] = {}
        for span in first:
            begins.setdefault(span.step, span.start_s)
        for step, start_s in sorted(begins.items())[1:]:
            x, top = self._x(start_s), _HEAD_PX + _AXIS_PX - 4.0
            self._out.append(
                f'<path d="M{x:.1f} {top:g}V{self._bottom + 2:g}" stroke="#c0392b" stroke-dasharray="3 3"/>'
            )
            self._put_text(x + 3.0, self._bottom + 12.0, f"step {step}", "k q")

    def _legend(self) -> None:
        used = {span.kind for band in self._bands for span in self._by_row[band.row]}
        x, y = _PAD_PX + _LABEL_PX, self._bottom + 30.0
        for kind, (fill, _) in _FILLS.items():
            if kind in used:
                self._out.append(f'<rect x="{x:g}" y="{y - 9:g}" width="11" height="11" rx="2" fill="{fill}"/>')
                self._put_text(x + 16.0, y, kind.value, "q")
                x += 34.0 + 6.2 * len(kind.value)

    def _put_text(self, x: float, y: float, words: str, classes: str) -> None:
        named = f' class="{classes}"' if classes else ""
        self._out.append(f'<text{named} x="{x:.1f}" y="{y:.1f}">{_plain(words)}</text>')


def _together(spans: Sequence[Span], narrow_s: float) -> list[list[Span]]:
    """Group neighbours of one kind and step that are too narrow, and too close, to be told apart."""
    groups: list[list[Span]] = []
    last: dict[Kind, list[Span]] = {}
    for span in spans:
        group = last.get(span.kind)
        if (
            group is not None
            and span.step == group[0].step
            and span.end_s - span.start_s < narrow_s
            and group[-1].end_s - group[-1].start_s < narrow_s
            and span.start_s - group[-1].end_s < narrow_s
        ):
            group.append(span)
            continue
        last[span.kind] = [span]
        groups.append(last[span.kind])
    # control messages pass in the middle of bulk: draw them over it
    return sorted(groups, key=lambda group: group[0].kind in _CONTROL)


def _busy_s(spans: Sequence[Span]) -> float:
    """Return the time in which a row computed or sent; spans come by start and may overlap."""
    busy_s = end_s = 0.0
    for span in spans:
        if span.kind not in _STRIPS:
            busy_s += max(0.0, span.end_s - max(span.start_s, end_s))
            end_s = max(end_s, span.end_s)
    return busy_s


def _hint(spans: Sequence[Span]) -> str:
    what = span_label(spans[0])
    if len(spans) > 1:
        what += f" and {len(spans) - 1} more"
    end_s = max(span.end_s for span in spans)
    span_s = end_s - spans[0].start_s
    return f"{what}, step {spans[0].step}: {spans[0].start_s:.6g} s to {end_s:.6g} s ({span_s * 1000:.4g} ms)"


def nice_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power: float = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0, 20.0) if factor * power >= least * (1 - 1e-9))


def tick_label(time_s: float, tick_s: float) -> str:
    """Return the time in a unit that fits the distance of the ticks: "40 ms", "1.5 s"."""
    if tick_s < 1e-3:
        return f"{time_s * 1e6:.0f} µs"
    if tick_s < 0.1:
        return f"{time_s * 1e3:.0f} ms"
    return f"{time_s:.1f} s" if tick_s < 1 else f"{time_s:.0f} s"


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _plain(words: str) -> str:
    """Return text for the picture: escaped, and without characters that XML does not have."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in words))
