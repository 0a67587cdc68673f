"""Read a table of published runs; rows that cannot be predicted are listed with the reason."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import InputError, nearest
from ..core.files import read_csv
from .published_run import PublishedRun, RunRow, Unstated, parse_run

COLUMNS = (
    "source",
    "source_row",
    "year",
    "model_family",
    "params_b",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "global_batch",
    "micro_batch",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "intra_link",
    "inter_link",
    "tp",
    "pp",
    "vpp",
    "dp",
    "zero_fsdp",
    "cp",
    "sp",
    "ep",
    "recompute",
    "precision",
    "schedule",
    "iteration_time_s",
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "memory_gb_per_gpu",
    "memory_kind",
    "iter_s_derived",
    "note",
)
"""Required columns; others are ignored."""


@dataclass(frozen=True, slots=True)
class SkippedRun:
    """A row that cannot be predicted, and why."""

    line: int
    source: str
    name: str
    key: str
    """The column at fault."""
    reason: str


def read_runs(path: str | Path) -> tuple[list[PublishedRun], list[SkippedRun]]:
    """Runs of a file, and rows that lack something. Malformed values are an error."""
    reader = csv.DictReader(io.StringIO(read_csv(path)))
    names = [n.strip() for n in reader.fieldnames or ()]
    for column in COLUMNS:
        if column not in names:
            raise InputError(
                f"column {column!r} is missing",
                where=f"{path}: line 1",
                rule=f"a table of runs names its columns in its first line: {', '.join(COLUMNS)}",
                fix=nearest(column, [n for n in names if n not in COLUMNS]),
            )
    runs: list[PublishedRun] = []
    skipped: list[SkippedRun] = []
    for record in reader:
        line = reader.line_num
        if None in record or any(record[c] is None for c in COLUMNS):
            raise InputError(
                f"a row with {'more' if None in record else 'fewer'} values than columns",
                where=f"{path}: line {line}",
                rule=f"{len(names)} values",
            )
        try:
            runs.append(parse_run(RunRow(record, f"{path}: line {line}"), line))
        except Unstated as e:
            skipped.append(SkippedRun(line, record["source"], record["source_row"], *e.args))
    if not runs:
        raise InputError(
            "no row can be predicted: " + (skipped[0].reason if skipped else "the file has no rows"),
            where=f"{path}: line {skipped[0].line if skipped else 1}: {skipped[0].key if skipped else 'source'}",
            rule="a row needs its model, GPUs and layout, and a time or a memory",
        )
    return runs, skipped
