"""`dl.report`: one self-contained HTML page about a run, and its timelines for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..reports import Run

RUNS = Path("runs")
"""Where run folders are, unless another place is named."""
_PREDICTED_PID = 1000
"""Process number of the first predicted rank in a trace; measured ranks are numbered from 0."""


def report(
    run: Run | str | Path | None = None, *, output: str | Path | None = None, trace: str | Path | None = None
) -> Path:
    """Write the page about a run (a value or a folder; default: the newest under runs/) and return its path.

    `output` is the page's file (default: report.html in the run folder). `trace` also writes both timelines there.
    """
    from ..reports.page import PAGE, write_page

    loaded = load_run(run)
    page = write_page(loaded, output or loaded.folder or Path(PAGE))
    if trace:
        write_timelines(loaded, trace)
    return page


def load_run(run: Run | str | Path | None = None) -> Run:
    """The run that was given, in a folder, or the newest under runs/."""
    from ..reports import Run

    if isinstance(run, Run):
        return run
    return Run.load(run if run else newest_run())


def newest_run() -> Path:
    """The run folder under runs/ that was written last."""
    folders = sorted((p.parent for p in RUNS.glob("*/run.json")), key=lambda p: p.stat().st_mtime)
    if not folders:
        raise InputError("there is no run under runs/", fix="drumline train JOB, or name a run folder")
    return folders[-1]


def write_timelines(run: Run, path: str | Path) -> None:
    """Write the measured and the predicted timeline to one Chrome trace."""
    from ..core import files

    events = []
    for timeline, offset in ((run.measured, 0), (run.predicted, _PREDICTED_PID)):
        if timeline is None:
            continue
        for event in json.loads(timeline.to_chrome())["traceEvents"]:
            event["pid"] += offset
            events.append(event)
        events += [
            {"ph": "M", "name": "process_name", "pid": r + offset, "args": {"name": f"{timeline.origin} rank {r}"}}
            for r in timeline.ranks
        ]
    files.write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
