"""The ranks of a split model along the axes of its plan, and process groups along any of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch.distributed as dist

from ...plans import Plan
from ..state.process_groups import process_group

AXES = ("pp", "replica", "shard", "rows", "columns", "cp", "tp")
"""Outermost first, so that tensor parallelism stays inside a host. Rows and columns are those of `tile`."""

DATA_AXES = ("replica", "shard")
"""Ranks along these have different samples."""

SAMPLE_AXES = ("rows", "columns", "cp")
"""Ranks along these have different parts of the same samples, and the same parameters."""


class RankGrid:
    """This rank's coordinates, and its process groups."""

    def __init__(self, plan: Plan, rank: int) -> None:
        shards = plan.shards
        self.sizes = dict(zip(AXES, (plan.pp, plan.dp // shards, shards, *plan.tile, plan.cp, plan.tp), strict=True))
        self.rank = rank
        self.coordinates = self._coordinates(rank)
        """This rank's index along every axis."""
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def _coordinates(self, rank: int) -> dict[str, int]:
        at = {}
        for axis in reversed(AXES):
            rank, at[axis] = divmod(rank, self.sizes[axis])
        return at

    def size(self, axes: Iterable[str]) -> int:
        """Number of ranks along some axes."""
        return math.prod(self.sizes[a] for a in axes)

    def index(self, axes: Iterable[str]) -> int:
        """This rank's index among those that differ from it along these axes only."""
        place = 0
        for axis in AXES:
            if axis in set(axes):
                place = place * self.sizes[axis] + self.coordinates[axis]
        return place

    def ranks(self, axes: Iterable[str]) -> list[int]:
        """The ranks that differ from this one along these axes only, in order."""
        return self._along(tuple(a for a in AXES if a in set(axes)), self.coordinates)

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """The process group of `ranks(axes)`; None if it is this rank alone. All ranks call this in the same order."""
        key = tuple(a for a in AXES if a in set(axes) and self.sizes[a] > 1)
        if key not in self._groups:
            self._groups[key] = self._new(key)
        return self._groups[key]

    def second_group(self, axes: Iterable[str], use: str = "second") -> dist.ProcessGroup | None:
        """Another group of the same ranks for this use, with channels of its own."""
        return self._new(tuple(a for a in AXES if a in set(axes) and self.sizes[a] > 1), use=use)

    def _new(self, key: tuple[str, ...], *, use: str = "") -> dist.ProcessGroup | None:
        if not key:
            return None
        others = [a for a in AXES if a not in key]
        mine = None
        for places in itertools.product(*(range(self.sizes[a]) for a in others)):
            members = self._along(key, dict(zip(others, places, strict=True)))
            made = process_group(members, use=use)
            if self.rank in members:
                mine = made
        return mine

    def _along(self, key: tuple[str, ...], at: dict[str, int]) -> list[int]:
        ranks = []
        for places in itertools.product(*(range(self.sizes[a]) for a in key)):
            here = {**at, **dict(zip(key, places, strict=True))}
            rank = 0
            for axis in AXES:
                rank = rank * self.sizes[axis] + here[axis]
            ranks.append(rank)
        return ranks
