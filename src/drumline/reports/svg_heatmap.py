"""A heat map: cells of two keys, coloured by a value relative to the least, hatched where something fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Html, swatch, tag

_STEPS = (1.05, 1.15, 1.35, 1.75, 2.5, 5.0)
"""Times the least value at which the next colour begins."""
LEVELS = len(_STEPS) + 1
_ROW, _HEAD, _LEFT = 27, 34, 70


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One cell."""

    column: str
    row: str
    value: float
    """Smaller is better: the least has the strongest colour."""
    text: str
    tip: str
    fails: bool = False
    """Hatched, without a colour."""
    best: bool = False
    """Has a frame."""


def heat_map(title: str, cells: Sequence[HeatCell], *, columns: str, rows: str) -> Html:
    """The cells; `columns` and `rows` are the names of the keys. Values keep the order in which they first occur."""
    xs, ys = list(dict.fromkeys(c.column for c in cells)), list(dict.fromkeys(c.row for c in cells))
    height = _HEAD + _ROW * len(ys)
    least = min((c.value for c in cells if not c.fails), default=0.0)
    wide = 100 / len(xs)
    names = [tag("text", rows, x=0, y=_HEAD - 8)]
    names += [
        tag("text", y, x=_LEFT - 8, y=_HEAD + _ROW * i + 18, text_anchor="end", class_="strong")
        for i, y in enumerate(ys)
    ]
    heads = [
        tag("text", x, x=f"{wide * (i + 0.5):.2f}%", y=_HEAD - 8, text_anchor="middle", class_="strong")
        for i, x in enumerate(xs)
    ]
    drawn: list[Html] = []
    frames: list[Html] = []
    for c in cells:
        x, y = wide * xs.index(c.column), _HEAD + _ROW * ys.index(c.row)
        drawn += _cell(c, x, y, wide, heat_level(c.value, least))
        if c.best:
            frames.append(tag("rect", **_box(x, y, wide), class_="best"))
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", "; ".join(f"{columns} {c.column}, {rows} {c.row}: {c.text}" for c in cells[:60])),
        tag("text", columns, x=0, y=11),
        *heads,
        *drawn,
        *frames,
        width="100%",
        height=height,
        role="img",
    )
    left = tag("svg", *names, width=_LEFT, height=height, aria_hidden="true")
    return tag("div", left, tag("div", plot), class_="pair")


def heat_legend(fast: str, slow: str, fails: str) -> Html:
    """The ends of the colours, and what hatching means, if there is any."""
    scale = (tag("span", class_=f"swatch h{i}", aria_hidden="true") for i in range(LEVELS))
    return tag(
        "ul",
        tag("li", fast, " ", *scale, " ", slow),
        tag("li", swatch("idle"), fails) if fails else None,
        class_="legend",
    )


def heat_level(value: float, least: float) -> int:
    """The colour of a value: 0 for the least and what is near it."""
    return sum(value > factor * least for factor in _STEPS)


def _box(x: float, y: float, wide: float) -> dict[str, str]:
    return {"x": f"{x + 0.2:.2f}%", "y": f"{y + 1:g}", "width": f"{wide - 0.4:.2f}%", "height": f"{_ROW - 2:g}"}


def _cell(c: HeatCell, x: float, y: float, wide: float, level: int) -> list[Html]:
    box, middle = _box(x, y, wide), f"{x + wide / 2:.2f}%"
    tip = tag("title", c.tip)
    if not c.fails:
        return [
            tag("rect", tip, **box, class_=f"s heat h{level}"),
            tag("text", c.text, x=middle, y=y + 18, text_anchor="middle", class_=f"heat-text h{level}"),
        ]
    return [
        tag("rect", **box, class_="lane"),
        tag("rect", tip, **box, class_="s hatch"),
        tag("text", c.text, x=middle, y=y + 18, text_anchor="middle", class_="heat-text unfit"),
    ]
