"""Charts with a line for each of several runs, distinguished by colour and by dashes."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markup import Html, tag
from .svg_charts import LOSS_OUTLIER, STEPS_AXIS, x_axis, x_label
from .svg_timeline import nice_step

COLOURS = 8
_DASHES = ("", "8 3", "2 3", "10 3 2 3", "5 2", "14 4", "4 3 1 3", "1 2")
"""A line has the colour of its number, and dashes that differ from those of the last line with that colour."""
MOST_POINTS = 400
_TIPS = 120
_MOST_NAMED = 12
"""Runs in a tooltip."""

LINE_STYLE = """
:root { --run0: #0b62a4; --run1: #b94607; --run2: #00755a; --run3: #8d3d83; --run4: #7a5a00; --run5: #1d2126;
  --run6: #2a7fae; --run7: #7b4a2c; }
@media (prefers-color-scheme: dark) {
  :root { --run0: #6db3f2; --run1: #ff9a5c; --run2: #45c9a0; --run3: #e08fc8; --run4: #e5b454; --run5: #e6e7e4;
    --run6: #9adcf5; --run7: #cfa582; }
}
@media print {
  :root { --run0: #0b62a4; --run1: #b94607; --run2: #00755a; --run3: #8d3d83; --run4: #7a5a00; --run5: #000;
    --run6: #2a7fae; --run7: #7b4a2c; }
}
.line { fill: none; stroke: var(--k); stroke-width: 1.8px; stroke-linejoin: round; }
.r0 { --k: var(--run0); } .r1 { --k: var(--run1); } .r2 { --k: var(--run2); } .r3 { --k: var(--run3); }
.r4 { --k: var(--run4); } .r5 { --k: var(--run5); } .r6 { --k: var(--run6); } .r7 { --k: var(--run7); }
.stand { fill: var(--k); }
.legend.runs { display: grid; gap: .15rem; font-size: .88rem; color: var(--ink); }
.legend.runs code { color: var(--soft); overflow-wrap: anywhere; }
.swatch-line { margin-right: .5em; }
.aim { stroke: var(--soft); stroke-width: 1px; stroke-dasharray: 1 3; }
table.runs th:first-child { min-width: 9.5rem; }
.many { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2.5rem; }
.many h3 { overflow-wrap: anywhere; }
"""
"""The colours of up to eight runs, in blue, orange, green, purple and others that differ in lightness as well."""


@dataclass(frozen=True, slots=True)
class LineSeries:
    """The line of one run."""

    name: str
    points: Sequence[tuple[float, float]]
    """Ascending."""
    number: int
    """Number of the run, which determines its colour and dashes."""


def dashes(number: int) -> str | None:
    """The dashes of a run's line; none if it is solid."""
    return _DASHES[(number + number // COLOURS) % len(_DASHES)] or None


def key_line(number: int) -> Html:
    """A short piece of a run's line, for legends."""
    line = tag("line", x1=0, x2=34, y1=5, y2=5, stroke_dasharray=dashes(number), class_=f"line r{number % COLOURS}")
    return tag("svg", line, width=34, height=10, class_="inline swatch-line", aria_hidden="true")


def lines_chart(
    title: str,
    series: Sequence[LineSeries],
    *,
    axis: str,
    form: Callable[[float], str],
    zero: bool = False,
    level: float | None = None,
    height: int = 260,
) -> Html:
    """A line for each run over steps or seconds. `level` is drawn as a horizontal line, `zero` starts the scale at 0.
    Values far above the rest (a run that diverges) are drawn at the upper edge."""
    drawn = [LineSeries(s.name, [p for p in s.points if math.isfinite(p[1])], s.number) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return tag("p", f"{title}: no finite value.", class_="note")
    scale = _Scale.of(drawn, axis, height, zero=zero, level=level)
    lines = [
        tag(
            "polyline",
            points=" ".join(f"{scale.x(x):.3f},{scale.y(y):.2f}" for x, y in _thinned(s.points)),
            vector_effect="non-scaling-stroke",
            stroke_dasharray=dashes(s.number),
            class_=f"line r{s.number % COLOURS}",
        )
        for s in drawn
    ]
    stretched = tag("svg", *lines, viewBox=f"0 0 100 {height}", preserveAspectRatio="none", width="100%", height=height)
    ends = [_end(s, scale) for s in drawn]
    grid = [_across(scale.y(v), "grid") for v in scale.ticks]
    extra = [_across(scale.y(level), "aim")] if level is not None else []
    cursor = tag("line", x1=0, x2=0, y1=6, y2=height - 26, class_="cursor")
    marks = x_axis(scale.first, scale.last, scale.x, height, axis)
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", "; ".join(f"{s.name}: {form(s.points[0][1])} to {form(s.points[-1][1])}" for s in drawn[:20])),
        *grid,
        stretched,
        *extra,
        *ends,
        *marks,
        cursor,
        width="100%",
        height=height,
        role="img",
        data_points=json.dumps(_tips(drawn, scale, axis, form)),
    )
    left = tag(
        "svg",
        *(tag("text", form(v), x=48, y=f"{scale.y(v) + 4:.1f}", text_anchor="end") for v in scale.ticks),
        width=56,
        height=height,
        aria_hidden="true",
    )
    return tag("div", left, tag("div", plot), class_="pair")


def _across(y: float, kind: str) -> Html:
    return tag("line", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_=kind)


def _end(s: LineSeries, scale: _Scale) -> Html:
    """A dot where the line ends, so that a short run is seen among longer ones."""
    x, y = s.points[-1]
    return tag("circle", cx=f"{scale.x(x):.3f}%", cy=f"{scale.y(y):.2f}", r=2.6, class_=f"stand r{s.number % COLOURS}")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Places in a chart: percent of the width, and pixels from the top."""

    first: float
    last: float
    low: float
    top: float
    step: float
    height: int

    @classmethod
    def of(cls, series: Sequence[LineSeries], axis: str, height: int, *, zero: bool, level: float | None) -> _Scale:
        values = sorted(y for s in series for _, y in s.points)
        usual = values[len(values) // 2]
        high = values[-1] if usual <= 0 or values[-1] <= LOSS_OUTLIER * usual else 2 * usual
        low = 0.0 if zero else values[0]
        if level is not None:
            low, high = min(low, level), max(high, level)
        step = nice_step((high - low) or abs(high) or 1.0, 5)
        low, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        first = min(s.points[0][0] for s in series) if axis == STEPS_AXIS else 0.0
        return cls(first, max(s.points[-1][0] for s in series), low, top if top > low else low + step, step, height)

    def x(self, x: float) -> float:
        width = self.last - self.first
        return 1 + 98 * (x - self.first) / width if width > 0 else 50.0

    def y(self, y: float) -> float:
        return 6 + (self.height - 32) * (1 - max(0.0, min(1.0, (y - self.low) / (self.top - self.low))))

    @property
    def ticks(self) -> list[float]:
        return [self.low + i * self.step for i in range(round((self.top - self.low) / self.step) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MOST_POINTS, the lowest and the highest of each stretch."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), stretch):
        piece = points[i : i + stretch]
        kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def _tips(
    series: Sequence[LineSeries], scale: _Scale, axis: str, form: Callable[[float], str]
) -> list[tuple[float, str]]:
    """(place, the values of all runs there)."""
    tips = []
    places = [[x for x, _ in s.points] for s in series]
    for i in range(_TIPS + 1):
        x = scale.first + (scale.last - scale.first) * i / _TIPS
        x = round(x) if axis == STEPS_AXIS else x
        lines = [x_label(x, axis)]
        for s, xs in zip(series[:_MOST_NAMED], places, strict=False):
            at = bisect.bisect_right(xs, x) - 1
            if at >= 0 and x <= xs[-1] + (scale.last - scale.first) / _TIPS:
                lines.append(f"{s.name}: {form(s.points[at][1])}")
        tips.append((round(scale.x(x), 3), "\n".join(lines)))
    return tips
