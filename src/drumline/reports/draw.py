"""Draws schedules as plain text that also reads on a narrow screen: who sends what to whom, which stage runs when."""

from __future__ import annotations

from ..schedules import Pipeline, Schedule, Send, messages
from ..simulator import replay_pipeline

WIDTH = 40
"""Columns that a drawing keeps to unless told otherwise."""


def draw_collective(schedule: Schedule, *, width: int = WIDTH) -> str:
    """One paragraph per round: `0->1 +2` is chunk 2 from rank 0 to rank 1, added (+) or kept (=).

    Three and more chunks in a row are written as `4-7`. What is wider than the screen goes on in the next line.
    """
    write = _signal if schedule.collective == "barrier" else _message
    rounds = [list(map(write, messages(sends).values())) for sends in schedule.rounds]
    label = len(f"{max(len(rounds) - 1, 0)}: ")
    cell = max((len(item) for items in rounds for item in items), default=0)
    lines = _wrap(f"{schedule.name}, p = {schedule.p}, {_chunks(schedule)}", width)
    for legend in _legend(schedule):
        lines += _wrap(legend, width)
    if not rounds:
        lines.append("one rank: nothing to send")
    for k, items in enumerate(rounds):
        lines += _columns(f"{k}:", items, min(cell, max(1, width - label)), label, width)
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
    added = _runs([s.chunk for s in parts if s.reduce])
    kept = _runs([s.chunk for s in parts if not s.reduce])
    marks = [mark + chunks for mark, chunks in (("+", added), ("=", kept)) if chunks]
    return f"{parts[0].src}->{parts[0].dst} {' '.join(marks)}"


def _signal(parts: list[Send]) -> str:
    """`0->1`: a message of a barrier, which carries nothing."""
    return f"{parts[0].src}->{parts[0].dst}"


def _runs(chunks: list[int]) -> str:
    """`0,1,4-7`: in the order in which they stand."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _legend(schedule: Schedule) -> list[str]:
    if schedule.collective == "barrier":
        return ["a->b: b hears what a has heard"]
    lines = ["a->b +c: b adds chunk c; =c: b keeps it"]
    if schedule.contract.chunk_names == "pairs":
        blocks = schedule.p * schedule.p
        part = "c" if schedule.chunks == blocks else f"(c div {schedule.chunks // blocks})"
        lines.append(f"chunk c: rank {part} div {schedule.p} to rank {part} mod {schedule.p}")
    return lines


def _chunks(schedule: Schedule) -> str:
    if schedule.collective == "barrier":
        return "no data"
    return "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"


def _columns(head: str, items: list[str], cell: int, label: int, width: int) -> list[str]:
    """Items in columns under each other, the head before the first line; an item wider than a line takes several."""
    fit = max(1, (width - label + 2) // (cell + 2))
    cells = [_broken(item, cell) for item in items]
    if any(len(lines) > 1 for lines in cells):
        rows = [[line] for lines in cells for line in lines]
    else:
        rows = [items[i : i + fit] for i in range(0, len(items), fit)] or [[]]
    return [
        (f"{head if i == 0 else '':<{label}}" + "  ".join(f"{item:<{cell}}" for item in row)).rstrip()
        for i, row in enumerate(rows)
    ]


def _broken(item: str, width: int) -> list[str]:
    """An item in lines of that width, broken behind commas and set in."""
    lines = [""]
    for word in item.replace(",", ",\0").split("\0"):
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append("  ")
        lines[-1] += word
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """Break at spaces; a word longer than the line stays whole."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
