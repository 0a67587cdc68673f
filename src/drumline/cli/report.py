"""`drumline report`: one self-contained page about a run."""

from __future__ import annotations

import typer


def report(
    folder: str = typer.Argument(None, metavar="RUN", help="A run folder (default: the newest under runs/)."),
    output: str = typer.Option(None, "--output", "-o", help="The file to write (default: RUN/report.html)."),
    trace: str = typer.Option(None, "--trace", help="Also write both timelines to this file, for Perfetto."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write the page about a run."""
    from ..loop.report import load_run
    from ..loop.report import report as write
    from ..reports.console import console
    from ..reports.prediction_error import verdict
    from .common import print_json
    from .train import run_json

    run = load_run(folder)
    page = write(run, output=output, trace=trace)
    if as_json:
        print_json({**run_json(run), "page": str(page)})
        return
    out = console()
    if run.failure:
        out.print(f"failed after {len(run.steps)} steps: {run.failure}")
    if run.faults:
        out.print(f"survived {len(run.faults)} faults")
    out.print(verdict(run))
    out.print(f"report: {page}")
    if trace:
        out.print(f"trace: {trace} (open it in Perfetto or chrome://tracing)")
