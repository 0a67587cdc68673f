"""`drumline doctor`: check this machine, suggest fixes, and test every operation on every backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..measurement.doctor import DoctorFinding, OperationTrial

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "refused": "dim", "not tried": "dim"}
_SHORT = {"ok": "ok", "refused": "no", "wrong": "WRONG", "hangs": "HANGS", "aborts": "ABORTS", "not tried": "-"}


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Skip the tests of the backends."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Check this machine, and test every operation on every backend (half a minute).

    Exit code 0, also with notes; 2 if Drumline cannot run at all.
    """
    import dataclasses
    import time

    from ..reports.console import console
    from .common import print_json

    start = time.monotonic()
    with _progress(quiet=as_json) as report:
        findings, trials = _collect(report, quick=quick)
    counts = {state: sum(f.state == state for f in findings) for state in ("problem", "note")}
    if as_json:
        print_json(
            {
                "findings": [dataclasses.asdict(f) for f in findings],
                "matrix": [dataclasses.asdict(t) for t in trials],
                "problems": counts["problem"],
                "notes": counts["note"],
                "seconds": time.monotonic() - start,
            }
        )
    else:
        out = console()
        fold = out.width if out.is_terminal else 0
        for part in (*_findings(findings, fold), *(_matrix(trials, out.width, fold) if trials else ())):
            out.print(part)
        out.print(_summary(counts, time.monotonic() - start))
    if counts["problem"]:
        raise typer.Exit(2)


def _collect(report: Callable[[str], None], *, quick: bool) -> tuple[list[DoctorFinding], list[OperationTrial]]:
    """Check the machine; unless `quick`, also test the backends."""
    from ..measurement.doctor import columns, examine, judge, try_column

    findings = examine(lambda topic: report(f"checking {topic}"))
    trials: list[OperationTrial] = []
    if not quick:
        for column in columns():
            report(f"testing {column}")

            def tried(trial: OperationTrial) -> None:
                if trial.state != "not tried":
                    report(f"testing {trial.backend} {trial.device}: {trial.operation} {trial.state}")

            trials += try_column(column, on_trial=tried, seconds=15.0)
        findings += judge(trials)
    return findings, trials


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; elsewhere one plain line per backend."""
    from ..reports.console import console

    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        with console(stderr=True).status("checking") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: None if ":" in text or text.startswith("checking") else print(text, file=sys.stderr)


def _folded(text: str, fold: int, indent: int) -> str:
    """A line wrapped to the terminal's width with a hanging indent; 0 leaves it alone."""
    import textwrap

    return textwrap.fill(text, fold, subsequent_indent=" " * indent) if fold else text


def _findings(findings: list[DoctorFinding], fold: int) -> Iterator[RenderableType]:
    """One line each, with its remedy below; grouped by topic."""
    from rich.text import Text

    topic = ""
    for f in findings:
        if f.topic != topic:
            topic = f.topic
            yield Text(topic, style="bold")
        line = Text(_folded(f"  {f.state:<7} {f.name}: {f.value}", fold, 10))
        line.stylize(_STYLES[f.state], 2, 2 + len(f.state))
        yield line
        if f.remedy:
            yield Text(_folded(f"          try: {f.remedy}", fold, 15))


def _matrix(trials: list[OperationTrial], width: int, fold: int) -> Iterator[RenderableType]:
    """Operations by backend and device; on a narrow terminal, a list of failures for each backend."""
    from rich.text import Text

    from ..reports.console import NARROW, borderless_table

    yield Text("operations, each tested", style="bold")
    heads = list(dict.fromkeys((t.backend, t.device) for t in trials))
    if width >= NARROW:
        table = borderless_table(gap=2)
        table.add_column("  operation", no_wrap=True)
        for head in heads:
            table.add_column(" ".join(head), no_wrap=True)
        for operation in dict.fromkeys(t.operation for t in trials):
            row = {(t.backend, t.device): t for t in trials if t.operation == operation}
            cells = [Text(_SHORT[row[h].state], style=_STYLES.get(row[h].state, "bold red")) for h in heads]
            table.add_row(f"  {operation}", *cells)
        yield table
    for head in heads:
        column = [t for t in trials if (t.backend, t.device) == head]
        if width < NARROW:
            yield Text(f"  {' '.join(head)}: {sum(t.state == 'ok' for t in column)} of {len(column)} work")
        reasons: dict[tuple[str, str], list[str]] = {}
        for t in column:
            if t.state != "ok":
                reasons.setdefault((t.state, t.why), []).append(t.operation)
        for (state, why), operations in reasons.items():
            which = "all" if len(operations) == len(column) else ", ".join(operations)
            yield Text(_folded(f"  {' '.join(head)}: {which}: {state}" + (f" ({why})" if why else ""), fold, 4))


def _summary(counts: dict[str, int], seconds: float) -> str:
    if counts["problem"]:
        return f"Drumline cannot run here: {counts['problem']} problems; {counts['note']} notes ({seconds:.0f} s)"
    return f"Drumline runs here; {counts['note']} notes ({seconds:.0f} s)"
