"""Several runs side by side on a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.units import format_count, format_seconds
from .comparison import ComparedRun, Comparison
from .console import NARROW, borderless_table
from .prediction_error import short_time_words


def comparison_lines(comparison: Comparison, *, width: int) -> RenderableType:
    """A short table of the runs, and how it was made; on a narrow terminal less important columns are left out."""
    wide = width >= NARROW
    table = borderless_table(gap=2 if wide else 1)
    table.add_column("run", overflow="fold")
    at = comparison.loss
    if at is not None:
        table.add_column("steps", justify="right", no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    if wide:
        for name in ("step", "predicted", "wait", "stale"):
            table.add_column(name, justify="right", no_wrap=True)
    for c in comparison.runs:
        label = Group(Text(c.name, style="bold"), Text(f"  {c.run.plan}", style="dim"))
        table.add_row(label, *(Text(cell) for cell in _cells(c, at=at is not None, wide=wide)))
    notes = [Text(_explanation(comparison)), *(Text(f"note: {note}") for note in _differences(comparison))]
    return Group(Text(comparison.verdict()), table, *notes)


def _differences(comparison: Comparison) -> list[str]:
    """The notes, without the folders that cannot be read, which are reported as warnings."""
    return comparison.notes[: len(comparison.notes) - len(comparison.unreadable)]


def _explanation(comparison: Comparison) -> str:
    if comparison.loss is None:
        return "No run has a finite loss."
    which = "as given" if comparison.given else "the lowest that all runs reached"
    return f"steps and seconds: until loss <= {comparison.loss:.4g}, {which}. {comparison.smoothing}"


def _cells(c: ComparedRun, *, at: bool, wide: bool) -> list[str]:
    cells: list[str] = []
    if at:
        seconds = c.reached.seconds if c.reached else None
        cells = [str(c.reached.steps) if c.reached else "never", "-" if seconds is None else f"{seconds:.4g}"]
    cells.append(format_count(c.samples_per_second) if c.samples_per_second else "-")
    if wide:
        error = f" ({short_time_words(c.run.time_error)})" if c.run.time_error is not None else ""
        cells += [
            format_seconds(c.run.step_seconds) if c.run.step_seconds else "-",
            format_seconds(c.run.estimate.step_seconds) + error,
            f"{100 * c.waits.mean_share:.0f}%" if c.waits else "-",
            f"{c.staleness.mean:.1f}" if c.staleness else "-",
        ]
    return cells


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The document of `drumline report RUN RUN --json`, without the runs' own fields."""
    return {
        "loss": comparison.loss,
        "smoothing": comparison.window,
        "verdict": comparison.verdict(),
        "notes": _differences(comparison),
        "unreadable": [dataclasses.asdict(x) for x in comparison.unreadable],
        "runs": [run_summary_json(c) for c in comparison.runs],
    }


def run_summary_json(c: ComparedRun) -> dict[str, Any]:
    """The compared numbers of one run."""
    waits, stale = c.waits, c.staleness
    last = c.losses[-1].loss if c.losses else math.nan
    return {
        "name": c.name,
        "ranks": c.run.ranks,
        "batch_size": c.run.batch_size,
        "last_loss": last if math.isfinite(last) else None,
        "lowest_loss": c.lowest,
        "steps_to_loss": c.reached.steps if c.reached else None,
        "seconds_to_loss": c.reached.seconds if c.reached else None,
        "samples_per_second": c.samples_per_second,
        "wait_seconds": list(waits.seconds) if waits else None,
        "wait_shares": list(waits.shares) if waits else None,
        "network_share": waits.network_share if waits else None,
        "staleness": {str(k): n for k, n in stale.counts.items()} if stale else None,
        "mean_staleness": stale.mean if stale else None,
        "max_staleness": stale.largest if stale else None,
        "dropped": stale.dropped if stale else 0,
    }
