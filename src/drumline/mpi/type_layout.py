"""The memory layout of a datatype: sizes, bounds, and the blocks of bytes that are packed and unpacked.

Every constructor reduces to one form: parts, each a displacement in bytes, a number of copies and an inner layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A scalar type."""

    size: int
    align: int
    kind: str
    """i, u, f, c (complex), b (bool), B (bytes), or 2 (value and index)."""
    numpy: np.dtype[Any] | None = None
    torch: torch.dtype | None = None
    check: int = 0
    """Sent with messages: sender and receiver must agree; 0 matches every type."""
    external: int = 0
    """Bytes in the portable format external32; 0 if it has no such type."""


@dataclass(eq=False)
class TypeLayout:
    """The layout of one element of a datatype."""

    parts: tuple[tuple[int, int, TypeLayout], ...] = ()
    """(displacement in bytes, copies, inner layout)."""
    scalar: ScalarType | None = None
    bounds: tuple[int, int] | None = None
    """Lower bound and extent, if set explicitly."""
    padded: bool = False
    """Whether the extent is rounded up to the alignment, as in a C struct."""
    size: int = field(init=False)
    lb: int = field(init=False)
    ub: int = field(init=False)
    true_lb: int = field(init=False)
    true_ub: int = field(init=False)
    align: int = field(init=False)

    def __post_init__(self) -> None:
        if self.scalar is not None:
            self.size = self.ub = self.true_ub = self.scalar.size
            self.lb = self.true_lb = 0
            self.align = self.scalar.align
            if self.scalar.numpy is not None:
                self.ub = self.scalar.numpy.itemsize  # a (value, index) pair may have a gap at its end
            return
        parts = [(d, n, old) for d, n, old in self.parts if n > 0]
        self.size = sum(n * old.size for _, n, old in parts)
        self.align = max((old.align for _, _, old in parts), default=1)
        last = [(n - 1) * old.extent for _, n, old in parts]
        self.lb = min((d + old.lb + min(0, e) for (d, _, old), e in zip(parts, last, strict=True)), default=0)
        self.ub = max((d + old.ub + max(0, e) for (d, _, old), e in zip(parts, last, strict=True)), default=0)
        some = [(d, old, e) for (d, _, old), e in zip(parts, last, strict=True) if old.size]
        self.true_lb = min((d + old.true_lb + min(0, e) for d, old, e in some), default=0)
        self.true_ub = max((d + old.true_ub + max(0, e) for d, old, e in some), default=0)
        if self.padded:
            self.ub = self.lb + -(-(self.ub - self.lb) // self.align) * self.align
        if self.bounds is not None:
            self.lb, self.ub = self.bounds[0], sum(self.bounds)

    @property
    def extent(self) -> int:
        """The distance between two elements, in bytes."""
        return self.ub - self.lb

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of the byte blocks, in type order; adjacent ones are joined."""
        if self.scalar is not None:
            fields = self.scalar.numpy.fields if self.scalar.numpy is not None else None
            if fields is None:
                return [(0, self.size)]
            joined_fields = [(at, kind.itemsize) for kind, at, *_ in fields.values()]
            return [(0, self.size)] if joined_fields[1][0] == joined_fields[0][1] else joined_fields
        joined: list[tuple[int, int]] = []
        for start, length in self._spread():
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        return joined

    def _spread(self) -> Iterator[tuple[int, int]]:
        for d, n, old in self.parts:
            if n > 0 and old.dense:
                yield d, n * old.size
                continue
            for i in range(n):
                for start, length in old.blocks:
                    yield d + i * old.extent + start, length

    @cached_property
    def dense(self) -> bool:
        """Whether elements are contiguous without gaps."""
        return self.lb == 0 and self.extent == self.size and self.blocks == [(0, self.size)]

    @cached_property
    def scalars(self) -> list[ScalarType]:
        """The scalars of one element, in order."""
        if self.scalar is not None:
            return [self.scalar]
        return [scalar for _, n, old in self.parts for scalar in old.scalars * n]

    @cached_property
    def uniform_scalar(self) -> ScalarType | None:
        """The only scalar type that it contains; None for none or several."""
        if self.scalar is not None:
            return self.scalar
        kinds = {id(old.uniform_scalar): old.uniform_scalar for _, n, old in self.parts if n > 0}
        return next(iter(kinds.values())) if len(kinds) == 1 else None

    @cached_property
    def _index(self) -> tuple[int, np.ndarray[Any, Any]]:
        """The unit of copying in bytes, and the positions of one element's units."""
        numbers = [n for block in self.blocks for n in block] + [self.extent]
        unit = math.gcd(*numbers) or 1
        places = [np.arange(start, start + length, unit) for start, length in self.blocks]
        return unit, (np.concatenate(places) if places else np.empty(0, np.int64)) // unit

    def _places(self, memory: memoryview, base: int, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        unit, one = self._index
        shift = base % unit
        whole = (len(memory) - shift) // unit * unit
        units = np.frombuffer(memory[shift : shift + whole], dtype=f"V{unit}")
        start = (base - shift) // unit
        steps = start + np.arange(count)[:, None] * (self.extent // unit)
        return units, (steps + one[None, :]).reshape(-1)

    def pack(self, memory: memoryview, base: int, count: int) -> memoryview:
        """Pack `count` elements, starting at `base`."""
        units, places = self._places(memory, base, count)
        return memoryview(units[places].view(np.uint8)) if len(places) else memoryview(b"")

    def unpack(self, data: memoryview, memory: memoryview, base: int, count: int) -> None:
        """Unpack bytes; fewer than `count` elements fill only the first ones."""
        units, places = self._places(memory, base, count)
        unit = self._index[0]
        n = len(data) // unit
        units[places[:n]] = np.frombuffer(data[: n * unit], dtype=units.dtype)
        if len(data) % unit:  # a message may end inside a unit
            at = int(places[n]) * unit + base % unit
            memory[at : at + len(data) % unit] = data[n * unit :]


def block(n: int, old: TypeLayout) -> tuple[tuple[int, int, TypeLayout], ...]:
    """n adjacent copies."""
    return ((0, n, old),)


def spaced(
    lengths: Sequence[int], displacements: Sequence[int], old: TypeLayout
) -> tuple[tuple[int, int, TypeLayout], ...]:
    """Blocks at displacements in bytes."""
    return tuple((d, n, old) for n, d in zip(lengths, displacements, strict=True))


def box(dims: Sequence[tuple[int, Sequence[tuple[int, int]]]], old: TypeLayout) -> TypeLayout:
    """Elements of a row-major array: of each dim its size, and the runs (first, count) that are taken."""
    inner, width = old, old.extent
    for size, runs in reversed(dims):
        parts = tuple((first * width, count, inner) for first, count in runs)
        inner, width = TypeLayout(parts, bounds=(0, width * size)), width * size
    return inner


def subarray(dims: Sequence[tuple[int, int, int]], old: TypeLayout) -> TypeLayout:
    """A box inside a row-major array: (size, subsize, start) of each dim."""
    return box([(size, [(start, sub)]) for size, sub, start in dims], old)
