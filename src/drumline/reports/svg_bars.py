"""Horizontal bars with names on the left and values behind them: waiting by rank, gradients by staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Html, tag

_ROW, _THICK, _LEFT = 24, 15, 78
FULL = 62
"""Percent of the width that the longest bar takes; the rest is for its value."""


@dataclass(frozen=True, slots=True)
class BarRow:
    """One bar."""

    name: str
    value: float
    text: str
    """The value, as it is printed behind the bar."""
    mark: float | None = None
    """A second value, drawn as a line across the bar."""


def bar_rows(
    title: str, rows: Sequence[BarRow], *, kind: str, most: float | None = None, left: int = _LEFT, full: int = FULL
) -> Html:
    """Bars on one scale, which ends at `most` (default: the largest value). `kind` is the colour: a part of a step.
    `left` are the pixels for names, `full` the percent of the rest that the longest bar takes."""
    values = [x for row in rows for x in (row.value, row.mark or 0.0)]
    scale = full / (max(values, default=0.0) if most is None else most or 1.0) if any(values) else 0.0
    height = _ROW * len(rows)
    names = tag(
        "svg",
        *(tag("text", row.name, x=left - 8, y=_ROW * i + 15, text_anchor="end") for i, row in enumerate(rows)),
        width=left,
        height=height,
        aria_hidden="true",
    )
    plot = tag(
        "svg",
        tag("title", title),
        tag("desc", "; ".join(f"{row.name}: {row.text}" for row in rows[:40])),
        *(part for i, row in enumerate(rows) for part in _bar(row, _ROW * i, scale, kind)),
        tag("line", x1=0, x2=0, y1=0, y2=height, class_="rule"),
        width="100%",
        height=height,
        role="img",
    )
    return tag("div", names, tag("div", plot), class_="pair")


def _bar(row: BarRow, y: int, scale: float, kind: str) -> list[Html]:
    width = scale * row.value
    end = max(width, scale * (row.mark or 0.0))
    drawn = [
        tag(
            "rect",
            tag("title", f"{row.name}\n{row.text}"),
            x=0,
            y=y + 4,
            width=f"{width:.2f}%",
            height=_THICK,
            class_=f"s k-{kind}",
        ),
        tag("text", row.text, x=f"{end:.2f}%", dx=7, y=y + 15),
    ]
    if row.mark is not None:
        x = f"{scale * row.mark:.2f}%"
        drawn.append(tag("line", x1=x, x2=x, y1=y + 1, y2=y + _ROW - 3, class_="guess solid"))
    return drawn
