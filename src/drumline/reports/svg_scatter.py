"""Charts of points and lines on two axes, each linear or logarithmic: Pareto front, scaling, roofline, collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markup import Html, tag
from .svg_timeline import nice_step

_HEIGHT, _FOOT, _TOP, _LEFT = 270, 42, 22, 74
_TICKS = 5
"""Labels of an axis, about."""


@dataclass(frozen=True, slots=True)
class ScatterPoint:
    """A place in the chart."""

    x: float
    y: float
    tip: str = ""
    size: float = 4.0
    """Radius in pixels."""
    chosen: bool = False
    """Whether it has a ring around it."""


@dataclass(frozen=True, slots=True)
class ScatterSeries:
    """Points of one colour, drawn as dots, as a line, or both."""

    name: str
    """In the legend; empty if it is not there."""
    points: Sequence[ScatterPoint]
    kind: str
    """The class that gives its colour."""
    line: bool = False
    dots: bool = True
    dashed: bool = False

    @property
    def key(self) -> Html:
        """Its sign in the legend."""
        sign = "point" if self.dots and not self.line else "k-line dashed" if self.dashed else "k-line"
        return tag("li", tag("span", class_=f"key {sign} {self.kind}", aria_hidden="true"), self.name)


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """The scale of one axis."""

    title: str
    form: Callable[[float], str]
    """A value as text."""
    base: float = 0.0
    """Base of the logarithm; 0 for a linear axis from 0."""
    binary: bool = False
    """Whether a linear axis has labels at round numbers of KiB, MiB and so on."""

    def place(self, value: float) -> float:
        """The value as it is laid out: itself, or its logarithm."""
        return math.log(value, self.base) if self.base else value


@dataclass(frozen=True, slots=True)
class _Extent:
    """An axis with its ends and its labels."""

    axis: ChartAxis
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, axis: ChartAxis, values: Sequence[float]) -> _Extent:
        places = [axis.place(v) for v in values]
        low, high = min(places), max(places)
        if not axis.base:
            low, high = min(0.0, low), 1.04 * (high or 1.0)
            unit = 2.0 ** (10 * max(0, int(math.log2(max(high, 1.0)) // 10))) if axis.binary else 1.0
            step = nice_step((high - low) / unit, _TICKS) * unit
            return cls(axis, low, high, tuple(i * step for i in range(int(high / step) + 1)))
        pad = max(0.05 * (high - low), 0.02)
        return cls(axis, low - pad, high + pad, _log_ticks(axis.base, low - pad, high + pad))

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        return (self.axis.place(value) - self.low) / (self.high - self.low)


def _log_ticks(base: float, low: float, high: float) -> tuple[float, ...]:
    """Powers of the base between two powers; where these are few, also 2 and 5 times a power, or even steps."""
    powers = [base**k for k in range(math.ceil(low), math.floor(high) + 1)]
    if len(powers) >= (2 if base == 2 else 3):
        return tuple(powers[:: -(-len(powers) // (_TICKS + 1))])
    first, last = base**low, base**high
    round_numbers = [m * 10.0**k for k in range(math.floor(math.log10(first)), 30) for m in (1, 2, 5)]
    ticks = [v for v in round_numbers if first <= v <= last]
    if len(ticks) < 3:
        step = nice_step(last - first, 4)
        ticks = [step * k for k in range(math.ceil(first / step), math.floor(last / step) + 1)]
    return tuple(ticks)


def scatter_chart(
    title: str, series: Sequence[ScatterSeries], *, x: ChartAxis, y: ChartAxis, height: int = _HEIGHT
) -> Html:
    """The chart with its legend. Points that a logarithmic axis cannot show are left out."""
    drawn = [_shown(s, x, y) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return tag("p", f"{title}: nothing to draw.", class_="note")
    across = _Extent.of(x, [p.x for s in drawn for p in s.points])
    up = _Extent.of(y, [p.y for s in drawn for p in s.points])

    def px(value: float) -> float:
        return 100 * across.share(value)

    def py(value: float) -> float:
        return _TOP + (height - _FOOT - _TOP) * (1 - up.share(value))

    ends = "; ".join(f"{s.name}: {len(s.points)} points" for s in drawn if s.name)
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", f"{y.title} against {x.title}. {ends}."),
        *_grid(up, across, px, py, height),
        *(_line(s, px, py, height) for s in drawn if s.line),
        *(_dot(p, s.kind, px, py) for s in drawn if s.dots for p in s.points),
        width="100%",
        height=height,
        role="img",
    )
    left = tag(
        "svg",
        *(tag("text", y.form(v), x=_LEFT - 6, y=f"{py(v) + 4:.1f}", text_anchor="end") for v in up.ticks),
        tag("text", y.title, x=0, y=10),
        width=_LEFT,
        height=height,
        aria_hidden="true",
    )
    legend = tag("ul", *(s.key for s in drawn if s.name), class_="legend")
    return tag("figure", tag("div", left, tag("div", plot), class_="pair"), legend)


def _shown(s: ScatterSeries, x: ChartAxis, y: ChartAxis) -> ScatterSeries:
    kept = [
        p
        for p in s.points
        if math.isfinite(p.x) and math.isfinite(p.y) and (p.x > 0 or not x.base) and (p.y > 0 or not y.base)
    ]
    return ScatterSeries(s.name, kept, s.kind, s.line, s.dots, s.dashed)


def _grid(
    up: _Extent, across: _Extent, px: Callable[[float], float], py: Callable[[float], float], height: int
) -> list[Html]:
    bottom = height - _FOOT
    drawn = [tag("line", x1=0, x2="100%", y1=f"{py(v):.1f}", y2=f"{py(v):.1f}", class_="grid") for v in up.ticks]
    drawn.append(tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="rule"))
    for v in across.ticks:
        at = px(v)
        anchor = "start" if at < 8 else "end" if at > 92 else "middle"
        drawn.append(tag("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=bottom, y2=bottom + 4, class_="rule"))
        drawn.append(tag("text", across.axis.form(v), x=f"{at:.2f}%", y=bottom + 16, text_anchor=anchor))
    return [*drawn, tag("text", across.axis.title, x="100%", y=bottom + 32, text_anchor="end")]


def _line(s: ScatterSeries, px: Callable[[float], float], py: Callable[[float], float], height: int) -> Html:
    line = tag(
        "polyline",
        points=" ".join(f"{px(p.x):.3f},{py(p.y):.2f}" for p in s.points),
        vector_effect="non-scaling-stroke",
        class_=f"path {s.kind}{' dashed' if s.dashed else ''}",
    )
    return tag("svg", line, viewBox=f"0 0 100 {height}", preserveAspectRatio="none", width="100%", height=height)


def _dot(p: ScatterPoint, kind: str, px: Callable[[float], float], py: Callable[[float], float]) -> Html:
    return tag(
        "circle",
        tag("title", p.tip) if p.tip else None,
        cx=f"{px(p.x):.2f}%",
        cy=f"{py(p.y):.2f}",
        r=f"{p.size:.2g}",
        class_=f"s point {kind}{' chosen' if p.chosen else ''}",
    )
