"""What a person sees of `drumline train`: a progress bar on a terminal, plain lines otherwise, JSON lines if asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..costs import Estimate
    from ..plans import Plan
    from ..reports import Run, StepRecord
    from ..runtime.telemetry.sinks import Sink

FORMATS = ("text", "jsonl")
_BAR = 12
_LINES = 20
"""About how many lines a run prints where it is not told."""


class Screen:
    """The screen of one run."""

    def __init__(self, steps: int, *, quiet: bool, form: str = "text", every: int | None = None) -> None:
        from ..reports.text import console

        self._steps, self._quiet, self._json = steps, quiet, form == "jsonl"
        self._every = every or max(1, steps // _LINES)
        self._console = console(stderr=self._json)  # with JSON lines, standard output holds nothing else
        self._lines: Sink | None = None
        if self._json and not quiet:
            from ..runtime.telemetry.sinks import JsonStream

            self._lines = JsonStream(sys.stdout)
            self._every = every or 1
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Screen:
        from rich.progress import BarColumn, Progress, TextColumn

        if not self._quiet and not self._json and self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=_BAR), TextColumn("{task.description}"), console=self._console, transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, job: str, plan: Plan, predicted: Estimate) -> None:
        """What runs, and what is expected of it."""
        if not self._quiet:
            from ..reports.text import estimate_lines

            self._console.print(f"{job} with {plan}")
            self._console.print(estimate_lines(predicted))

    def say(self, text: str) -> None:
        """A sentence, if there is one."""
        if text and not self._quiet:
            self._console.print(text)

    def step(self, record: StepRecord, *, probed: bool) -> None:
        """One more step."""
        from ..runtime.telemetry.log import fit, fold, words

        number = record.step + 1
        shown = number == 1 or number % self._every == 0 or number >= self._steps
        if self._quiet:
            return
        if self._lines is not None:
            if shown or record.note:
                self._lines.write(record)
            return
        fields = words(record, self._steps)
        if self._bar is not None:
            room = self._console.width - _BAR - 2
            self._bar.update(self._task, completed=number, description=fit(fields, room))
        elif shown:
            self._console.print(fold([*fields, *(["(recorded)"] if probed else [])], self._width))
        if record.note:
            self._console.print(fold([f"step {number}:", *record.note.split("; ")], self._width))
        if self._bar is not None and number >= self._steps:
            self._console.print(fold(fields, self._width))

    @property
    def _width(self) -> int:
        """Lines on a terminal are folded to it; elsewhere a line stays a line."""
        return self._console.width if self._console.is_terminal else 10_000

    def end(self, run: Run, folder: Path, page: Path, phases: dict[str, float], *, taken: int) -> None:
        """The prediction against what was measured in the steps `taken` now, in parts, and where everything lies."""
        from ..core.units import format_bytes, format_seconds
        from ..reports.text import against

        if self._quiet:
            return
        e, out = run.estimate, self._console
        out.print(
            against("step time", format_seconds(e.step_seconds), format_seconds(run.step_seconds), run.time_error)
        )
        out.print(against("peak memory", format_bytes(e.memory_bytes), format_bytes(run.peak_bytes), run.memory_error))
        if run.division and run.division.bubble_line():
            out.print(run.division.bubble_line())
        if phases:
            out.print("time by part: " + ", ".join(f"{k} {format_seconds(v)}" for k, v in phases.items()))
        if run.memory_parts:
            parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in run.memory_parts.items() if v)
            out.print(f"memory by part: {parts}")
        if taken < 4:
            out.print("note: fewer than 4 steps, so the measured time holds warm-up and recording")
        if run.steps and run.steps[-1].skipped:
            out.print(f"skipped: {run.steps[-1].skipped} of {len(run.steps)} steps, which were not finite")
        for name, value in run.evaluation.items():
            out.print(f"evaluation: {name} {value:.4f}")
        out.print(f"run folder: {folder}")
        out.print(f"report: {page}")
