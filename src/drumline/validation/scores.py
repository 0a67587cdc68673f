"""How far predictions are off: errors by source, and how well layouts of one job are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.fitted.inputs import Array
from .row import Run


@dataclass(frozen=True, slots=True)
class Score:
    """Relative errors (predicted - measured) / measured of some rows: fractions."""

    rows: int
    mean: float
    median: float
    p90: float
    worst: float
    """Of the sizes of the errors."""
    bias: float
    """The mean of the errors with their signs."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layouts of one job on one cluster: how they are ranked, and what the first pick loses."""

    source: str
    name: str
    rows: int
    spread: float
    """The slowest over the fastest, less one."""
    spearman: float
    regret: float
    """Measured time of the layout that was predicted fastest over the fastest, less one."""


def score(errors: Array) -> Score | None:
    """The errors in six numbers; None of nothing."""
    if not len(errors):
        return None
    size = np.abs(errors)
    return Score(
        len(errors),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(errors.mean()),
    )


def relative(predicted: Array, measured: Array) -> Array:
    """Errors of the rows that were measured; not a number elsewhere."""
    return predicted / measured - 1.0


def by_source(errors: Array, sources: Sequence[str]) -> dict[str, Score]:
    """Scores of every source that has rows, in the order in which they first appear."""
    found: dict[str, list[float]] = {}
    for source, error in zip(sources, errors, strict=True):
        if np.isfinite(error):
            found.setdefault(source, []).append(float(error))
    return {source: s for source, values in found.items() if (s := score(np.array(values))) is not None}


def overall(errors: Array) -> Score | None:
    """The score of all rows that were measured."""
    return score(errors[np.isfinite(errors)])


def groups(runs: Sequence[Run], predicted: Array, *, least: int = 2) -> list[Group]:
    """Groups in which only the layout differs: source, model, cluster and its state, precision, batch are the same."""
    members: dict[tuple[object, ...], list[int]] = {}
    for i, r in enumerate(runs):
        if r.seconds is not None:
            members.setdefault(_job(r), []).append(i)
    found = []
    for rows in members.values():
        if len(rows) < least:
            continue
        measured = np.array([runs[i].seconds for i in rows], dtype=np.float64)
        guess = predicted[np.array(rows)]
        first = runs[rows[0]]
        chosen = measured[int(guess.argmin())]
        name = f"{first.layers} x {first.hidden}, {first.ranks} ranks, batch {first.batch}"
        found.append(
            Group(
                first.source,
                name,
                len(rows),
                float(measured.max() / measured.min() - 1),
                spearman(guess, measured),
                float(chosen / measured.min() - 1),
            )
        )
    return found


def _job(r: Run) -> tuple[object, ...]:
    return (
        r.source,
        r.layers,
        r.hidden,
        r.heads,
        r.kv_heads,
        r.inner,
        r.vocabulary,
        r.sequence,
        r.batch,
        r.ranks,
        r.sheet.type,
        r.node,
        r.state,
        r.software.precision,
        r.software.gradient,
        r.software.fusion,
        r.software.overlap_tp,
    )


def spearman(a: Array, b: Array) -> float:
    """Correlation of ranks, equal values sharing theirs; 0 where one of them is all the same."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size > 0 else 0.0


def _ranks(values: Array) -> Array:
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=np.float64)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks
