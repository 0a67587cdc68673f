"""Read published collectives from a CSV: what each row measured on which links, or why it cannot be predicted."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import InputError, nearest
from ...core.files import read_csv
from .link_text import is_stated, parse_network_link, parse_node_link
from .model import COLLECTIVES, Interconnect, ring_traffic

REQUIRED_COLUMNS = (
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
"""Columns that every file of collectives has; other columns are ignored."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One published measurement."""

    line: int
    source: str
    collective: str
    ranks: int
    bytes: float
    seconds: float
    interconnect: Interconnect

    @property
    def level(self) -> str:
        """`inside` a node or `across` nodes."""
        return "inside" if self.ranks <= self.interconnect.devices_per_node else "across"

    @property
    def link_type(self) -> str:
        """Type of the slowest link in use."""
        return self.interconnect.node_link_type if self.level == "inside" else self.interconnect.network_link_type


@dataclass(frozen=True, slots=True)
class SkippedCollective:
    """A row that lacks what its prediction needs."""

    line: int
    source: str
    reason: str


def is_collectives(columns: list[str]) -> bool:
    """Whether a header is one of published collectives, even if a column is missing or misspelt."""
    return len({"collective", "size_bytes", "intra_link", "inter_link", "busbw_GBps"} & set(columns)) >= 3


def read_collectives(path: str | Path) -> tuple[list[CollectiveRow], list[SkippedCollective]]:
    """Rows that can be predicted, and the others with the reason.

    Refuses a missing column, and text in place of a number, by file, line and column.
    """
    reader = csv.DictReader(io.StringIO(read_csv(path)))
    columns = list(reader.fieldnames or ())
    for name in REQUIRED_COLUMNS:
        if name not in columns:
            raise InputError(
                f"column {name!r} is missing",
                where=f"{path}, line 1",
                rule=f"it has {', '.join(columns)}",
                fix=nearest(name, columns),
            )
    rows: list[CollectiveRow] = []
    skipped: list[SkippedCollective] = []
    for record in reader:
        line = reader.line_num
        if None in record or None in record.values():
            raise InputError(
                "the row has another number of values than there are columns",
                where=f"{path}, line {line}",
                rule=f"{len(columns)} values",
            )
        try:
            rows.append(_parse_row(record, line, str(path)))
        except ValueError as e:
            skipped.append(SkippedCollective(line, record["source"], str(e)))
    return rows, skipped


def _parse_row(record: dict[str, str], line: int, path: str) -> CollectiveRow:
    """Raise ValueError where something is not stated, InputError where it is malformed."""

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
    interconnect = _interconnect(record, p, devices)
    seconds = (values["time_us"] or 0.0) * 1e-6
    if not seconds:
        if not values["busbw_GBps"]:
            raise ValueError("neither time_us nor busbw_GBps is stated")
        seconds = m * ring_traffic(collective, p) / (values["busbw_GBps"] * 1e9)
    return CollectiveRow(line, record["source"], collective, p, m, seconds, interconnect)


def _interconnect(record: dict[str, str], p: int, devices: int) -> Interconnect:
    """Links that the ranks use; others need not be stated."""
    node: tuple[float, str, bool] = (0.0, "", False)
    if devices > 1:
        if not is_stated(record["intra_link"]):
            raise ValueError("intra_link is not stated")
        inside = parse_node_link(record["intra_link"], devices)
        node = (inside.bandwidth, inside.link_type, inside.in_switch_reduction)
    if p <= devices:
        return Interconnect(devices, *node)
    if not is_stated(record["inter_link"]):
        raise ValueError("inter_link is not stated")
    across = parse_network_link(record["inter_link"])
    return Interconnect(devices, *node, across.bandwidth, across.link_type, across.ports)
