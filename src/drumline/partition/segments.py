"""How the features that weights give may be cut among ranks: as one segment, as equal ones, or as unequal ones.

A fused projection gives queries, keys and values in one row: each of them is a segment, and is cut by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch.fx import Node

from .layout import Split, even, evenly
from .weights import Weighing

aten = torch.ops.aten
Sizes = tuple[int, ...]
"""Of the segments of a dim."""
REACH = 12
"""Nodes after a product that are looked at."""


def segmentations(columns: Sequence[Weighing], n: int) -> Iterator[int | Sizes]:
    """How the columns' outputs may be cut for n ranks: numbers of equal segments, or the sizes of unequal ones."""
    yield 1
    counts: set[int] = set()
    for c in columns:
        size = c.weight.meta["val"].shape[c.given or 0]
        for node in _after(c.node):
            val = node.meta.get("val")
            if isinstance(val, list | tuple):
                counts.add(len(val))
            elif isinstance(val, torch.Tensor):
                counts |= {d for d in val.shape if 1 < d <= 8}
        counts = {k for k in counts if size % (k * n) == 0}
    yield from sorted(counts - {1})
    if len(columns) == 1:
        yield from _unequal(columns[0], n)


def cuts_of(size: int, segments: int | Sizes, n: int) -> Split | None:
    """A dim of that size in such segments, each cut for n ranks; None where that is not even."""
    if isinstance(segments, int):
        return None if size % (segments * n) else evenly(0, size, n, segments)
    return Split(0, tuple(even(s, n) for s in segments)) if sum(segments) == size else None


def _unequal(column: Weighing, n: int) -> Iterator[Sizes]:
    """A fused projection of many queries and few keys is sliced, or split by sizes."""
    size = column.weight.meta["val"].shape[column.given or 0]
    ends = {0, size}
    for user in column.node.users:
        val = user.meta.get("val")
        if isinstance(val, list | tuple):
            lengths = [v.shape[-1] for v in val if isinstance(v, torch.Tensor)]
            ends |= set(accumulate(lengths)) if sum(lengths) == size else set()
        elif user.target is aten.slice.Tensor and user.args[1:2] in ((-1,), (column.node.meta["val"].dim() - 1,)):
            start, stop, *_ = slice(*user.args[2:4]).indices(size)
            ends |= {start, stop}
    sizes = tuple(b - a for a, b in pairwise(sorted(ends)))
    if len(set(sizes)) > 1 and all(s % n == 0 for s in sizes):
        yield sizes


def _after(node: Node) -> Iterator[Node]:
    """The node and those that read it, directly or not, the nearest first."""
    todo = [node]
    for _ in range(REACH):
        if not todo:
            return
        at = todo.pop(0)
        yield at
        todo += list(at.users)
