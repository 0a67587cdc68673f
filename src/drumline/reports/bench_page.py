"""One self-contained HTML page about measured collectives: time over size, a line for each algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from ..core.units import format_bytes, format_rate, format_seconds
from .bench_results import BenchResult, groups
from .markup import Html, tag
from .page_style import STYLE, html_document

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


def _chart(sizes: dict[int, list[BenchResult]], collective: str) -> Html:
    rows = [r for results in sizes.values() for r in results]
    labels = sorted({r.label for r in rows}, key=lambda x: (x == "auto", x))
    times = [t for r in rows for t in (r.seconds, r.predicted_seconds) if t]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)
    first, last = math.log2(max(min(sizes), 1)), math.log2(max(max(sizes), 1))

    def px(size: int) -> float:
        return 50.0 if last == first else 2 + 96 * (math.log2(max(size, 1)) - first) / (last - first)

    def py(seconds: float) -> float:
        return 6 + (_HEIGHT - _FOOT - 12) * (1 - (math.log10(seconds) - low) / (high - low))

    drawn = [
        tag("line", x1=0, x2="100%", y1=f"{py(10.0**k):.1f}", y2=f"{py(10.0**k):.1f}", class_="grid")
        for k in range(low, high + 1)
    ]
    curves: list[Html] = []
    for label in labels:
        mine = [r for r in rows if r.label == label]
        kind = _kind(label, labels)
        curves.append(_polyline([(px(r.bytes), py(r.seconds)) for r in mine], f"line {kind}"))
        priced = [(px(r.bytes), py(r.predicted_seconds)) for r in mine if r.predicted_seconds]
        curves.append(_polyline(priced, f"line priced {kind}"))
        drawn += [
            tag(
                "circle",
                tag("title", _tip(r)),
                cx=f"{px(r.bytes):.2f}%",
                cy=f"{py(r.seconds):.1f}",
                r=3,
                class_=f"point {kind}",
            )
            for r in mine
        ]
    stretched = tag(
        "svg", *curves, viewBox=f"0 0 100 {_HEIGHT}", preserveAspectRatio="none", width="100%", height=_HEIGHT
    )
    axis = [
        tag(
            "text",
            format_bytes(size),
            x=f"{px(size):.2f}%",
            y=_HEIGHT - 8,
            text_anchor="start" if px(size) < 5 else "end" if px(size) > 95 else "middle",
        )
        for size in _marks(list(sizes))
    ]
    description = f"{collective}: from {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, {', '.join(labels)}."
    points = [[round(px(size), 3), "\n".join(_tip(r) for r in results[:6])] for size, results in sizes.items()]
    plot = tag(
        "svg",
        tag("title", f"Time of {collective} over size"),
        tag("desc", description),
        *drawn[: high - low + 1],
        stretched,
        *drawn[high - low + 1 :],
        *axis,
        tag("line", x1=0, x2=0, y1=6, y2=_HEIGHT - _FOOT, class_="cursor"),
        width="100%",
        height=_HEIGHT,
        role="img",
        data_points=json.dumps(points),
    )
    left = tag(
        "svg",
        *(
            tag("text", format_seconds(10.0**k), x=52, y=f"{py(10.0**k) + 4:.1f}", text_anchor="end")
            for k in range(low, high + 1)
        ),
        width=60,
        height=_HEIGHT,
        aria_hidden="true",
    )
    legend = tag(
        "ul",
        *(tag("li", tag("span", class_=f"key {_kind(label, labels)}"), label) for label in labels),
        class_="legend",
    )
    caption = "Solid: measured, median of the slowest rank. Dashed: predicted from the links."
    return tag("figure", tag("div", left, tag("div", plot), class_="pair"), legend, tag("figcaption", caption))


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
