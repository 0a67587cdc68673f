"""Options and output that several verbs share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.wrapping import for_reader

if TYPE_CHECKING:
    from ..costs import Estimate
    from ..loop.callbacks import Progress

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a number of the cluster: node.link.bandwidth=400GB/s (repeatable)."),
]
"""The option that changes numbers of the cluster."""

Slow = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="RANK:FACTOR", help="Ranks FACTOR times as slow: 3:4, 8-15:1.5 (repeatable)."),
]

Jitter = Annotated[
    float | None, typer.Option("--jitter", help="Standard deviation of step times over their mean, such as 0.1.")
]
"""The options for ranks that differ."""

SlowLinks = Annotated[
    list[str] | None,
    typer.Option(
        "--slow-link", metavar="LEVEL:SHARE", help="Links at a share of their bandwidth: network:0.5, node@3:0.5."
    ),
]

MTBF = "mean time between failures of one device (50000h), or of the whole run (12h/run)."
"""The help of --mtbf, the same in all verbs."""

NoCorrections = Annotated[
    bool, typer.Option("--no-corrections", help="Ignore corrections from earlier runs, and learn none from this one.")
]


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


def warn(text: str) -> None:
    """Print a sentence for the user to standard error."""
    print(for_reader(f"drumline: {text}", sys.stderr), file=sys.stderr)


def host_bytes(e: Estimate) -> dict[str, float]:
    """JSON keys of host memory, if anything is offloaded."""
    return {"host_bytes": e.host_bytes, "host_limit": e.host_limit} if e.host_bytes else {}


@contextmanager
def measuring(*, quiet: bool) -> Iterator[Progress]:
    """A progress bar on a terminal that appears once something is measured; nothing elsewhere."""
    from ..loop.callbacks import ignore_progress

    if quiet or not sys.stderr.isatty():
        yield ignore_progress
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from ..reports.console import console

    columns = (TextColumn("measuring {task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    bar = Bar(*columns, console=console(stderr=True), transient=True)
    task = bar.add_task("start of the ranks", total=None)

    def show(what: str, done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, description=what)

    try:
        yield show
    finally:
        bar.stop()
