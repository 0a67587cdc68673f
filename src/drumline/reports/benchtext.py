"""What `drumline bench` prints: the best of each size and how far auto was from it, also in 40 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..core.units import format_bytes, format_percent, format_rate, format_seconds
from .bench import Result, groups, verdicts
from .text import NARROW


def bench_tables(results: Sequence[Result], *, width: int, details: bool) -> Iterator[tuple[str, RenderableType]]:
    """A title and a table for each transport and collective. `details`: every algorithm, not only the best."""
    for (transport, collective), sizes in groups(results).items():
        yield f"{collective} over {transport}", _table(sizes, width=width, details=details)


def _table(sizes: dict[int, list[Result]], *, width: int, details: bool) -> RenderableType:
    narrow = width < NARROW
    judged = not details and any(r.algorithm == "auto" for rows in sizes.values() for r in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0), show_edge=False)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("algorithm" if details else "best", overflow="fold")
    heads = ["time", "predicted", "algbw", "busbw", "spread"][:: 1 if not narrow else 5]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    if judged:
        table.add_column("auto", overflow="fold")
    for size, rows in sizes.items():
        named = [r for r in rows if details or r.algorithm != "auto"] or rows
        for r in named if details else named[:1]:
            cells = [
                format_seconds(r.seconds),
                "" if r.predicted_seconds is None else format_seconds(r.predicted_seconds),
                format_rate(r.algorithmic),
                format_rate(r.bus),
                f"{100 * r.spread:.0f}%",
            ][:: 1 if not narrow else 5]
            end = [_auto(rows, narrow=narrow)] if judged else []
            name = f"auto: {r.chosen}" if r.chosen else r.label
            table.add_row(format_bytes(size), Text(name), *cells, *end)
    return table


def _auto(rows: Sequence[Result], *, narrow: bool) -> Text:
    found = verdicts(rows)
    if not found or found[0].auto is None or found[0].ratio is None:
        return Text("")
    off = format_percent(found[0].ratio - 1)
    return Text(off if narrow else f"{found[0].auto.chosen} {off}")
