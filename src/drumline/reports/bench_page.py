"""One self-contained HTML page about measured collectives: time over size, a line for each algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.units import format_bytes, format_rate, format_seconds
from .bench_results import BenchResult, groups
from .markup import Content, Html, join, table, tag
from .page_style import STYLE, data_table, html_document

_COLOURS = 10
_HEIGHT, _FOOT = 260, 26
_EXTRA_STYLE = """
.line { fill: none; stroke-width: 1.6px; stroke-linejoin: round; } .line.priced { stroke-dasharray: 5 4; opacity: .6; }
.a0 { --k: var(--backward); } .a1 { --k: var(--communication); } .a2 { --k: var(--optimizer); }
.a3 { --k: var(--activations); } .a4 { --k: var(--forward); } .a5 { --k: var(--data); } .a6 { --k: var(--recompute); }
.a7 { --k: var(--overhead); } .a8 { --k: var(--poor); } .a9 { --k: var(--fair); } .auto { --k: var(--ink); }
.line { stroke: var(--k); } circle.point { fill: var(--k); }
.legend .key { border-top-color: var(--k); }
"""


def page(results: Sequence[BenchResult], *, title: str, notes: Sequence[str] = ()) -> Html:
    """The page: time over size, a line for each algorithm, predictions dashed."""
    sections = [
        tag("section", tag("h2", f"{collective} over {transport}"), _chart(sizes, collective))
        for (transport, collective), sizes in groups(results).items()
    ]
    header = tag(
        "header",
        tag("h1", tag("b", "drumline bench")),
        tag("p", title, class_="verdict"),
        *(tag("p", note, class_="note") for note in notes),
    )
    return html_document(title, header, tag("main", *sections), style=STYLE + _EXTRA_STYLE)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Positions on a chart with logarithmic axes: percent of the width by size, pixels by seconds."""

    low: int
    high: int
    """Powers of ten of the seconds."""
    first: float
    last: float
    """Powers of two of the sizes."""

    @classmethod
    def of(cls, rows: Sequence[BenchResult]) -> _Scale:
        times = [t for r in rows for t in (r.seconds, r.predicted_seconds) if t]
        low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        first, last = (math.log2(max(size, 1)) for size in (min(r.bytes for r in rows), max(r.bytes for r in rows)))
        return cls(low, max(high, low + 1), first, last)

    def x(self, size: int) -> float:
        if self.last == self.first:
            return 50.0
        return 2 + 96 * (math.log2(max(size, 1)) - self.first) / (self.last - self.first)

    def y(self, seconds: float) -> float:
        return 6 + (_HEIGHT - _FOOT - 12) * (1 - (math.log10(seconds) - self.low) / (self.high - self.low))

    @property
    def ticks(self) -> list[float]:
        return [10.0**k for k in range(self.low, self.high + 1)]


def _chart(sizes: dict[int, list[BenchResult]], collective: str) -> Html:
    rows = [r for results in sizes.values() for r in results]
    labels = sorted({r.label for r in rows}, key=lambda x: (x == "auto", x))
    scale = _Scale.of(rows)
    description = f"{collective}: from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, {', '.join(labels)}."
    tips = [[round(scale.x(size), 3), "\n".join(_tip(r) for r in results[:6])] for size, results in sizes.items()]
    plot = tag(
        "svg",
        tag("title", f"Time of {collective} over size"),
        tag("desc", description),
        *_grid(scale),
        *_curves(rows, labels, scale),
        *_size_labels(list(sizes), scale),
        tag("line", x1=0, x2=0, y1=6, y2=_HEIGHT - _FOOT, class_="cursor"),
        width="100%",
        height=_HEIGHT,
        role="img",
        data_points=json.dumps(tips),
    )
    left = tag(
        "svg",
        *(tag("text", format_seconds(t), x=52, y=f"{scale.y(t) + 4:.1f}", text_anchor="end") for t in scale.ticks),
        width=60,
        height=_HEIGHT,
        aria_hidden="true",
    )
    keys = (tag("li", tag("span", class_=f"key {_kind(label, labels)}"), label) for label in labels)
    caption = "Solid: measured, median of the slowest rank. Dashed: predicted from the links."
    pair = tag("div", left, tag("div", plot), class_="pair")
    figure = tag("figure", pair, tag("ul", *keys, class_="legend"), tag("figcaption", caption))
    return join(figure, data_table(_table(sizes, collective)))


def _table(sizes: dict[int, list[BenchResult]], collective: str) -> Html:
    rows: list[list[Content]] = [
        [
            format_bytes(r.bytes),
            f"auto ({r.chosen})" if r.chosen else r.label,
            r.ranks,
            format_seconds(r.seconds),
            format_seconds(r.predicted_seconds) if r.predicted_seconds is not None else "-",
            format_rate(r.bus),
        ]
        for results in sizes.values()
        for r in results
    ]
    heads = (
        ("bytes", "num"),
        ("algorithm", "tight"),
        ("ranks", "num"),
        ("measured", "num"),
        ("predicted", "num"),
        ("bus", "num"),
    )
    return table(heads, rows, caption=f"{collective}: measured and predicted")


def _grid(scale: _Scale) -> list[Html]:
    heights = [f"{scale.y(t):.1f}" for t in scale.ticks]
    return [tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid") for y in heights]


def _curves(rows: Sequence[BenchResult], labels: Sequence[str], scale: _Scale) -> list[Html]:
    """Measured and predicted lines, stretched to the width, and a point for each measurement."""
    lines: list[Html] = []
    points: list[Html] = []
    for label in labels:
        own, kind = [r for r in rows if r.label == label], _kind(label, labels)
        measured = [(scale.x(r.bytes), scale.y(r.seconds)) for r in own]
        predicted = [(scale.x(r.bytes), scale.y(r.predicted_seconds)) for r in own if r.predicted_seconds]
        lines += [_polyline(measured, f"line {kind}"), _polyline(predicted, f"line priced {kind}")]
        points += [
            tag("circle", tag("title", _tip(r)), cx=f"{x:.2f}%", cy=f"{y:.1f}", r=3, class_=f"point {kind}")
            for r, (x, y) in zip(own, measured, strict=True)
        ]
    box = f"0 0 100 {_HEIGHT}"
    stretched = tag("svg", *lines, viewBox=box, preserveAspectRatio="none", width="100%", height=_HEIGHT)
    return [stretched, *points]


def _size_labels(sizes: list[int], scale: _Scale) -> list[Html]:
    texts = []
    for size in _marks(sizes):
        x = scale.x(size)
        anchor = "start" if x < 5 else "end" if x > 95 else "middle"
        texts.append(tag("text", format_bytes(size), x=f"{x:.2f}%", y=_HEIGHT - 8, text_anchor=anchor))
    return texts


def _kind(label: str, labels: Sequence[str]) -> str:
    return "auto" if label == "auto" else f"a{list(labels).index(label) % _COLOURS}"


def _polyline(points: list[tuple[float, float]], kind: str) -> Html:
    text = " ".join(f"{x:.2f},{y:.2f}" for x, y in sorted(points))
    return tag("polyline", points=text, vector_effect="non-scaling-stroke", class_=kind)


def _marks(sizes: list[int]) -> list[int]:
    """About five sizes, evenly chosen."""
    step = max(1, math.ceil(len(sizes) / 5))
    return sizes[::step]


def _tip(r: BenchResult) -> str:
    name = f"auto ({r.chosen})" if r.chosen else r.label
    predicted = f", predicted {format_seconds(r.predicted_seconds)}" if r.predicted_seconds is not None else ""
    return f"{format_bytes(r.bytes)} {name}: {format_seconds(r.seconds)}{predicted}, bus {format_rate(r.bus)}"
