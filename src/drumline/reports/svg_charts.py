"""SVG charts of a run: stacked memory bars with the limit, and lines over the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from ..core.units import format_bytes
from .markup import Html, tag
from .prediction_error import MEMORY_PARTS
from .svg_timeline import nice_step

MOST_POINTS = 600
"""Points of a line; of more, the lowest and highest of each stretch are kept."""

STEPS_AXIS, SECONDS_AXIS = "step", "seconds"
LOSS_OUTLIER = 10.0
"""A loss this many times above the median is off the scale: the beginning of a training is not."""

_BAR = 34


def memory_bars(bars: Sequence[tuple[str, dict[str, float], float]], limit: float) -> Html:
    """Bars of (title, bytes by part, total) on one scale, with the limit if it is close enough to draw."""
    most = max(total for _, _, total in bars)
    near = limit <= 1.6 * most
    scale = 1.04 * (max(limit, most) if near else most)
    drawn: list[Html] = []
    y = 18 if near else 0
    for title, parts, total in bars:
        drawn.append(tag("text", title, x=0, y=y + 12, class_="strong"))
        drawn.append(tag("text", format_bytes(total), x=76, y=y + 12))
        y += 20
        at = 0.0
        for part, size in parts.items():
            drawn.append(_segment(part, at, size, y, scale))
            at += size
        y += _BAR + 16
    drawn.append(_byte_axis(scale, y - 8))
    if near:
        x = f"{100 * limit / scale:.2f}%"
        side = "end" if limit > 0.5 * scale else "start"
        drawn.append(tag("line", x1=x, x2=x, y1=16, y2=y - 8, class_="limit"))
        drawn.append(tag("text", f"limit {format_bytes(limit)}", x=x, y=11, text_anchor=side, class_="strong"))
    totals = ", ".join(f"{title} {format_bytes(total)}" for title, _, total in bars)
    return tag(
        "svg",
        tag("title", "Peak memory of the fullest rank by part"),
        tag("desc", f"{totals}; limit {format_bytes(limit)}."),
        *drawn,
        width="100%",
        height=y + 12,
        role="img",
    )


def _segment(part: str, at: float, size: float, y: int, scale: float) -> Html:
    box = {"x": f"{100 * at / scale:.3f}%", "y": y, "width": f"{100 * size / scale:.3f}%", "height": _BAR}
    kind = part if part in MEMORY_PARTS and part != "workspace" else "other"
    rect = tag("rect", tag("title", f"{part}\n{format_bytes(size)}"), class_=f"s room k-{kind}", **box)
    text = tag("text", part, x=6, y=_BAR / 2 + 4, class_=f"in k-{kind}")
    return tag("g", rect, tag("svg", text, **box) if size > 0.02 * scale else None)


def _byte_axis(scale: float, y: int) -> Html:
    unit = 2.0 ** (10 * max(0, min(4, int(math.log2(max(scale, 1)) // 10))))
    step = nice_step(scale / unit, 5) * unit
    drawn = [tag("line", x1=0, x2="100%", y1=y, y2=y, class_="rule")]
    for i in range(int(scale / step) + 1):
        x = f"{100 * i * step / scale:.2f}%"
        anchor = "start" if i == 0 else "end" if i * step > 0.95 * scale else "middle"
        drawn.append(tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="rule"))
        drawn.append(tag("text", "0" if i == 0 else plain_bytes(i * step), x=x, y=y + 16, text_anchor=anchor))
    return tag("g", *drawn)


def plain_bytes(n: float) -> str:
    """Bytes without trailing zeros, for axes: `4 MiB`."""
    number, unit = format_bytes(n).split(" ")
    return f"{float(number):g} {unit}"


ChartPoint = tuple[float, float, str]
"""x, y, tooltip."""


def line_chart(
    title: str,
    points: Sequence[ChartPoint],
    *,
    form: Callable[[float], str],
    levels: Sequence[tuple[float, str]] = (),
    zero: bool = False,
    height: int = 190,
    axis: str = STEPS_AXIS,
    outlier: float = 3.0,
) -> Html:
    """One line over the steps, or over seconds from 0. `levels` are (value, class) of horizontal lines; `zero` starts
    the scale at zero. Values above the median by the factor `outlier` (a first step that warms up) are drawn at the
    upper edge."""
    finite = [(x, y, tip) for x, y, tip in points if math.isfinite(y)]
    if not finite:
        return tag("p", f"{title}: no finite value.", class_="note")
    values = sorted(y for _, y, _ in finite)
    usual = values[len(values) // 2]
    top = max([values[-1] if values[-1] <= outlier * usual or usual <= 0 else 1.2 * usual, *(v for v, _ in levels)])
    low = 0.0 if zero else values[0]
    step = nice_step((top - low) or abs(top) or 1.0, 4)
    low, top = math.floor(low / step + 1e-9) * step, math.ceil(top / step - 1e-9) * step
    top = top if top > low else low + step
    first, last = points[0][0] if axis == STEPS_AXIS else 0.0, points[-1][0]
    width = (last - first) or 1.0

    def px(x: float) -> float:
        return 50.0 if first == last else 1 + 98 * (x - first) / width

    def py(y: float) -> float:
        return 6 + (height - 32) * (1 - min(1.0, (y - low) / (top - low)))

    ticks = [low + i * step for i in range(round((top - low) / step) + 1)]
    left = tag(
        "svg",
        *(tag("text", form(v), x=48, y=f"{py(v) + 4:.1f}", text_anchor="end") for v in ticks),
        width=56,
        height=height,
        aria_hidden="true",
    )
    shown = _thinned(points)
    drawn = [tag("line", x1=0, x2="100%", y1=f"{py(v):.1f}", y2=f"{py(v):.1f}", class_="grid") for v in ticks]
    drawn += [_lines([p for p in shown if not p[1] > top], px, py, height)]
    drawn += [
        tag("text", "▲", x=f"{px(x):.2f}%", y=14, text_anchor="middle", class_="dot") for x, y, _ in shown if y > top
    ][:50]
    drawn += [tag("line", x1=0, x2="100%", y1=f"{py(v):.1f}", y2=f"{py(v):.1f}", class_=kind) for v, kind in levels]
    drawn += x_axis(first, last, px, height, axis)
    drawn.append(tag("line", x1=0, x2=0, y1=6, y2=height - 26, class_="cursor"))
    tips = json.dumps([[round(px(x), 3), tip] for x, _, tip in shown])
    begin, end = (x_label(x, axis) for x in (finite[0][0], finite[-1][0]))
    description = f"From {form(finite[0][1])} at {begin} to {form(finite[-1][1])} at {end}."
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *drawn,
        width="100%",
        height=height,
        role="img",
        data_points=tips,
    )
    return tag("div", left, tag("div", plot), class_="pair")


def _lines(
    points: Sequence[ChartPoint], px: Callable[[float], float], py: Callable[[float], float], height: int
) -> Html:
    """The line, broken where a value is not finite. It is stretched to the width, its stroke is not."""
    pieces: list[list[str]] = [[]]
    alone: list[ChartPoint] = []
    for p in points:
        if math.isfinite(p[1]):
            pieces[-1].append(f"{px(p[0]):.3f},{py(p[1]):.2f}")
            alone.append(p)
        elif pieces[-1]:
            pieces.append([])
    dots = [tag("circle", cx=f"{px(x):.3f}%", cy=f"{py(y):.2f}", r=2.2, class_="dot") for x, y, _ in alone]
    lines = [
        tag(
            "polyline",
            points=" ".join(piece),
            vector_effect="non-scaling-stroke",
            class_="curve faint" if len(alone) <= 60 else "curve",
        )
        for piece in pieces
        if len(piece) > 1
    ]
    stretched = tag("svg", *lines, viewBox=f"0 0 100 {height}", preserveAspectRatio="none", width="100%", height=height)
    return tag("g", stretched, *(dots if len(alone) <= 60 else []))


def x_label(x: float, axis: str) -> str:
    """A place on the horizontal axis: `step 12` or `3.5 s`."""
    return f"step {x:g}" if axis == STEPS_AXIS else f"{x:.4g} s"


def x_axis(first: float, last: float, px: Callable[[float], float], height: int, axis: str) -> list[Html]:
    """The horizontal axis of a chart with about five marks."""
    y = height - 26
    marks = [first]
    if last > first:
        step = nice_step(last - first, 5)
        step = max(1.0, step) if axis == STEPS_AXIS else step
        begin = math.ceil(first / step) * step
        marks = sorted({first, *(begin + i * step for i in range(int((last - begin) / step) + 1))})
    if len(marks) > 1 and px(marks[1]) - px(marks[0]) < 6:
        del marks[1]
    drawn = [tag("line", x1=0, x2="100%", y1=y, y2=y, class_="rule")]
    for i, x in enumerate(marks):
        at, one = px(x), len(marks) == 1
        anchor = "middle" if one else "start" if at < 3 else "end" if at > 96 else "middle"
        text = x_label(x, axis) if i == 0 or axis != STEPS_AXIS else f"{x:g}"
        drawn.append(tag("text", text, x=f"{at:.2f}%", y=y + 16, text_anchor=anchor))
    return drawn


def _thinned(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """At most about MOST_POINTS, the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[ChartPoint] = []
    for i in range(0, len(points), stretch):
        piece = points[i : i + stretch]
        broken = [p for p in piece if not math.isfinite(p[1])]
        kept += sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1]), *broken[:1]})
    return kept
