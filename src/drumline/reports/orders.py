"""The pipeline orders side by side: time, bubble and memory of each on the same work."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from ..schedules import ORDERS, pipeline_order, prove_pipeline
from ..simulator import bubble, replay_in_thirds


@dataclass(frozen=True, slots=True)
class OrderRow:
    """One order over given ranks and micro-batches."""

    name: str
    virtual: int
    seconds: float
    """Where a rank's forward takes 1 and its backward 2 a micro-batch."""
    bubble: float
    held: float
    """The most activations at once, of one micro-batch in all stages of a rank; of the rank that holds most."""


def order_rows(ranks: int, micros: int) -> list[OrderRow]:
    """Every order of the table, with the numbers of stages a rank that it is made for, or 2 and 4."""
    rows = []
    for name, order in ORDERS.items():
        for virtual in order.virtual or (2, 4):
            pipeline = pipeline_order(name, ranks, micros, virtual)
            timeline = replay_in_thirds(pipeline)
            held = max(prove_pipeline(pipeline).held) / virtual
            rows.append(OrderRow(name, virtual, timeline.seconds, bubble(timeline), held))
    return rows


def orders_table(rows: list[OrderRow]) -> Table:
    """The rows as a table that reads in 40 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("order", no_wrap=True)
    for head in ("virtual", "time", "bubble", "held"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, str(row.virtual), f"{row.seconds:g}", f"{100 * row.bubble:.1f}%", f"{row.held:g}")
    return table
