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
        """Number of ranks."""
        return math.prod(n for _, n in self.axes)

    def length(self, axis: str) -> int:
        """Ranks along an axis; 1 if the mesh does not have it."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each axis."""
        coordinate = {}
        for name, n in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, n)
        return {name: coordinate[name] for name, _ in self.axes}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate; axes not named are at 0."""
        index = 0
        for name, n in self.axes:
            index = index * n + coordinate.get(name, 0)
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
