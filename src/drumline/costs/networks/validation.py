"""How far predictions of published collectives are off: by level and by source, with the shipped constants and without
each source in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...clusters.link_types import LinkTypes, link_types
from .fit import SMALLEST, counted, fit
from .model import fabric_seconds
from .rows import Row, Skipped, read_rows


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a group of rows, as fractions."""

    rows: int
    mean: float
    median: float
    p90: float
    worst: float
    bias: float
    """The mean with signs: above 0 the prediction is too long."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Of errors with their signs; all of them 0 where there are none."""
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
class Predicted:
    """A row and what was predicted of it."""

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.seconds / self.row.seconds - 1


@dataclass(frozen=True, slots=True)
class CollectivesValidation:
    """Every row with its prediction, and the errors of those of SMALLEST bytes and more."""

    rows: tuple[Predicted, ...]
    levels: dict[str, Errors]
    """`inside` a node and `across` nodes: with the constants that ship."""
    left_out: dict[str, Errors]
    """The same, each source predicted with constants fitted without it; empty unless asked for."""
    sources: dict[str, Errors]
    skipped: tuple[Skipped, ...]

    def lines(self) -> list[str]:
        """For a person, in 40 columns where words allow it."""
        small = len(self.rows) - sum(errors.rows for errors in self.levels.values())
        said = [f"{len(self.rows)} rows predicted, {len(self.skipped)} skipped"]
        if small:
            said.append(f"{small} below {SMALLEST:g} bytes do not count")
        for word, groups in (("", self.levels), (" without its source", self.left_out)):
            for name, e in groups.items():
                said.append(f"{name}{word} ({e.rows} rows)")
                said.append(f"  mean {100 * e.mean:.1f}%, median {100 * e.median:.1f}%")
                said.append(f"  P90 {100 * e.p90:.1f}%, worst {100 * e.worst:.1f}%, bias {100 * e.bias:+.1f}%")
        return said


def validate_collectives(path: str | Path, *, leave_one_out: bool = True) -> CollectivesValidation:
    """Predict every row of a file of published collectives from the links that it states."""
    rows, skipped = read_rows(path)
    shipped = tuple(Predicted(row, _seconds(row, link_types())) for row in rows)
    big = [one for one in shipped if one.row.bytes >= SMALLEST]
    names = sorted({row.source for row in rows})
    return CollectivesValidation(
        shipped,
        _by_level(big),
        _by_level(_left_out(rows, names)) if leave_one_out else {},
        {name: Errors.of([one.error for one in big if one.row.source == name]) for name in names},
        tuple(skipped),
    )


def _seconds(row: Row, known: LinkTypes) -> float:
    return fabric_seconds(row.collective, row.ranks, row.bytes, row.fabric, known)


def _by_level(found: Sequence[Predicted]) -> dict[str, Errors]:
    def of(level: str) -> Errors:
        return Errors.of([one.error for one in found if one.row.level == level])

    return {level: of(level) for level in ("inside", "across")}


def _left_out(rows: Sequence[Row], names: Sequence[str]) -> list[Predicted]:
    """Each source by constants that have not seen it: of a kind of link that no other source has, by estimates."""
    found: list[Predicted] = []
    for name in names:
        own = counted(row for row in rows if row.source == name)
        if own:
            known = fit([row for row in rows if row.source != name])
            found += [Predicted(row, _seconds(row, known)) for row in own]
    return found
