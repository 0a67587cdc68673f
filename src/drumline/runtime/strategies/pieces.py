"""How the parameters lie on a rank: runs of numbers of flattened parameters, whatever the strategy.

The update, the checkpoint and the verification know nothing else of a strategy. A parameter that is whole on every rank
is one piece that begins at 0; a shard of rows, a flat shard and a part of a tiled layer are runs that begin later.
Where a plan splits the model itself, a rank has a `Cut` of a parameter, and a piece is a run of numbers of this cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...partition.layout import Split

BUNDLE = 2**20
"""Bytes of small tensors that travel as one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter along one dim."""

    split: Split
    index: int
    """The rank's place on the axis."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        dim = self.split.dim
        return (*whole[:dim], self.split.length(self.index), *whole[dim + 1 :])

    def runs(self, whole: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Numbers start .. stop of the flattened part, as runs of the flattened whole: (in the whole, in these, n)."""
        dim = self.split.dim
        inner = math.prod(whole[dim + 1 :])
        row, mine = whole[dim] * inner, self.split.length(self.index) * inner
        if not mine:
            return
        for outer in range(start // mine, -(-stop // mine)):
            local = outer * mine
            for run in self.split.ranges(self.index):
                size = len(run) * inner
                first, last = max(start, local), min(stop, local + size)
                if first < last:
                    yield outer * row + run.start * inner + first - local, first - start, last - first
                local += size


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Numbers `start` to `stop` of the flattened parameter `name`, or of the rank's cut of it."""

    name: str
    """As the user's model names it."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    value: nn.Parameter
    """What the optimizer updates: in the memory of the model's parameter, or, offloaded, in host memory."""
    everywhere: bool = False
    """Whether every rank holds this very piece; otherwise each number lies on one rank of the strategy's group."""
    home: torch.Tensor | None = None
    """Where an offloaded value goes back to after the update."""
    cut: Cut | None = None
    """Where the model is split, the part of the parameter that `start` counts in."""
    counts: bool = True
    """Whether this rank answers for these numbers; others may hold them too, and update them alike."""

    @property
    def stop(self) -> int:
        """One past its last number."""
        return self.start + self.value.numel()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter, in its shape."""
        return self.cut is None and tuple(self.value.shape) == self.shape

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Where its numbers lie in the flattened parameter: (there, here, how many)."""
        if self.cut is None:
            yield self.start, 0, self.value.numel()
        else:
            yield from self.cut.runs(self.shape, self.start, self.stop)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its numbers of a whole tensor, flat."""
        flat = whole.reshape(-1)
        if self.cut is None:
            return flat[self.start : self.stop]
        return torch.cat([flat[a : a + n] for a, _, n in self.runs()] or [flat[:0]])

    def put(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Write its numbers to where they lie in the flattened parameter."""
        if self.cut is not None and self.start == 0 and values.numel() == math.prod(self.cut.shape(self.shape)):
            dim, at = self.cut.split.dim, 0
            box, part = flat.view(self.shape), values.view(self.cut.shape(self.shape))
            for run in self.cut.split.ranges(self.cut.index):
                box.narrow(dim, run.start, len(run)).copy_(part.narrow(dim, at, len(run)))
                at += len(run)
            return
        for there, here, n in self.runs():
            flat[there : there + n] = values[here : here + n]


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter of the model that is a run of rows, or a cut, of a larger one, which the user has under `name`."""

    name: str
    shape: tuple[int, ...]
    start: int = 0
    cut: Cut | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and type of a whole parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def rename(pieces: Iterable[Piece], parts: Mapping[str, Part]) -> list[Piece]:
    """The pieces under the names of the user's model, where some of its parameters were cut into parts."""
    return [
        replace(
            p,
            name=part.name,
            shape=part.shape,
            start=part.start + p.start,
            cut=part.cut,
            counts=part.counts and p.counts,
        )
        if (part := parts.get(p.name))
        else p
        for p in pieces
    ]


def kinds_of(model: nn.Module, parts: Mapping[str, Part]) -> dict[str, Kind]:
    """Every parameter of the user's model; sharded ones tell their whole shape."""
    kinds: dict[str, Kind] = {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        kinds.setdefault(part.name if part else name, Kind(part.shape if part else tuple(p.shape), p.dtype))
    return kinds


def bundles(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type that are worth one message: a small one costs what a larger one does."""
    run: list[torch.Tensor] = []
    for t in tensors:
        if run and (t.dtype != run[0].dtype or sum(x.nbytes for x in run) + t.nbytes > BUNDLE):
            yield run
            run = []
        run.append(t)
    if run:
        yield run


def _add_up(run: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Every number lies on one rank; the others add zeros."""
    if len(run) == 1:
        dist.all_reduce(run[0], group=group)
        return
    flat = torch.cat(run)
    dist.all_reduce(flat, group=group)
    for t, sums in zip(run, flat.split([t.numel() for t in run]), strict=True):
        t.copy_(sums)


@torch.no_grad()
def assemble(
    kinds: Mapping[str, Kind],
    found: Iterable[tuple[Piece, torch.Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, on every rank, from what each rank has of them: values, gradients, optimizer state.

    `kinds` has every parameter, in the same order on every rank; those of which no rank has anything are left out.
    `group` is the ranks over which the pieces lie.
    """
    whole: dict[str, torch.Tensor] = {}
    spread: dict[str, torch.dtype] = {}
    for piece, tensor in found:
        if piece.name not in whole:
            whole[piece.name] = torch.zeros(kinds[piece.name].shape, dtype=tensor.dtype, device=device).flatten()
        if piece.counts:
            piece.put(whole[piece.name], tensor.detach().flatten().to(device))
        if not piece.everywhere:
            spread[piece.name] = tensor.dtype
    if group is not None and dist.get_world_size(group) > 1:
        here = torch.tensor([name in spread for name in kinds], dtype=torch.int32, device=device)
        dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
        names = [name for name, present in zip(kinds, here.tolist(), strict=True) if present]
        for name in names:
            if name not in whole:
                whole[name] = torch.zeros(kinds[name].shape, dtype=kinds[name].dtype, device=device).flatten()
        for run in bundles([whole[name] for name in names]):
            _add_up(run, group)
    return {name: whole[name].view(kinds[name].shape) for name in kinds if name in whole}
