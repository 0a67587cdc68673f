"""Errors of predicted collectives, by level and by source: with the shipped constants, and leaving one source out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...clusters.link_types import LinkTypes, link_types
from .fit import MIN_BYTES, fit_link_types, large_enough
from .model import interconnect_seconds
from .rows import CollectiveRow, SkippedCollective, read_collectives


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of a group of rows, as fractions."""

    rows: int
    mean: float
    median: float
    p90: float
    worst: float
    bias: float
    """Mean of the signed errors: above 0 the prediction is too long."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorSummary:
        """Summary of signed errors; all zeros where there are none."""
        if not errors:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        sizes = sorted(map(abs, errors))
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        mean, median, bias = statistics.fmean(sizes), statistics.median(sizes), statistics.fmean(errors)
        return cls(len(sizes), mean, median, p90, sizes[-1], bias)

    def __str__(self) -> str:
        return (
            f"{self.rows} rows: mean {100 * self.mean:.1f}%, median {100 * self.median:.1f}%, "
            f"P90 {100 * self.p90:.1f}%, worst {100 * self.worst:.1f}%, bias {100 * self.bias:+.1f}%"
        )


@dataclass(frozen=True, slots=True)
class PredictedCollective:
    """A row and its predicted time."""

    row: CollectiveRow
    seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True, slots=True)
class CollectivesValidation:
    """Predictions of all rows, and the errors of those of at least MIN_BYTES."""

    rows: tuple[PredictedCollective, ...]
    levels: dict[str, ErrorSummary]
    """`inside` a node and `across` nodes, with the shipped constants."""
    left_out: dict[str, ErrorSummary]
    """The same, each source predicted with constants fitted without it; empty unless requested."""
    sources: dict[str, ErrorSummary]
    skipped: tuple[SkippedCollective, ...]

    def lines(self) -> list[str]:
        """Text for the terminal, in 40 columns where words allow."""
        small = len(self.rows) - sum(errors.rows for errors in self.levels.values())
        lines = [f"{len(self.rows)} rows predicted, {len(self.skipped)} skipped"]
        if small:
            lines.append(f"{small} below {MIN_BYTES:g} bytes do not count")
        for suffix, groups in (("", self.levels), (" without its source", self.left_out)):
            for name, e in groups.items():
                lines.append(f"{name}{suffix} ({e.rows} rows)")
                lines.append(f"  mean {100 * e.mean:.1f}%, median {100 * e.median:.1f}%")
                lines.append(f"  P90 {100 * e.p90:.1f}%, worst {100 * e.worst:.1f}%, bias {100 * e.bias:+.1f}%")
        return lines


def validate_collectives(path: str | Path, *, leave_one_out: bool = True) -> CollectivesValidation:
    """Predict every row of a file of published collectives from the links that it states."""
    rows, skipped = read_collectives(path)
    shipped = tuple(PredictedCollective(row, _predict(row, link_types())) for row in rows)
    large = [one for one in shipped if one.row.bytes >= MIN_BYTES]
    sources = sorted({row.source for row in rows})
    return CollectivesValidation(
        shipped,
        _by_level(large),
        _by_level(_leave_one_out(rows, sources)) if leave_one_out else {},
        {name: ErrorSummary.of([one.error for one in large if one.row.source == name]) for name in sources},
        tuple(skipped),
    )


def _predict(row: CollectiveRow, types: LinkTypes) -> float:
    return interconnect_seconds(row.collective, row.ranks, row.bytes, row.interconnect, types)


def _by_level(predictions: Sequence[PredictedCollective]) -> dict[str, ErrorSummary]:
    return {
        level: ErrorSummary.of([one.error for one in predictions if one.row.level == level])
        for level in ("inside", "across")
    }


def _leave_one_out(rows: Sequence[CollectiveRow], sources: Sequence[str]) -> list[PredictedCollective]:
    """Predict each source with constants fitted without it; estimates where no other source has that type of link."""
    predictions: list[PredictedCollective] = []
    for name in sources:
        own = large_enough(row for row in rows if row.source == name)
        if own:
            types = fit_link_types([row for row in rows if row.source != name])
            predictions += [PredictedCollective(row, _predict(row, types)) for row in own]
    return predictions
