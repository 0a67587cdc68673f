"""Padding along a split dim, in every mode: constant, reflect, replicate, circular. Negative padding crops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..layout import Bounds
from ..moves import Axis
from ..window import Spans, windows
from .slide import nothing, settled, spans


@dataclass(frozen=True, slots=True)
class Padding:
    """The plan of a padding along a split dim."""

    wanted: tuple[Spans, ...]
    """The rows that each rank needs, each once."""
    order: tuple[tuple[int, ...], ...]
    """Where each padded row of a rank lies among them; empty where they lie in order."""
    bounds: Bounds
    """Of the padded whole."""


def pad(
    x: torch.Tensor, sides: Sequence[int], mode: str, value: float | None, dim: int, bounds: Bounds, axis: Axis
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the padded tensor, and its bounds; `sides` as for torch, last dim first."""
    dim %= x.dim()
    sides = list(sides)
    k = 2 * (x.dim() - 1 - dim)
    before, after = (sides[k], sides[k + 1]) if k < len(sides) else (0, 0)
    if k < len(sides):
        sides[k] = sides[k + 1] = 0
    plan = padding(bounds, before, after, mode)
    rows = windows(x, dim, bounds, plan.wanted, axis.with_halo, value or 0.0)
    if plan.order[axis.index]:
        rows = rows.index_select(dim, torch.tensor(plan.order[axis.index], device=x.device))
    if not any(sides):
        return rows, plan.bounds
    if rows.shape[dim] == 0:  # torch's own refuses to reflect what has no rows
        shape = [size + sum(sides[2 * i : 2 * i + 2]) for i, size in enumerate(reversed(rows.shape))]
        return nothing(shape[::-1], rows), plan.bounds
    return F.pad(rows, sides, mode, value), plan.bounds


@lru_cache(maxsize=4096)
def padding(bounds: Bounds, before: int, after: int, mode: str) -> Padding:
    """A rank keeps its rows; the first and the last get the padding too."""
    size = bounds[-1]
    out = settled((b + before for b in bounds), size + before + after)
    if mode == "constant":
        return Padding(tuple(((a - before, b - before),) for a, b in spans(out)), ((),) * (len(bounds) - 1), out)
    wanted, order = [], []
    for a, b in spans(out):
        rows = [_source(j - before, size, mode) for j in range(a, b)]
        different = sorted(set(rows))
        place = {row: i for i, row in enumerate(different)}
        wanted.append(_runs(different))
        order.append(tuple(place[row] for row in rows) if rows != different else ())
    return Padding(tuple(wanted), tuple(order), out)


def _source(row: int, size: int, mode: str) -> int:
    """The row whose copy stands at `row`, which may be outside."""
    if mode == "circular":
        return row % size
    if mode == "replicate":
        return min(max(row, 0), size - 1)
    assert mode == "reflect", mode
    return -row if row < 0 else 2 * (size - 1) - row if row >= size else row


def _runs(rows: Sequence[int]) -> Spans:
    """Rising rows as spans."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)
