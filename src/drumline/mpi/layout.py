"""Where the bytes of a datatype lie: sizes, bounds, and the blocks of memory that are packed and unpacked.

Every constructor comes down to one form: parts, each a displacement in bytes, a number of copies and an older layout.
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
class Basic:
    """A number type of the machine."""

    size: int
    align: int
    kind: str
    """i, u, f, c (complex), ? (truth), B (bytes), or 2 (value and index)."""
    numpy: np.dtype[Any] | None = None
    torch: torch.dtype | None = None
    check: int = 0
    """Travels with messages: sender and receiver must say the same; 0 fits everything."""


@dataclass(eq=False)
class Layout:
    """A datatype, as far as memory is concerned."""

    parts: tuple[tuple[int, int, Layout], ...] = ()
    """(displacement in bytes, copies, of what)."""
    basic: Basic | None = None
    bounds: tuple[int, int] | None = None
    """Lower bound and extent, where they were set by hand."""
    padded: bool = False
    """Whether the extent is rounded up to the alignment, as a C struct's is."""
    size: int = field(init=False)
    lb: int = field(init=False)
    ub: int = field(init=False)
    true_lb: int = field(init=False)
    true_ub: int = field(init=False)
    align: int = field(init=False)

    def __post_init__(self) -> None:
        if self.basic is not None:
            self.size = self.ub = self.true_ub = self.basic.size
            self.lb = self.true_lb = 0
            self.align = self.basic.align
            if self.basic.numpy is not None:
                self.ub = self.basic.numpy.itemsize  # a pair of value and index has a gap at its end
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
        """How far apart two elements lie."""
        return self.ub - self.lb

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """(offset, length) of the bytes, in the order of the type; neighbours are joined."""
        if self.basic is not None:
            fields = self.basic.numpy.fields if self.basic.numpy is not None else None
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
        """Whether elements lie one after the other without gaps."""
        return self.lb == 0 and self.extent == self.size and self.blocks == [(0, self.size)]

    @cached_property
    def basics(self) -> list[Basic]:
        """The numbers of one element, in order."""
        if self.basic is not None:
            return [self.basic]
        return [basic for _, n, old in self.parts for basic in old.basics * n]

    @cached_property
    def alike(self) -> Basic | None:
        """The one number type that it is made of; None for none or several."""
        if self.basic is not None:
            return self.basic
        kinds = {id(old.alike): old.alike for _, n, old in self.parts if n > 0}
        return next(iter(kinds.values())) if len(kinds) == 1 else None

    @cached_property
    def _index(self) -> tuple[int, np.ndarray[Any, Any]]:
        """How many bytes move together, and the places of such units of one element."""
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
        """The bytes of `count` elements from `base` on, one after the other."""
        units, places = self._places(memory, base, count)
        return memoryview(units[places].view(np.uint8)) if len(places) else memoryview(b"")

    def unpack(self, data: memoryview, memory: memoryview, base: int, count: int) -> None:
        """Put bytes back in their places; fewer than `count` elements need fill only the first."""
        units, places = self._places(memory, base, count)
        unit = self._index[0]
        n = len(data) // unit
        units[places[:n]] = np.frombuffer(data[: n * unit], dtype=units.dtype)
        if len(data) % unit:  # a message may end inside of a unit
            at = int(places[n]) * unit + base % unit
            memory[at : at + len(data) % unit] = data[n * unit :]


def block(n: int, old: Layout) -> tuple[tuple[int, int, Layout], ...]:
    """n copies in a row."""
    return ((0, n, old),)


def spaced(lengths: Sequence[int], displacements: Sequence[int], old: Layout) -> tuple[tuple[int, int, Layout], ...]:
    """Blocks at displacements in bytes."""
    return tuple((d, n, old) for n, d in zip(lengths, displacements, strict=True))


def subarray(dims: Sequence[tuple[int, int, int]], old: Layout) -> Layout:
    """A box inside of an array whose last dim runs fastest: (size, subsize, start) of each dim."""
    inner, width = old, old.extent
    for size, sub, start in reversed(dims):
        parts = tuple(((start + i) * width, 1, inner) for i in range(sub))
        inner, width = Layout(parts, bounds=(0, width * size)), width * size
    return inner
