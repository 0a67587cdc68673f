"""`drumline doctor`: what this machine has, what helps, and which operation works on which backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..measurement.doctor import Finding, Trial

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "refused": "dim", "not tried": "dim"}
_SHORT = {"ok": "ok", "refused": "no", "wrong": "WRONG", "hangs": "HANGS", "aborts": "ABORTS", "not tried": "-"}
NARROW = 70


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Look only; do not try the backends."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Say what this machine has and lacks, and try every operation of every backend (half a minute).

    Ends with 0, also with notes; with 2 if something keeps Drumline from running at all.
    """
    import dataclasses
    import time

    from ..reports.text import console
    from .common import print_json

    start = time.monotonic()
    with _progress(quiet=as_json) as say:
        findings, trials = _collect(say, quick=quick)
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


def _collect(say: Callable[[str], None], *, quick: bool) -> tuple[list[Finding], list[Trial]]:
    """Look at everything, and try everything unless it shall be quick."""
    from ..measurement.doctor import columns, examine, judge, try_column

    findings = examine(lambda topic: say(f"looking at {topic}"))
    trials: list[Trial] = []
    if not quick:
        for column in columns():
            say(f"trying {column}")

            def tried(trial: Trial) -> None:
                if trial.state != "not tried":
                    say(f"trying {trial.backend} {trial.device}: {trial.operation} {trial.state}")

            trials += try_column(column, on_trial=tried, seconds=15.0)
        findings += judge(trials)
    return findings, trials


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal; elsewhere one plain line per backend."""
    from ..reports.text import console

    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        with console(stderr=True).status("looking") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: None if ":" in text or text.startswith("looking") else print(text, file=sys.stderr)


def _folded(text: str, fold: int, indent: int) -> str:
    """A line in the width of the terminal, what follows below its beginning; 0 leaves it as it is."""
    import textwrap

    return textwrap.fill(text, fold, subsequent_indent=" " * indent) if fold else text


def _findings(findings: list[Finding], fold: int) -> Iterator[RenderableType]:
    """One line each, what helps below it; topics apart."""
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


def _matrix(trials: list[Trial], width: int, fold: int) -> Iterator[RenderableType]:
    """Operations by backend and device; on a narrow terminal, backend by backend what does not work."""
    from rich.table import Table
    from rich.text import Text

    yield Text("operations, each tried", style="bold")
    heads = list(dict.fromkeys((t.backend, t.device) for t in trials))
    if width >= NARROW:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
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
        return f"{counts['problem']} problems keep Drumline from running here; {counts['note']} notes ({seconds:.0f} s)"
    return f"Drumline runs here; {counts['note']} notes ({seconds:.0f} s)"
