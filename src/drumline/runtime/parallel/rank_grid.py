"""The ranks of a plan along its mesh axes, and process groups for any of them together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch.distributed as dist

from ...plans import Plan
from ..state.process_groups import group_of

AXES = ("pp", "replica", "shard", "rows", "columns", "cp", "tp")
"""Outermost first, so that tensor parallelism stays inside a node. Rows and columns are those of `tile`."""

DATA_AXES = ("replica", "shard")
"""Along these, ranks have other samples."""

SAMPLE_AXES = ("rows", "columns", "cp")
"""Along these, ranks have other parts of the same samples, and the same parameters."""


class RankGrid:
    """Where this rank is, and with whom."""

    def __init__(self, plan: Plan, rank: int) -> None:
        shards = plan.shards
        self.sizes = dict(zip(AXES, (plan.pp, plan.dp // shards, shards, *plan.tile, plan.cp, plan.tp), strict=True))
        self.rank = rank
        self.coordinates = self._place(rank)
        """This rank's index along every axis."""
        self._made: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def _place(self, rank: int) -> dict[str, int]:
        at = {}
        for axis in reversed(AXES):
            rank, at[axis] = divmod(rank, self.sizes[axis])
        return at

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks lie along some axes."""
        return math.prod(self.sizes[a] for a in axes)

    def index(self, axes: Iterable[str]) -> int:
        """This rank's place among those that differ from it along some axes alone."""
        place = 0
        for axis in AXES:
            if axis in set(axes):
                place = place * self.sizes[axis] + self.coordinates[axis]
        return place

    def ranks(self, axes: Iterable[str]) -> list[int]:
        """The ranks that differ from this one along some axes alone, in order."""
        return self._along(tuple(a for a in AXES if a in set(axes)), self.coordinates)

    def group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """Their process group; None where this rank is alone. All ranks ask for the same groups in the same order."""
        key = tuple(a for a in AXES if a in set(axes) and self.sizes[a] > 1)
        if key not in self._made:
            self._made[key] = self._new(key)
        return self._made[key]

    def second_group(self, axes: Iterable[str]) -> dist.ProcessGroup | None:
        """A further group of the same ranks, with lines of its own."""
        return self._new(tuple(a for a in AXES if a in set(axes) and self.sizes[a] > 1), use="another")

    def _new(self, key: tuple[str, ...], *, use: str = "") -> dist.ProcessGroup | None:
        if not key:
            return None
        others = [a for a in AXES if a not in key]
        mine = None
        for places in itertools.product(*(range(self.sizes[a]) for a in others)):
            members = self._along(key, dict(zip(others, places, strict=True)))
            made = group_of(members, use=use)
            if self.rank in members:
                mine = made
        return mine

    def _along(self, key: tuple[str, ...], at: dict[str, int]) -> list[int]:
        found = []
        for places in itertools.product(*(range(self.sizes[a]) for a in key)):
            here = {**at, **dict(zip(key, places, strict=True))}
            rank = 0
            for axis in AXES:
                rank = rank * self.sizes[axis] + here[axis]
            found.append(rank)
        return found
