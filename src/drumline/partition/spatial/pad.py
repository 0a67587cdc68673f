"""Padding along a split dim, in every mode: constant, reflect, replicate, circular. Negative padding crops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..sharding.halo_exchange import Spans, windows
from ..sharding.layout import Bounds
from ..sharding.redistribution import Axis
from .rows import feasible_bounds, spans, zeros_from


@dataclass(frozen=True, slots=True)
class PaddingPlan:
    """The plan of a padding along a split dim."""

    wanted: tuple[Spans, ...]
    """The rows that each rank needs, each once."""
    order: tuple[tuple[int, ...], ...]
    """Index of each padded row of a rank among them; empty where they are in order."""
    bounds: Bounds
    """Bounds of the padded tensor."""


def pad(
    x: torch.Tensor, sides: Sequence[int], mode: str, value: float | None, dim: int, bounds: Bounds, axis: Axis
) -> tuple[torch.Tensor, Bounds]:
    """This rank's rows of the padded tensor, and its bounds; `sides` as in torch, last dim first."""
    dim %= x.dim()
    sides = list(sides)
    k = 2 * (x.dim() - 1 - dim)
    before, after = (sides[k], sides[k + 1]) if k < len(sides) else (0, 0)
    if k < len(sides):
        sides[k] = sides[k + 1] = 0
    plan = plan_padding(bounds, before, after, mode)
    rows = windows(x, dim, bounds, plan.wanted, axis.with_halo, value or 0.0)
    if plan.order[axis.index]:
        rows = rows.index_select(dim, torch.tensor(plan.order[axis.index], device=x.device))
    if not any(sides):
        return rows, plan.bounds
    if rows.shape[dim] == 0:  # torch refuses to reflect a tensor without rows
        shape = [size + sum(sides[2 * i : 2 * i + 2]) for i, size in enumerate(reversed(rows.shape))]
        return zeros_from(shape[::-1], rows), plan.bounds
    return F.pad(rows, sides, mode, value), plan.bounds


@lru_cache(maxsize=4096)
def plan_padding(bounds: Bounds, before: int, after: int, mode: str) -> PaddingPlan:
    """Plan a padding: a rank keeps its rows; the first and the last also get the padding."""
    size = bounds[-1]
    out = feasible_bounds((b + before for b in bounds), size + before + after)
    if mode == "constant":
        return PaddingPlan(tuple(((a - before, b - before),) for a, b in spans(out)), ((),) * (len(bounds) - 1), out)
    wanted, order = [], []
    for a, b in spans(out):
        rows = [_source(j - before, size, mode) for j in range(a, b)]
        different = sorted(set(rows))
        place = {row: i for i, row in enumerate(different)}
        wanted.append(_runs(different))
        order.append(tuple(place[row] for row in rows) if rows != different else ())
    return PaddingPlan(tuple(wanted), tuple(order), out)


def _source(row: int, size: int, mode: str) -> int:
    """The row whose copy is at `row`, which may be outside."""
    if mode == "circular":
        return row % size
    if mode == "replicate":
        return min(max(row, 0), size - 1)
    assert mode == "reflect", mode
    return -row if row < 0 else 2 * (size - 1) - row if row >= size else row


def _runs(rows: Sequence[int]) -> Spans:
    """Ascending rows as spans."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return tuple(runs)
