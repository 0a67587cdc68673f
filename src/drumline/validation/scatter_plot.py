"""Scatter plot of predicted over measured times as one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.units import format_seconds
from ..reports.markup import Html, tag

_SIZE, _LEFT, _TOP, _BOTTOM = 560, 64, 40, 48
_COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17a0b0", "#7f7f7f", "#a6761d", "#444")
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-weight:bold;font-size:14px}.g{stroke:#ddd}.i{stroke:#222}"
    ".b{stroke:#999;stroke-dasharray:4 4}circle{fill-opacity:.55}"
)
_SHOWN = len(_COLOURS) - 1
"""Sources with a colour of their own, by number of rows; the others share the last one."""


def scatter(points: Sequence[tuple[str, float, float]], title: str) -> str:
    """(source, measured, predicted) in seconds, both axes logarithmic; dashed lines at +-25%."""
    values = [v for _, a, b in points for v in (a, b)]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    high = high if high > low else 10 * low

    def x(v: float) -> float:
        return _LEFT + _SIZE * math.log(v / low) / math.log(high / low)

    def y(v: float) -> float:
        return _TOP + _SIZE - _SIZE * math.log(v / low) / math.log(high / low)

    colours, legend = _colours([s for s, _, _ in points])
    drawn: list[Html] = [tag("text", title, x=_LEFT, y=22, class_="t")]
    ticks = [low * 10**i for i in range(round(math.log10(high / low)) + 1)]
    for v in ticks:
        drawn.append(tag("line", x1=_n(x(v)), x2=_n(x(v)), y1=_TOP, y2=_TOP + _SIZE, class_="g"))
        drawn.append(tag("line", x1=_LEFT, x2=_LEFT + _SIZE, y1=_n(y(v)), y2=_n(y(v)), class_="g"))
        drawn.append(tag("text", _label(v), x=_n(x(v)), y=_TOP + _SIZE + 18, text_anchor="middle"))
        drawn.append(tag("text", _label(v), x=_LEFT - 8, y=_n(y(v) + 4), text_anchor="end"))
    for factor, kind in ((1.0, "i"), (1.25, "b"), (0.75, "b")):
        a, b = max(low, low / factor), min(high, high / factor)
        drawn.append(tag("line", x1=_n(x(a)), y1=_n(y(a * factor)), x2=_n(x(b)), y2=_n(y(b * factor)), class_=kind))
    for source, measured, predicted in points:
        tip = f"{source}\nmeasured {format_seconds(measured)}, predicted {format_seconds(predicted)}"
        drawn.append(
            tag("circle", tag("title", tip), cx=_n(x(measured)), cy=_n(y(predicted)), r=3.2, fill=colours[source])
        )
    drawn.append(tag("text", "measured step", x=_LEFT + _SIZE / 2, y=_TOP + _SIZE + 40, text_anchor="middle"))
    drawn.append(tag("text", "predicted", x=_LEFT - 8, y=_TOP - 6, text_anchor="end"))
    height = _TOP + _SIZE + _BOTTOM
    for i, (name, colour) in enumerate(legend):
        drawn.append(tag("circle", tag("title", name), cx=_LEFT + 6, cy=height + 10 + 18 * i, r=4, fill=colour))
        drawn.append(tag("text", _short(name), x=_LEFT + 16, y=height + 14 + 18 * i))
    height += 18 * len(legend) + 8
    width = _LEFT + _SIZE + 24
    picture = tag(
        "svg",
        tag("title", title),
        tag("style", _STYLE),
        tag("rect", width=width, height=height, fill="#fff"),
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
    )
    return str(picture) + "\n"


def _colours(sources: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Colour of every source, and the legend."""
    counts = {s: sources.count(s) for s in dict.fromkeys(sources)}
    often = sorted(counts, key=lambda s: -counts[s])[:_SHOWN]
    colours = {s: _COLOURS[often.index(s)] if s in often else _COLOURS[-1] for s in counts}
    legend = [(f"{s} ({counts[s]})", colours[s]) for s in often]
    rest = [s for s in counts if s not in often]
    if rest:
        legend.append((f"{len(rest)} more sources ({sum(counts[s] for s in rest)})", _COLOURS[-1]))
    return colours, legend


def _label(v: float) -> str:
    number, unit = format_seconds(v).split(" ") if v < 100 else (f"{v:g}", "s")
    return f"{float(number):g} {unit}"


def _short(text: str, length: int = 84) -> str:
    return text if len(text) <= length else text[: length - 1] + "\u2026"


def _n(v: float) -> str:
    return f"{v:.1f}"
