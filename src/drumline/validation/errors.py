"""Prediction errors by source, and how well the layouts of one job are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.plan_columns import Array
from .published_run import PublishedRun


@dataclass(frozen=True, slots=True)
class ErrorScore:
    """Statistics of the relative errors (predicted - measured) / measured, as fractions."""

    rows: int
    mean: float
    median: float
    p90: float
    worst: float
    """Largest absolute error."""
    bias: float
    """Mean of the signed errors."""


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """Layouts of one job on one cluster: rank correlation, and the loss of picking the predicted best."""

    source: str
    name: str
    rows: int
    spread: float
    """Slowest over fastest, less one."""
    spearman: float
    regret: float
    """Measured time of the layout predicted fastest, over the fastest, less one."""


def score(errors: Array) -> ErrorScore | None:
    """Statistics of errors; None without any."""
    if not len(errors):
        return None
    size = np.abs(errors)
    return ErrorScore(
        len(errors),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
        float(errors.mean()),
    )


def relative(predicted: Array, measured: Array) -> Array:
    """Relative errors; NaN where nothing was measured."""
    return predicted / measured - 1.0


def by_source(errors: Array, sources: Sequence[str]) -> dict[str, ErrorScore]:
    """Score of every source that has rows, in order of appearance."""
    own: dict[str, list[float]] = {}
    for source, error in zip(sources, errors, strict=True):
        if np.isfinite(error):
            own.setdefault(source, []).append(float(error))
    return {source: s for source, values in own.items() if (s := score(np.array(values))) is not None}


def overall(errors: Array) -> ErrorScore | None:
    """Score of all rows that were measured."""
    return score(errors[np.isfinite(errors)])


def layout_groups(runs: Sequence[PublishedRun], predicted: Array, *, least: int = 2) -> list[LayoutGroup]:
    """Groups of runs that differ in the layout alone: same source, model, cluster, precision and batch."""
    members: dict[tuple[object, ...], list[int]] = {}
    for i, r in enumerate(runs):
        if r.seconds is not None:
            members.setdefault(job_of(r), []).append(i)
    result = []
    for rows in members.values():
        if len(rows) < least:
            continue
        measured = np.array([runs[i].seconds for i in rows], dtype=np.float64)
        guess = predicted[np.array(rows)]
        first = runs[rows[0]]
        chosen = measured[int(guess.argmin())]
        name = f"{first.layers} x {first.hidden}, {first.ranks} ranks, batch {first.batch}"
        result.append(
            LayoutGroup(
                first.source,
                name,
                len(rows),
                float(measured.max() / measured.min() - 1),
                spearman(guess, measured),
                float(chosen / measured.min() - 1),
            )
        )
    return result


def job_of(r: PublishedRun) -> tuple[object, ...]:
    """All that two runs share which differ in their layout alone."""
    return (
        r.source,
        r.layers,
        r.hidden,
        r.heads,
        r.kv_heads,
        r.ffn,
        r.vocabulary,
        r.sequence,
        r.batch,
        r.ranks,
        r.sheet.type,
        r.devices_per_node,
        r.cluster_state,
        r.mixture,
        r.software.precision,
        r.software.gradient_bytes,
        r.software.elementwise_fusion,
        r.software.overlap_tp,
    )


def spearman(a: Array, b: Array) -> float:
    """Spearman rank correlation with average ranks for ties; 0 where one side is constant."""
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
