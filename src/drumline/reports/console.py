"""The console that commands print to: plain where it is not a terminal, and readable in 40 columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..core import wrapping

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType

NARROW = 70
"""Below this width tables drop their less important columns."""


WIDEST = 1000
"""Columns of a table outside a terminal, at most."""


class FoldingConsole(Console):
    """A console that folds text between words and after commas, never inside a `key=value` that fits into a line."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Fold texts to the width of their place, a column of a table or a line of the terminal."""
        place = options or self.options
        if isinstance(renderable, Text) and not place.no_wrap:
            renderable = _folded(renderable, place.max_width)
        return super().render(renderable, options)


def _folded(text: Text, width: int) -> Text:
    """The text with line breaks, the later lines of each indented two columns more than the first."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        cuts = wrapping.break_points(line.plain, width, indent=indent + 2 if indent else 0)
        first, *rest = line.divide(cuts)
        if rest:
            first.rstrip()
        lines.append(first)
        for part in rest:
            part.rstrip()
            lines.append(Text(" " * (indent + 2 if indent else 0)) + part)
    return Text("\n", style=text.style, justify=text.justify, end=text.end).join(lines) if len(lines) > 1 else text


def console(*, stderr: bool = False) -> Console:
    """A console. Outside a terminal lines are not wrapped, and tables are 120 columns wide."""
    stream = sys.stderr if stderr else sys.stdout
    plain = not stream.isatty()
    width = _columns() if plain else None
    return FoldingConsole(
        stderr=stderr, highlight=False, emoji=False, markup=False, soft_wrap=plain, width=width, no_color=plain or None
    )


def _columns() -> int:
    """The width that COLUMNS asks for, or 120."""
    text = os.environ.get("COLUMNS", "")
    columns = int(text) if text.isascii() and text.isdigit() else 0
    return min(columns, WIDEST) if columns > 0 else 120


def wrap(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Lines of at most that width, broken as on the console, the later ones indented."""
    return wrapping.wrap(text, width, indent=indent) if text.strip() else []


def borderless_table(*, gap: int = 1) -> Table:
    """An empty table without borders, with `gap` spaces between columns."""
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_edge=False)


def predicted_and_measured(what: str, predicted: str, measured: str, difference: str) -> str:
    """`step time: predicted 41.2 ms, measured 44.0 ms: 6.8% slower than predicted`."""
    return f"{what}: predicted {predicted}, measured {measured}{f': {difference}' if difference else ''}"
