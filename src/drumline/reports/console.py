"""The console that commands print to: plain where it is not a terminal, and readable in 40 columns."""

from __future__ import annotations

import os
import sys
import textwrap

from rich.console import Console
from rich.table import Table

from ..core.units import format_percent

NARROW = 70
"""Below this width tables drop their less important columns."""


WIDEST = 1000
"""Columns of a table outside a terminal, at most."""


def console(*, stderr: bool = False) -> Console:
    """A console. Outside a terminal lines are not wrapped, and tables are 120 columns wide."""
    stream = sys.stderr if stderr else sys.stdout
    plain = not stream.isatty()
    width = _columns() if plain else None
    return Console(
        stderr=stderr, highlight=False, emoji=False, markup=False, soft_wrap=plain, width=width, no_color=plain or None
    )


def _columns() -> int:
    """The width that COLUMNS asks for, or 120."""
    text = os.environ.get("COLUMNS", "")
    columns = int(text) if text.isascii() and text.isdigit() else 0
    return min(columns, WIDEST) if columns > 0 else 120


def wrap(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Lines of at most that width, broken at spaces, the later ones indented; a longer word stays whole."""
    later = " " * indent
    return textwrap.wrap(text, max(1, width), subsequent_indent=later, break_long_words=False, break_on_hyphens=False)


def borderless_table(*, gap: int = 1) -> Table:
    """An empty table without borders, with `gap` spaces between columns."""
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_edge=False)


def predicted_and_measured(what: str, predicted: str, measured: str, error: float | None) -> str:
    """`step time: predicted 41.2 ms, measured 44.0 ms (-6.4%)`."""
    off = f" ({format_percent(error)})" if error is not None else ""
    return f"{what}: predicted {predicted}, measured {measured}{off}"
