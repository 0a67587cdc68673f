"""Schedules as text that fits a narrow screen: the messages of a collective, pipeline lanes, all orders compared."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from ..costs.pipeline_clock import bubble as pipeline_bubble
from ..costs.pipeline_clock import pipeline_seconds
from ..schedules import ORDERS, Pipeline, Schedule, Send, messages, pipeline_order, prove_pipeline
from ..simulator import bubble, replay_in_thirds, replay_pipeline
from .console import borderless_table

WIDTH = 40
"""Default width of a drawing, in columns."""


def draw_collective(schedule: Schedule, *, width: int = WIDTH) -> str:
    """One paragraph per round: `0->1 +2` is chunk 2 from rank 0 to rank 1, added (+) or stored (=).

    Three or more consecutive chunks are written as `4-7`. Lines wider than the screen are continued.
    """
    write = signal_text if schedule.collective == "barrier" else message_text
    rounds = [list(map(write, messages(sends).values())) for sends in schedule.rounds]
    label = len(f"{max(len(rounds) - 1, 0)}: ")
    cell = max((len(item) for items in rounds for item in items), default=0)
    lines = _wrap(f"{schedule.name}, p = {schedule.p}, {_chunks(schedule)}", width)
    for legend in legend_lines(schedule):
        lines += _wrap(legend, width)
    if not rounds:
        lines.append("one rank: nothing to send")
    for k, items in enumerate(rounds):
        lines += _columns(f"{k}:", items, min(cell, max(1, width - label)), label, width)
    return "\n".join(lines)


def draw_pipeline(pipeline: Pipeline, *, width: int = WIDTH) -> str:
    """One lane per rank. A column is one action, all taking equally long; a dot is idle.

    Lanes wider than the screen are continued in the next block.
    """
    # Unit times put every start on a whole number: a column.
    timeline = replay_pipeline(pipeline, forward=1, backward=1, weight=1, update=1)
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


def message_text(parts: list[Send]) -> str:
    """`0->1 +2,3`: the sends of one message, added chunks before stored ones."""
    added = number_runs([s.chunk for s in parts if s.reduce])
    kept = number_runs([s.chunk for s in parts if not s.reduce])
    marks = [mark + chunks for mark, chunks in (("+", added), ("=", kept)) if chunks]
    return f"{parts[0].src}->{parts[0].dst} {' '.join(marks)}"


def signal_text(parts: list[Send]) -> str:
    """`0->1`: a message of a barrier, which carries no data."""
    return f"{parts[0].src}->{parts[0].dst}"


def number_runs(chunks: list[int]) -> str:
    """`0,1,4-7`, in the given order."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def legend_lines(schedule: Schedule) -> list[str]:
    """How to read the messages of a drawing."""
    if schedule.collective == "barrier":
        return ["a->b: a signals b"]
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
    """Items in aligned columns, the head before the first line; an item wider than a line takes several."""
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
    """An item in lines of that width, broken after commas and indented."""
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


# ---- pipeline orders compared


@dataclass(frozen=True, slots=True)
class PipelineOrderRow:
    """One pipeline order over given ranks and micro-batches."""

    name: str
    virtual: int
    seconds: float
    """Where a micro-batch takes a rank 1 for its forward and 2 for its backward."""
    bubble: float
    activations: float
    """Most micro-batches whose activations one rank stores at once."""


def order_rows(ranks: int, micros: int) -> list[PipelineOrderRow]:
    """Every known order, with the number of stages per rank it is made for, or 2 and 4."""
    rows = []
    for name, order in ORDERS.items():
        for virtual in order.virtual or (2, 4):
            pipeline = pipeline_order(name, ranks, micros, virtual)
            seconds, share = _full(pipeline) if pipeline.has_updates else _replayed(pipeline)
            rows.append(PipelineOrderRow(name, virtual, seconds, share, most_activations(pipeline, virtual)))
    return rows


def _replayed(pipeline: Pipeline) -> tuple[float, float]:
    """Time and bubble of a step."""
    timeline = replay_in_thirds(pipeline)
    return timeline.seconds, bubble(timeline)


def _full(pipeline: Pipeline) -> tuple[float, float]:
    """The same for as many micro-batches in a pipeline that does not drain, once it is full."""
    times = (pipeline.name, len(pipeline.lanes), pipeline.micros, 1, 1.0, 1.0, 1.0)
    return pipeline_seconds(*times), pipeline_bubble(*times)


def most_activations(pipeline: Pipeline, virtual: int) -> float:
    """Most micro-batches whose activations one rank stores at once; 1 is one micro-batch in all its stages."""
    return max(prove_pipeline(pipeline).activations) / virtual


def orders_table(rows: list[PipelineOrderRow]) -> Table:
    """The rows as a table that reads in 40 columns."""
    table = borderless_table()
    table.add_column("order", no_wrap=True)
    for head in ("virtual", "time", "bubble", "stored"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name, str(row.virtual), f"{row.seconds:g}", f"{100 * row.bubble:.1f}%", f"{row.activations:g}"
        )
    return table
