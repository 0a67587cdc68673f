"""The strip of a run over its seconds: where steps ran, where time was lost between them, faults and skipped steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.units import format_seconds
from .markup import Content, Html, cut, join, swatch, table, tag
from .page_style import data_table
from .step_records import StepRecord
from .svg_timeline import nice_step

LONG_GAP = 5.0
"""A pause between two steps is drawn from this many median steps on, and from LEAST_GAP seconds."""
LEAST_GAP = 0.25
MOST_EVENTS = 60
"""Pauses and marks that are drawn and listed: the longest pauses, the first marks."""
_HEIGHT = 62


@dataclass(frozen=True, slots=True)
class Pause:
    """A gap between two steps: a restart, a save, or a machine that was busy."""

    after: int
    """The step before it."""
    start: float
    seconds: float


def pauses(steps: Sequence[StepRecord]) -> list[Pause]:
    """Long gaps between the end of a step and the beginning of the next, in order; none where no times are recorded."""
    timed = [(s, s.elapsed) for s in steps if s.elapsed is not None]
    if len(timed) < 2:
        return []
    least = max(LEAST_GAP, LONG_GAP * statistics.median(s.seconds for s, _ in timed))
    pauses = []
    for (before, end), (after, later) in itertools.pairwise(timed):
        gap = later - after.seconds - end
        if gap >= least:
            pauses.append(Pause(before.step, end, gap))
    return pauses


def fault_section(faults: Sequence[str], failure: str, steps: Sequence[StepRecord]) -> Html | None:
    """Faults of the run, drawn over its seconds; None where there were none."""
    marks = [s for s in steps if s.note]
    if not (faults or failure or marks):
        return None
    gaps = pauses(steps)
    lost = sum(p.seconds for p in gaps)
    last = next((s.elapsed for s in reversed(steps) if s.elapsed is not None), None)
    sentences = [f"{len(faults)} fault{'s' if len(faults) != 1 else ''} survived."] if faults else []
    sentences += [f"The run failed: {failure[:300]}"] if failure else []
    if gaps and last:
        sentences.append(f"{format_seconds(lost)} of {format_seconds(last)} passed in pauses between steps.")
    if marks:
        sentences.append(f"{len(marks)} {'steps have notes' if len(marks) > 1 else 'step has a note'}.")
    return join(
        tag("p", " ".join(sentences), class_="lead"),
        _strip(gaps, marks, last, failed=bool(failure)) if last else None,
        tag("h3", "Faults") if faults else None,
        tag("ol", *(tag("li", cut(f, 300)) for f in faults[:MOST_EVENTS])) if faults else None,
        data_table(_table(gaps, marks)) if gaps or marks else None,
    )


def _strip(gaps: Sequence[Pause], marks: Sequence[StepRecord], last: float, *, failed: bool) -> Html:
    """One lane over the seconds of the run."""
    scale = last * 1.01 or 1.0

    def at(seconds: float) -> str:
        return f"{100 * seconds / scale:.3f}%"

    drawn = [tag("rect", x=0, y=16, width=at(last), height=22, class_="s k-backward")]
    for p in sorted(gaps, key=lambda p: -p.seconds)[:MOST_EVENTS]:
        box = {"x": at(p.start), "y": 16, "width": at(p.seconds), "height": 22}
        tip = f"{format_seconds(p.seconds)} without a step\nafter step {p.after}, {format_seconds(p.start)}"
        drawn += [tag("rect", **box, class_="lane"), tag("rect", tag("title", tip), **box, class_="s hatch")]
    for s in [s for s in marks if s.elapsed is not None][:MOST_EVENTS]:
        x = at(s.elapsed or 0.0)
        drawn.append(tag("line", x1=x, x2=x, y1=12, y2=42, class_="fault"))
        text = tag("title", f"step {s.step}\n{s.note[:200]}")
        drawn.append(tag("text", text, "▼", x=x, y=11, text_anchor="middle", class_="s fault-mark"))
    if failed:
        drawn.append(tag("text", "✗", x=at(last), y=32, text_anchor="end", class_="fault-mark"))
    step = nice_step(scale, 5)
    for i in range(int(scale / step) + 1):
        anchor = "start" if i == 0 else "end" if i * step > 0.93 * scale else "middle"
        drawn.append(tag("text", format_seconds(i * step) if i else "0", x=at(i * step), y=56, text_anchor=anchor))
    picture = tag(
        "svg",
        tag("title", "The run over its seconds"),
        tag("desc", f"{len(gaps)} pauses and {len(marks)} marked steps in {format_seconds(last)}."),
        *drawn,
        width="100%",
        height=_HEIGHT,
        role="img",
    )
    legend = tag(
        "ul",
        tag("li", swatch("backward"), "steps"),
        tag("li", swatch("idle"), "no step: a restart, a save, or a busy machine") if gaps else None,
        tag("li", "▼ a step with a note") if marks else None,
        tag("li", "✗ the end of a run that failed") if failed else None,
        class_="legend",
    )
    return tag("figure", picture, legend)


def _table(gaps: Sequence[Pause], marks: Sequence[StepRecord]) -> Html:
    events: list[tuple[int, list[Content]]] = [
        (p.after, [p.after, format_seconds(p.start), f"{format_seconds(p.seconds)} without a step"])
        for p in sorted(gaps, key=lambda p: -p.seconds)[:MOST_EVENTS]
    ]
    for s in marks[:MOST_EVENTS]:
        events.append((s.step, [s.step, format_seconds(s.elapsed) if s.elapsed is not None else "-", cut(s.note, 160)]))
    heads = (("step", "num"), ("after", "num"), ("", "wide"))
    rows = [row for _, row in sorted(events, key=lambda e: e[0])]
    return table(heads, rows, caption="Pauses between steps, and steps with notes")
