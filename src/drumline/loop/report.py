"""`dl.report`: one self-contained HTML page about a run or several side by side; timelines for Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CorruptFile, DrumlineError, InputError

if TYPE_CHECKING:
    from ..planner import Answer
    from ..reports import Run
    from ..reports.comparison import Comparison
    from ..reports.partial_run import PartialRun
    from .simulate import Simulation

    RunInput = Run | str | Path

RUNS = Path("runs")
"""Where run folders are, unless another place is named."""
_PREDICTED_PID = 1000
"""Process number of the first predicted rank in a trace; measured ranks are numbered from 0."""


def report(
    run: RunInput | Answer | Simulation | Sequence[RunInput] | None = None,
    *,
    output: str | Path | None = None,
    trace: str | Path | None = None,
    loss: float | None = None,
) -> Path:
    """Write the page about a run (a value or a folder; default: the newest under runs/) and return its path.

    A folder that is broken or half-written has a page too: it shows what is there, and names what is not.

    `output` is the page's file (default: report.html in the run folder). `trace` also writes both timelines there.
    Of several runs the page shows them side by side (default: comparison.html next to the first run), and compares the
    steps and seconds until `loss` (default: the lowest that all of them reached). Runs that cannot be read are named
    there.

    Of an answer of `dl.plan` or of a simulation the page is plan.html or simulation.html, here or at `output`.
    `dl.plan(..., page=FILE)` shows more: it also knows the model and the machines.
    """
    from ..planner import Answer
    from .simulate import Simulation

    if isinstance(run, Answer | Simulation):
        from .prediction_pages import write_prediction

        check_single(loss)
        return write_prediction(run, output=output, trace=trace)
    if isinstance(run, Sequence) and not isinstance(run, str):
        if len(run) > 1:
            return write_comparison(compare(run, loss=loss), output=output, trace=trace)
        run = run[0] if run else None
    check_single(loss)
    return write_run_page(open_run(run), output=output, trace=trace)


def check_single(loss: float | None) -> None:
    """Refuse options that only several runs have."""
    if loss is not None:
        raise InputError(
            f"--loss {loss:g} with one run", rule="it compares several runs", fix="drumline report RUN RUN"
        )


def compare(runs: Sequence[RunInput], *, loss: float | None = None) -> Comparison:
    """Compare several runs. Those that cannot be read are left out and named, unless none can be read."""
    from ..reports.comparison import UnreadableRun, compare_runs

    if loss is not None and not math.isfinite(loss):
        raise InputError(f"--loss {loss}", rule="a finite number")
    loaded: list[Run] = []
    unreadable: list[UnreadableRun] = []
    for run in _without_repeats(runs):
        try:
            loaded.append(load_run(run))
        except DrumlineError as e:
            unreadable.append(UnreadableRun(str(run), e.what + (f": {e.rule}" if e.rule else "")))
    if not loaded:
        raise CorruptFile(
            f"none of {len(unreadable)} runs can be shown",
            rule="; ".join(f"{x.folder}: {x.reason}" for x in unreadable),
        )
    return compare_runs(loaded, loss=loss, unreadable=unreadable)


def _without_repeats(runs: Sequence[RunInput]) -> list[RunInput]:
    """The runs in order; a folder that is named twice is one run."""
    kept: dict[object, RunInput] = {}
    for run in runs:
        kept.setdefault(Path(run).resolve() if isinstance(run, str | Path) else id(run), run)
    return list(kept.values())


def write_comparison(
    comparison: Comparison, *, output: str | Path | None = None, trace: str | Path | None = None
) -> Path:
    """Write the page of a comparison: to `output`, or next to the folder of the first run."""
    from ..reports.comparison_page import COMPARISON_PAGE
    from ..reports.comparison_page import write_comparison as write

    if trace:
        raise InputError(
            "--trace with several runs", rule="a trace is of one run", fix="drumline report RUN --trace FILE"
        )
    folder = next((c.run.folder.resolve().parent for c in comparison.runs if c.run.folder), Path())
    return write(comparison, output or folder / COMPARISON_PAGE)


def load_run(run: Run | str | Path | None = None) -> Run:
    """The run that was given, in a folder, or the newest under runs/."""
    from ..reports import Run

    return run if isinstance(run, Run) else Run.load(run if run else newest_run())


def open_run(run: Run | str | Path | None = None) -> Run | PartialRun:
    """The run; of a folder that is broken or half-written, what can be read of it."""
    from ..reports.partial_run import read_partial

    source = run or newest_run()
    try:
        return load_run(source)
    except DrumlineError:
        if not isinstance(source, str | Path):
            raise
        return read_partial(source)


def write_run_page(run: Run | PartialRun, *, output: str | Path | None = None, trace: str | Path | None = None) -> Path:
    """Write the page to `output` (default: report.html in the run folder), and the timelines to `trace`."""
    from ..reports.page import PAGE, write_page
    from ..reports.partial_page import write_partial_page
    from ..reports.partial_run import PartialRun

    if isinstance(run, PartialRun):
        page = write_partial_page(run, output or run.folder)
    else:
        page = write_page(run, output or run.folder or Path(PAGE))
    if trace:
        write_timelines(run, trace)
    return page


def newest_run() -> Path:
    """The run folder under runs/ that was written last; of runs that have not ended, only if there is no other."""
    complete, begun = list(RUNS.glob("*/run.json")), list(RUNS.glob("*/steps.jsonl"))
    folders = sorted((p.parent for p in complete or begun), key=lambda p: p.stat().st_mtime)
    if not folders:
        raise InputError("there is no run under runs/", fix="drumline train JOB, or name a run folder")
    return folders[-1]


def write_timelines(run: Run | PartialRun, path: str | Path) -> None:
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
