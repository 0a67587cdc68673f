"""One validation: a file read, its rows predicted, and how far that was off."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InputError
from ..costs.fitted.inputs import Array
from ..costs.fitted.profiles import Profiles, load_profiles
from .arrays import arrays
from .learn import learn, leave_one_out, profiles_of
from .predict import predict
from .row import Run
from .scores import Group, Score, by_source, groups, overall, relative
from .table import Skipped, read_runs

LEAST_GROUP, LEAST_SPREAD = 5, 0.10
"""Groups that say something about ranking: as many layouts, and as far apart."""


@dataclass(frozen=True, slots=True)
class Table:
    """Scores of time and of memory, of all rows and by source."""

    time: Score | None
    memory: Score | None
    times: dict[str, Score]
    memories: dict[str, Score]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a validation found."""

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]
    seconds: Array
    bytes: Array
    here: Table
    """With the profiles given: on the rows that they were fitted on, errors look smaller than they are."""
    groups: tuple[Group, ...]
    loso: Table | None
    """Each source predicted by profiles that were fitted without it."""
    loso_groups: tuple[Group, ...]
    profiles: Profiles
    taken: float
    """Seconds that all of it took."""

    def ranked(self, *, loso: bool = False) -> list[Group]:
        """The groups that say something about ranking."""
        found = self.loso_groups if loso else self.groups
        return [g for g in found if g.rows >= LEAST_GROUP and g.spread > LEAST_SPREAD]

    def points(self) -> list[tuple[str, float, float]]:
        """(source, measured, predicted) seconds of every row that has a time."""
        both = zip(self.runs, self.seconds, strict=True)
        return [(r.source, r.seconds, float(s)) for r, s in both if r.seconds is not None]

    def plain(self) -> dict[str, Any]:
        """The JSON form; fractions, not percent."""
        found: dict[str, Any] = {
            "rows": len(self.runs),
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            **_plain(self.here),
            "groups": _plain_groups(self.ranked(), self.groups),
            "seconds": self.taken,
        }
        if self.loso is not None:
            found["loso"] = {**_plain(self.loso), "groups": _plain_groups(self.ranked(loso=True), self.loso_groups)}
        return found


def validate(path: str | Path, *, loso: bool = False, profiles: Profiles | None = None) -> Outcome:
    """Predict every row of a file; with `loso`, also by profiles that have not seen the row's source."""
    begin = time.perf_counter()
    runs, skipped = read_runs(path)
    given = profiles or load_profiles()
    columns = arrays(runs)
    seconds, taken = predict(columns, given)
    out: Table | None = None
    out_groups: tuple[Group, ...] = ()
    if loso:
        without = leave_one_out(columns)
        out = _table(columns.sources, *without, columns.seconds, columns.memory)
        out_groups = tuple(groups(runs, without[0]))
    return Outcome(
        runs=tuple(runs),
        skipped=tuple(skipped),
        seconds=seconds,
        bytes=taken,
        here=_table(columns.sources, seconds, taken, columns.seconds, columns.memory),
        groups=tuple(groups(runs, seconds)),
        loso=out,
        loso_groups=out_groups,
        profiles=given,
        taken=time.perf_counter() - begin,
    )


def fit_profiles(path: str | Path) -> Profiles:
    """Profiles fitted on all rows of a file."""
    runs, _ = read_runs(path)
    columns = arrays(runs)
    count = int(np.isfinite(columns.seconds).sum())
    if not count:
        raise InputError("no row has a time to fit", where=str(path))
    sources = len(set(columns.sources))
    off = overall(relative(leave_one_out(columns)[0], columns.seconds))
    assert off is not None
    origin = f"{count} times of {sources} sources in {Path(path).name}"
    return profiles_of(columns, learn(columns), origin, off.p90)


def _table(sources: Sequence[str], seconds: Array, taken: Array, measured: Array, memory: Array) -> Table:
    time_errors, memory_errors = relative(seconds, measured), relative(taken, memory)
    return Table(
        overall(time_errors), overall(memory_errors), by_source(time_errors, sources), by_source(memory_errors, sources)
    )


def _plain(table: Table) -> dict[str, Any]:
    def one(score: Score | None) -> dict[str, float] | None:
        return dataclasses.asdict(score) if score else None

    names = dict.fromkeys([*table.times, *table.memories])
    return {
        "time": one(table.time),
        "memory": one(table.memory),
        "sources": {n: {"time": one(table.times.get(n)), "memory": one(table.memories.get(n))} for n in names},
    }


def _plain_groups(ranked: Sequence[Group], every: Sequence[Group]) -> dict[str, Any]:
    return {
        "count": len(ranked),
        "spearman": float(np.mean([g.spearman for g in ranked])) if ranked else None,
        "regret": float(np.mean([g.regret for g in ranked])) if ranked else None,
        "each": [dataclasses.asdict(g) for g in every],
    }
