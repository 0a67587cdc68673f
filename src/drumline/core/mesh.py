"""Named axes of ranks. *Axis* is of a mesh, *dim* is of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 .. size-1 arranged along named axes, outermost first (the last axis varies fastest)."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(n for _, n in self.axes)

    def length(self, axis: str) -> int:
        """How many ranks lie along one axis; 1 for an axis that is not there."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for name, n in reversed(self.axes):
            rank, place[name] = divmod(rank, n)
        return {name: place[name] for name, _ in self.axes}

    def rank(self, **place: int) -> int:
        """The rank at a place; axes not named are at 0."""
        index = 0
        for name, n in self.axes:
            index = index * n + place.get(name, 0)
        return index

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ only along `axis`; every rank is in exactly one."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for r in range(self.size):
            rest = tuple((k, v) for k, v in self.coordinate(r).items() if k != axis)
            groups.setdefault(rest, []).append(r)
        return list(groups.values())

    def __str__(self) -> str:
        return " x ".join(f"{name}({n})" for name, n in self.axes) or "one rank"
