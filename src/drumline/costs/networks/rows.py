"""Published collectives, read from a CSV: what each row measured, on which links, or why it cannot be predicted."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import InputError, nearest
from ...core.files import read_text
from .model import COLLECTIVES, Fabric, wire_share
from .words import across_link, inside_link, stated

NEEDED = (
    "source",
    "collective",
    "n_gpus",
    "gpus_per_node",
    "intra_link",
    "inter_link",
    "size_bytes",
    "time_us",
    "busbw_GBps",
)
"""Columns without which a file is not one of collectives; more may stand beside them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement."""

    line: int
    source: str
    collective: str
    ranks: int
    bytes: float
    seconds: float
    fabric: Fabric

    @property
    def level(self) -> str:
        """`inside` a node or `across` nodes."""
        return "inside" if self.ranks <= self.fabric.devices else "across"

    @property
    def wire(self) -> str:
        """The kind of link that decides it."""
        return self.fabric.inside_wire if self.level == "inside" else self.fabric.across_wire


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that says too little."""

    line: int
    source: str
    reason: str


def is_collectives(columns: list[str]) -> bool:
    """Whether these are the columns of published collectives, or are meant to be: one or the other may be missing."""
    return len({"collective", "size_bytes", "intra_link", "inter_link", "busbw_GBps"} & set(columns)) >= 3


def read_rows(path: str | Path) -> tuple[list[Row], list[Skipped]]:
    """All rows of the file: those that can be predicted, and the others with the reason.

    Refuses a file that lacks a column, and text where a number belongs, by file, line and column.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    columns = list(reader.fieldnames or ())
    for name in NEEDED:
        if name not in columns:
            raise InputError(
                f"column {name!r} is missing",
                where=f"{path}, line 1",
                rule=f"it has {', '.join(columns)}",
                fix=nearest(name, columns),
            )
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for record in reader:
        line = reader.line_num
        if None in record or None in record.values():
            raise InputError(
                "a row with another number of values than there are columns",
                where=f"{path}, line {line}",
                rule=f"{len(columns)} values",
            )
        try:
            rows.append(_row(record, line, str(path)))
        except ValueError as e:
            skipped.append(Skipped(line, record["source"], str(e)))
    return rows, skipped


def _row(record: dict[str, str], line: int, path: str) -> Row:
    """ValueError where the row says too little, InputError where it says nonsense."""

    def number(column: str) -> float | None:
        text = record[column].strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 <= value < float("inf"):
            raise InputError(
                f"{column}: {text[:60]!r} is not a number",
                where=f"{path}, line {line}: {column}",
                rule="a number, not negative, or nothing",
            )
        return value

    values = {column: number(column) for column in ("n_gpus", "gpus_per_node", "size_bytes", "time_us", "busbw_GBps")}
    collective = record["collective"].strip()
    if collective not in COLLECTIVES:
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(COLLECTIVES)}")
    for column in ("n_gpus", "gpus_per_node", "size_bytes"):
        if not values[column]:
            raise ValueError(f"{column} is not stated")
    p, devices, m = int(values["n_gpus"] or 0), int(values["gpus_per_node"] or 0), values["size_bytes"] or 0.0
    if p < 2:
        raise ValueError("n_gpus: one rank sends nothing")
    fabric = _fabric(record, p, devices)
    seconds = (values["time_us"] or 0.0) * 1e-6
    if not seconds:
        if not values["busbw_GBps"]:
            raise ValueError("neither time_us nor busbw_GBps is stated")
        seconds = m * wire_share(collective, p) / (values["busbw_GBps"] * 1e9)
    return Row(line, record["source"], collective, p, m, seconds, fabric)


def _fabric(record: dict[str, str], p: int, devices: int) -> Fabric:
    """The links that the ranks need; a link that they do not need may be unstated."""
    made = Fabric(devices)
    if devices > 1:
        if not stated(record["intra_link"]):
            raise ValueError("intra_link is not stated")
        inside = inside_link(record["intra_link"], devices)
        made = Fabric(devices, inside.bandwidth, inside.wire, inside.reduces)
    if p > devices:
        if not stated(record["inter_link"]):
            raise ValueError("inter_link is not stated")
        across = across_link(record["inter_link"])
        made = Fabric(devices, made.inside, made.inside_wire, made.reduces, across.bandwidth, across.wire, across.ports)
    return made
