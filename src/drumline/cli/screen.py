"""The screen of `drumline train`: a progress bar on a terminal, plain lines elsewhere, JSON lines if asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..loop.train import TrainObserver
from .common import warn

if TYPE_CHECKING:
    from ..costs import Estimate
    from ..plans import Plan
    from ..reports import Run, StepRecord
    from ..runtime.telemetry.sinks import Sink

FORMATS = ("text", "jsonl")
_BAR = 12
"""Width of the progress bar."""
_LINES = 20
"""About how many lines a run prints by default."""


class Screen(TrainObserver):
    """Prints one run."""

    def __init__(self, *, quiet: bool, form: str = "text", every: int | None = None) -> None:
        from ..reports.console import console

        self._quiet, self._json, self._every = quiet, form == "jsonl", every
        self._console = console(stderr=self._json)  # with JSON lines, standard output holds nothing else
        self._lines: Sink | None = None
        if self._json and not quiet:
            from ..runtime.telemetry.sinks import JsonLinesStream

            self._lines = JsonLinesStream(sys.stdout)
        self._steps, self._stride = 0, 1
        self._bar: Any = None
        self._task: Any = None

    def start(self, job: str, plan: Plan, predicted: Estimate, steps: int) -> None:
        """Print what runs and its prediction; open the progress bar."""
        from ..reports.plan_text import estimate_lines

        if not self._quiet:
            self._console.print(f"{job} with {plan}")
            self._console.print(estimate_lines(predicted))
        self.open(steps)

    def open(self, steps: int) -> None:
        """Expect that many steps; on a terminal, show the progress bar."""
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        self._stride = self._every or (1 if self._json else max(1, steps // _LINES))
        if not self._quiet and not self._json and self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=_BAR), TextColumn("{task.description}"), console=self._console, transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=steps)

    def close(self) -> None:
        """Remove the progress bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Print a sentence, if there is one."""
        if text and not self._quiet:
            self._console.print(text)

    def warn(self, text: str) -> None:
        """Print a sentence to standard error."""
        warn(text)

    def step(self, record: StepRecord, *, profiled: bool) -> None:
        """Print or draw one more step."""
        from ..runtime.telemetry.log import fit_fields, step_fields, wrap_fields

        number = record.step + 1
        shown = number == 1 or number % self._stride == 0 or number >= self._steps
        if self._quiet:
            return
        if self._lines is not None:
            if shown or record.note:
                self._lines.write(record)
            return
        fields = step_fields(record, self._steps)
        if self._bar is not None:
            room = self._console.width - _BAR - 2
            self._bar.update(self._task, completed=number, description=fit_fields(fields, room))
        elif shown:
            self._console.print(wrap_fields([*fields, *(["(recorded)"] if profiled else [])], self._width))
        if record.note:
            self._console.print(wrap_fields([f"step {number}:", *record.note.split("; ")], self._width))
        if self._bar is not None and number >= self._steps:
            self._console.print(wrap_fields(fields, self._width))

    @property
    def _width(self) -> int:
        """Lines are folded to the width of a terminal, and left alone elsewhere."""
        return self._console.width if self._console.is_terminal else 10_000

    def end(self, run: Run, page: Path, phases: dict[str, float], *, taken: int) -> None:
        """Print predicted and measured numbers, their parts, and where the files are."""
        from ..core.units import format_bytes, format_seconds
        from ..reports.console import predicted_and_measured
        from ..reports.input_wait import input_sentence
        from ..reports.prediction_error import memory_in_words, time_in_words

        if self._quiet:
            return
        e, out = run.estimate, self._console
        time = (format_seconds(e.step_seconds), format_seconds(run.step_seconds))
        out.print(predicted_and_measured("step time", *time, _words(time_in_words, run.time_error)))
        if throughput := run.throughput:
            out.print(f"throughput: {throughput}")
        memory = (format_bytes(e.memory_bytes), format_bytes(run.peak_bytes))
        out.print(predicted_and_measured("peak memory", *memory, _words(memory_in_words, run.memory_error)))
        if run.division and run.division.bubble_line():
            out.print(run.division.bubble_line())
        if phases:
            out.print("time by part: " + ", ".join(f"{k} {format_seconds(v)}" for k, v in phases.items()))
        if sentence := input_sentence(run):
            out.print(sentence)
        if run.memory_parts:
            parts = ", ".join(f"{k} {format_bytes(v)}" for k, v in run.memory_parts.items() if v)
            out.print(f"memory by part: {parts}")
        if taken < 4:
            out.print("note: fewer than 4 steps, so the measured time includes warm-up and recording")
        if run.steps and run.steps[-1].skipped:
            out.print(f"skipped: {run.steps[-1].skipped} of {len(run.steps)} steps were not finite")
        if run.gradients:
            words = {"repeated": "updates repeated after a server failed", "lost": "lost with a failed worker"}
            counts = [f"{n} {words.get(key, key)}" for key, n in run.gradients.items() if n or key == "applied"]
            out.print(f"gradients: {', '.join(counts)}")
        for name, value in run.evaluation.items():
            out.print(f"evaluation: {name} {value:.4f}")
        out.print(f"run folder: {run.folder}")
        out.print(f"report: {page}")


def _words(words: Callable[[float], str], error: float | None) -> str:
    return words(error) if error is not None else ""
