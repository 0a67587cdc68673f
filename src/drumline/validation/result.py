"""Validate the fitted cost model on a file of published runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..costs.fitted.constants_file import FittedConstants, load_constants
from ..costs.plan_columns import Array
from .errors import ErrorScore, LayoutGroup, by_source, layout_groups, overall, relative
from .fit_constants import fit_constants, leave_one_out, to_fitted_constants
from .fit_waits import fit_waits, leave_models_out
from .published_run import PublishedRun
from .read_runs import SkippedRun, read_runs
from .run_columns import predict, run_columns

MIN_LAYOUTS, MIN_SPREAD = 5, 0.10
"""Groups that count for ranking have at least this many layouts and this spread."""


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """Scores of time and memory, of all rows and by source."""

    time: ErrorScore | None
    memory: ErrorScore | None
    times: dict[str, ErrorScore]
    memories: dict[str, ErrorScore]


@dataclass(frozen=True, slots=True)
class RunsValidation:
    """Predictions of all runs and their errors."""

    runs: tuple[PublishedRun, ...]
    skipped: tuple[SkippedRun, ...]
    seconds: Array
    bytes: Array
    in_sample: ScoreTable
    """With the given constants: on the rows that they were fitted on, errors look smaller than they are."""
    groups: tuple[LayoutGroup, ...]
    loso: ScoreTable | None
    """Leave one source out: each source predicted by constants fitted without it."""
    loso_groups: tuple[LayoutGroup, ...]
    lomo: ScoreTable | None
    """Leave one model out: the waits of each model's hosts fitted on other models; all else by the given constants."""
    lomo_groups: tuple[LayoutGroup, ...]
    constants: FittedConstants
    duration: float
    """Seconds of the validation."""

    def ranked(self, left_out: str = "") -> list[LayoutGroup]:
        """Groups that count for ranking, predicted without their `source` or `model`, or by the given constants."""
        groups = {"": self.groups, "source": self.loso_groups, "model": self.lomo_groups}[left_out]
        return [g for g in groups if g.rows >= MIN_LAYOUTS and g.spread > MIN_SPREAD]

    def points(self) -> list[tuple[str, float, float]]:
        """(source, measured, predicted) seconds of every row that has a time."""
        both = zip(self.runs, self.seconds, strict=True)
        return [(r.source, r.seconds, float(s)) for r, s in both if r.seconds is not None]

    def to_json(self) -> dict[str, Any]:
        """The JSON form; fractions, not percent."""
        document: dict[str, Any] = {
            "rows": len(self.runs),
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            **_table_json(self.in_sample),
            "groups": _groups_json(self.ranked(), self.groups),
            "seconds": self.duration,
        }
        for key, table, left_out, groups in (
            ("loso", self.loso, "source", self.loso_groups),
            ("lomo", self.lomo, "model", self.lomo_groups),
        ):
            if table is not None:
                document[key] = {**_table_json(table), "groups": _groups_json(self.ranked(left_out), groups)}
        return document


def validate(
    path: str | Path,
    *,
    loso: bool = False,
    lomo: bool = False,
    constants: FittedConstants | None = None,
    converge: bool = False,
) -> RunsValidation:
    """Predict every row of a file; with `loso`, also with constants fitted without the source of the row.

    `converge` lets these fits go on until nothing moves. With `lomo`, the waits of hosts are fitted on the file,
    without the model of the row.
    """
    begin = time.perf_counter()
    runs, skipped = read_runs(path)
    given = constants or load_constants()
    columns = run_columns(runs)
    seconds, sizes = predict(columns, given)
    loso_table: ScoreTable | None = None
    loso_groups: tuple[LayoutGroup, ...] = ()
    lomo_table: ScoreTable | None = None
    lomo_groups: tuple[LayoutGroup, ...] = ()
    if lomo:
        others = leave_models_out(columns, given)
        lomo_table = _table(columns.sources, others, sizes, columns.seconds, columns.memory)
        lomo_groups = tuple(layout_groups(runs, others))
    if loso:
        left_out = leave_one_out(columns, converge=converge)
        loso_table = _table(columns.sources, *left_out, columns.seconds, columns.memory)
        loso_groups = tuple(layout_groups(runs, left_out[0]))
    return RunsValidation(
        runs=tuple(runs),
        skipped=tuple(skipped),
        seconds=seconds,
        bytes=sizes,
        in_sample=_table(columns.sources, seconds, sizes, columns.seconds, columns.memory),
        groups=tuple(layout_groups(runs, seconds)),
        loso=loso_table,
        loso_groups=loso_groups,
        lomo=lomo_table,
        lomo_groups=lomo_groups,
        constants=given,
        duration=time.perf_counter() - begin,
    )


def fit_file(path: str | Path) -> FittedConstants:
    """Fit constants on all rows of a file; waits stay those that ship."""
    runs, _ = read_runs(path)
    columns = run_columns(runs)
    count = int(np.isfinite(columns.seconds).sum())
    if not count:
        raise InputError("no row has a time to fit", where=str(path))
    sources = len(set(columns.sources))
    errors = overall(relative(leave_one_out(columns)[0], columns.seconds))
    assert errors is not None
    origin = f"{count} times of {sources} sources in {Path(path).name}"
    fitted = to_fitted_constants(columns, fit_constants(columns), origin, errors.p90)
    shipped = load_constants()
    return dataclasses.replace(fitted, waits=shipped.waits, waits_origin=shipped.waits_origin)


def fit_waits_on(path: str | Path) -> FittedConstants:
    """The constants that ship, with waits fitted on the rows of a file whose hosts wait."""
    columns, given = run_columns(read_runs(path)[0]), load_constants()
    count = int(((columns.layouts.host_waits > 0) & np.isfinite(columns.seconds)).sum())
    waits = fit_waits(columns, given)
    if waits is None:
        raise InputError("no row to fit waits on", where=str(path), rule="eager software that shards no parameters")
    return dataclasses.replace(given, waits=waits, waits_origin=f"{count} times in {Path(path).name}")


def _table(sources: Sequence[str], seconds: Array, sizes: Array, measured: Array, memory: Array) -> ScoreTable:
    time_errors, memory_errors = relative(seconds, measured), relative(sizes, memory)
    return ScoreTable(
        overall(time_errors), overall(memory_errors), by_source(time_errors, sources), by_source(memory_errors, sources)
    )


def _table_json(table: ScoreTable) -> dict[str, Any]:
    def one(score: ErrorScore | None) -> dict[str, float] | None:
        return dataclasses.asdict(score) if score else None

    names = dict.fromkeys([*table.times, *table.memories])
    return {
        "time": one(table.time),
        "memory": one(table.memory),
        "sources": {n: {"time": one(table.times.get(n)), "memory": one(table.memories.get(n))} for n in names},
    }


def _groups_json(ranked: Sequence[LayoutGroup], every: Sequence[LayoutGroup]) -> dict[str, Any]:
    return {
        "count": len(ranked),
        "spearman": float(np.mean([g.spearman for g in ranked])) if ranked else None,
        "regret": float(np.mean([g.regret for g in ranked])) if ranked else None,
        "each": [dataclasses.asdict(g) for g in every],
    }
