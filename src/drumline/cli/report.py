"""`drumline report`: one self-contained page about a run, or about several side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..reports import Run


def report(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run folders (default: the newest under runs/); several are compared."),
    ] = None,
    output: str = typer.Option(
        None, "--output", "-o", help="The file to write (default: RUN/report.html, or comparison.html next to RUN)."
    ),
    trace: str = typer.Option(None, "--trace", help="Also write both timelines to this file, for Perfetto."),
    loss: float = typer.Option(
        None, "--loss", metavar="X", help="Compare steps and seconds until this loss (default: reached by all runs)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write the page about a run, or compare several."""
    if folders and len(folders) > 1:
        _compare(folders, output, trace, loss, as_json=as_json)
    else:
        _single(folders[0] if folders else None, output, trace, loss, as_json=as_json)


def _single(folder: str | None, output: str | None, trace: str | None, loss: float | None, *, as_json: bool) -> None:
    from ..loop.report import check_single, open_run, write_run_page
    from ..reports.partial_run import PartialRun
    from .common import print_json, warn
    from .train import run_json

    check_single(loss)
    opened = open_run(folder)
    page = write_run_page(opened, output=output, trace=trace)
    run, problems = (opened.run, opened.problems) if isinstance(opened, PartialRun) else (opened, ())
    if as_json:
        document = run_json(run) if run else {"run": str(folder), "steps": len(opened.steps)}
        print_json({**document, "page": str(page)} | ({"missing": list(problems)} if problems else {}))
        return
    for problem in problems:
        warn(problem)
    _print_run(run)
    print(f"report: {page}")
    if trace:
        print(f"trace: {trace} (open it in Perfetto or chrome://tracing)")


def _print_run(run: Run | None) -> None:
    from ..reports.console import console
    from ..reports.input_wait import input_sentence
    from ..reports.prediction_error import verdict

    out = console()
    if run is None:
        out.print("The run is incomplete: its page shows what is there.")
        return
    if run.failure:
        out.print(f"failed after {len(run.steps)} steps: {run.failure}")
    if run.faults:
        out.print(f"survived {len(run.faults)} faults")
    out.print(verdict(run))
    if sentence := input_sentence(run):
        out.print(sentence)
    if run.throughput:
        out.print(f"Throughput: {run.throughput}.")


def _compare(folders: list[str], output: str | None, trace: str | None, loss: float | None, *, as_json: bool) -> None:
    from ..loop.report import compare, write_comparison
    from ..reports.comparison_text import comparison_json, comparison_lines
    from ..reports.console import console
    from .common import print_json, warn
    from .train import run_json

    comparison = compare(folders, loss=loss)
    for run in comparison.unreadable:
        warn(f"{run.folder} is left out: {run.reason}")
    page = write_comparison(comparison, output=output, trace=trace)
    if as_json:
        document = comparison_json(comparison)
        pairs = zip(comparison.runs, document["runs"], strict=True)
        print_json({**document, "runs": [{**run_json(c.run), **own} for c, own in pairs], "page": str(page)})
        return
    out = console()
    out.print(comparison_lines(comparison, width=out.width))
    out.print(f"report: {page}")
