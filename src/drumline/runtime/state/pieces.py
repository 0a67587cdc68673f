"""A rank's pieces of the parameters: ranges of elements of flattened parameters, whatever the strategy.

Update, checkpoints and verification know strategies by their pieces alone. A parameter that is whole on every rank is
one piece that begins at 0; a shard of rows, a flat shard and a part of a tiled layer are ranges that begin later. Where
a plan splits the model itself, a rank has a `ParameterSlice`, and a piece is a range of elements of this slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...partition.sharding.layout import Split

BUNDLE_BYTES = 2**20
"""Small tensors are sent together, up to this many bytes a message."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """A rank's part of a parameter along one dim, as tensor parallelism cuts it."""

    split: Split
    index: int
    """The rank's index on the axis."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The slice's shape."""
        dim = self.split.dim
        return (*whole[:dim], self.split.length(self.index), *whole[dim + 1 :])

    def runs(self, whole: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements start .. stop of the flattened slice, as runs of the flattened whole: (its start, our start, n)."""
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
    """Elements `start` to `stop` of the flattened parameter `name`, or of the rank's slice of it."""

    name: str
    """In the user's model."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    value: nn.Parameter
    """The tensor that the optimizer updates: memory of the model's parameter, or, offloaded, host memory."""
    replicated: bool = False
    """Whether every rank has this same piece; otherwise each element is on one rank of the strategy's group."""
    device_value: torch.Tensor | None = None
    """The device memory that an offloaded value is copied back to after the update."""
    slice: ParameterSlice | None = None
    """For a split model: the slice of the parameter in which `start` counts."""
    owned: bool = True
    """Whether this rank answers for these elements; other ranks may have and update them too."""

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.value.numel()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter, in its shape."""
        return self.slice is None and tuple(self.value.shape) == self.shape

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Its runs in the flattened parameter: (start there, start here, length)."""
        if self.slice is None:
            yield self.start, 0, self.value.numel()
        else:
            yield from self.slice.runs(self.shape, self.start, self.stop)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Its elements of a whole tensor, flat."""
        flat = whole.reshape(-1)
        if self.slice is None:
            return flat[self.start : self.stop]
        return torch.cat([flat[a : a + n] for a, _, n in self.runs()] or [flat[:0]])

    def write(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Write its elements into the flattened parameter."""
        if self.slice is not None and self.start == 0 and values.numel() == math.prod(self.slice.shape(self.shape)):
            dim, at = self.slice.split.dim, 0
            box, part = flat.view(self.shape), values.view(self.slice.shape(self.shape))
            for run in self.slice.split.ranges(self.slice.index):
                box.narrow(dim, run.start, len(run)).copy_(part.narrow(dim, at, len(run)))
                at += len(run)
            return
        for there, here, n in self.runs():
            flat[there : there + n] = values[here : here + n]


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A parameter of this rank that is a range of rows, or a slice, of the user's parameter `name`."""

    name: str
    shape: tuple[int, ...]
    start: int = 0
    slice: ParameterSlice | None = None
    owned: bool = True


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Shape and type of a whole parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def with_user_names(pieces: Iterable[Piece], parts: Mapping[str, ParameterPart]) -> list[Piece]:
    """The pieces under the names of the user's model, some of whose parameters were cut into parts."""
    return [
        replace(
            p,
            name=part.name,
            shape=part.shape,
            start=part.start + p.start,
            slice=part.slice,
            owned=part.owned and p.owned,
        )
        if (part := parts.get(p.name))
        else p
        for p in pieces
    ]


def parameter_specs(model: nn.Module, parts: Mapping[str, ParameterPart]) -> dict[str, ParameterSpec]:
    """Every parameter of the user's model, with its whole shape."""
    specs: dict[str, ParameterSpec] = {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        specs.setdefault(part.name if part else name, ParameterSpec(part.shape if part else tuple(p.shape), p.dtype))
    return specs


def bundles(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of small tensors of one type to send as one message: short messages are mostly latency."""
    run: list[torch.Tensor] = []
    for t in tensors:
        if run and (t.dtype != run[0].dtype or sum(x.nbytes for x in run) + t.nbytes > BUNDLE_BYTES):
            yield run
            run = []
        run.append(t)
    if run:
        yield run


def _sum_run(run: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum a run over the ranks: every element is on one of them, the others add zeros."""
    if len(run) == 1:
        dist.all_reduce(run[0], group=group)
        return
    flat = torch.cat(run)
    dist.all_reduce(flat, group=group)
    for t, sums in zip(run, flat.split([t.numel() for t in run]), strict=True):
        t.copy_(sums)


@torch.no_grad()
def assemble(
    specs: Mapping[str, ParameterSpec],
    parts: Iterable[tuple[Piece, torch.Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Assemble whole tensors (values, gradients, optimizer state) by name, on every rank, from the ranks' pieces.

    `specs` has every parameter, in the same order on every rank; those without any piece are left out. `group` is the
    ranks over which the pieces are spread.
    """
    whole: dict[str, torch.Tensor] = {}
    sharded: dict[str, torch.dtype] = {}
    for piece, tensor in parts:
        if piece.name not in whole:
            whole[piece.name] = torch.zeros(specs[piece.name].shape, dtype=tensor.dtype, device=device).flatten()
        if piece.owned:
            piece.write(whole[piece.name], tensor.detach().flatten().to(device))
        if not piece.replicated:
            sharded[piece.name] = tensor.dtype
    if group is not None and dist.get_world_size(group) > 1:
        here = torch.tensor([name in sharded for name in specs], dtype=torch.int32, device=device)
        dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
        names = [name for name, present in zip(specs, here.tolist(), strict=True) if present]
        for name in names:
            if name not in whole:
                whole[name] = torch.zeros(specs[name].shape, dtype=specs[name].dtype, device=device).flatten()
        for run in bundles([whole[name] for name in names]):
            _sum_run(run, group)
    return {name: whole[name].view(specs[name].shape) for name in specs if name in whole}
