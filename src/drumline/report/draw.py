"""Draws schedules as plain text that also reads on a narrow screen: who sends what to whom, which stage runs when."""

from __future__ import annotations

from ..schedule import Pipeline, Schedule, Send, messages
from ..simulate import replay_pipeline

WIDTH = 40
"""Columns that a drawing keeps to unless told otherwise."""


def draw_collective(schedule: Schedule, *, width: int = WIDTH) -> str:
    """One paragraph per round: `0->1 +2` is chunk 2 from rank 0 to rank 1, added (+) or kept (=)."""
    rounds = [list(map(_message, messages(sends).values())) for sends in schedule.rounds]
    cell = max((len(item) for items in rounds for item in items), default=0)
    label = len(f"{max(len(rounds) - 1, 0)}: ")
    lines = _wrap(f"{schedule.name}, p = {schedule.p}, {_chunks(schedule)}", width)
    lines += _wrap("a->b +c: b adds chunk c; =c: b keeps it", width)
    if not rounds:
        lines.append("one rank: nothing to send")
    for k, items in enumerate(rounds):
        lines += _columns(f"{k}:", items, cell, label, width)
    return "\n".join(lines)


def draw_pipeline(pipeline: Pipeline, *, width: int = WIDTH) -> str:
    """One lane per rank; a column is the time of one action when all take equally long, a dot is idle.

    What is wider than the screen goes on in the next block.
    """
    # Unit times put every start on a whole number, so a start is a column.
    timeline = replay_pipeline(pipeline, forward=1, backward=1, weight=1)
    columns = round(timeline.seconds)
    grid = [["."] * columns for _ in pipeline.lanes]
    for span in timeline.spans:
        grid[span.rank][round(span.start)] = span.name
    cell = max(len(name) for row in grid for name in row)
    word = "stage" if pipeline.stages == len(pipeline.lanes) else "rank"
    label = len(f"{word} {len(grid) - 1} ")
    fit = max(1, (width - label) // (cell + 1))
    lines = _wrap(f"{pipeline.name}, {pipeline.stages} stages, {pipeline.micros} micro-batches", width)
    for start in range(0, columns, fit):
        stop = min(start + fit, columns)
        if columns > fit:
            lines.append(f"time {start} to {stop}")
        for rank, row in enumerate(grid):
            cells = " ".join(f"{name:<{cell}}" for name in row[start:stop])
            lines.append(f"{f'{word} {rank}':<{label}}{cells}".rstrip())
    return "\n".join(lines)


def _message(parts: list[Send]) -> str:
    """`0->1 +2,3`: the sends of one message, those that are added and those that are kept apart."""
    added = ",".join(str(s.chunk) for s in parts if s.reduce)
    kept = ",".join(str(s.chunk) for s in parts if not s.reduce)
    marks = [mark + chunks for mark, chunks in (("+", added), ("=", kept)) if chunks]
    return f"{parts[0].src}->{parts[0].dst} {' '.join(marks)}"


def _chunks(schedule: Schedule) -> str:
    return "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"


def _columns(head: str, items: list[str], cell: int, label: int, width: int) -> list[str]:
    """Items in columns under each other, the head before the first line."""
    fit = max(1, (width - label + 2) // (cell + 2))
    rows = [items[i : i + fit] for i in range(0, len(items), fit)] or [[]]
    return [
        (f"{head if i == 0 else '':<{label}}" + "  ".join(f"{item:<{cell}}" for item in row)).rstrip()
        for i, row in enumerate(rows)
    ]


def _wrap(text: str, width: int) -> list[str]:
    """Break at spaces; a word longer than the line stays whole."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
