"""`drumline report`: one self-contained page about a run."""

from __future__ import annotations

from pathlib import Path

import typer

from ..core.errors import InputError


def report(
    folder: str = typer.Argument(None, metavar="RUN", help="A run folder (default: the newest below runs/)."),
    output: str = typer.Option(None, "--output", "-o", help="Where to write the page (default: RUN/report.html)."),
    trace: str = typer.Option(None, "--trace", help="Also write both timelines for Perfetto to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write the page about a run."""
    from ..reports import Run
    from ..reports.compare import verdict
    from ..reports.page import write_page
    from ..reports.text import console
    from .common import print_json
    from .train import summary

    place = Path(folder) if folder else _newest()
    run = Run.load(place)
    page = write_page(run, output or place)
    if trace:
        _write_trace(run, trace)
    if as_json:
        print_json({**summary(run, place), "page": str(page)})
        return
    out = console()
    out.print(verdict(run))
    out.print(f"report: {page}")
    if trace:
        out.print(f"trace: {trace} (open it in Perfetto or chrome://tracing)")


def _newest() -> Path:
    found = sorted((p.parent for p in Path("runs").glob("*/run.json")), key=lambda p: p.stat().st_mtime)
    if not found:
        raise InputError("there is no run below runs/", fix="drumline train JOB, or name a run folder")
    return found[-1]


def _write_trace(run: object, path: str) -> None:
    """Both timelines in one file: the measured ranks first, the predicted ones numbered from 1000."""
    import json

    from ..core import files
    from ..reports import Run

    assert isinstance(run, Run)
    events = []
    for timeline, offset in ((run.measured, 0), (run.predicted, 1000)):
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
