"""How the parameters lie on a rank: runs of numbers of flattened parameters, whatever the strategy.

The update, the checkpoint and the verification know nothing else of a strategy. A parameter that is whole on every rank
is one piece that begins at 0; a shard of rows, a flat shard and a part of a tiled layer are runs that begin later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Numbers `start` to `stop` of the flattened parameter `name`."""

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

    @property
    def stop(self) -> int:
        """One past its last number."""
        return self.start + self.value.numel()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter, in its shape."""
        return tuple(self.value.shape) == self.shape


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter of the model that is a run of rows of a larger one, which the user's model has under `name`."""

    name: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and type of a whole parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def rename(pieces: Iterable[Piece], parts: Mapping[str, Part]) -> list[Piece]:
    """The pieces under the names of the user's model, where some of its parameters were cut into parts."""
    return [
        replace(p, name=part.name, shape=part.shape, start=part.start + p.start) if (part := parts.get(p.name)) else p
        for p in pieces
    ]


def kinds_of(model: nn.Module, parts: Mapping[str, Part]) -> dict[str, Kind]:
    """Every parameter of the user's model; sharded ones tell their whole shape."""
    kinds: dict[str, Kind] = {}
    for name, p in model.named_parameters():
        part = parts.get(name)
        kinds.setdefault(part.name if part else name, Kind(part.shape if part else tuple(p.shape), p.dtype))
    return kinds


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
        whole[piece.name][piece.start : piece.start + tensor.numel()] = tensor.detach().flatten().to(device)
        if not piece.everywhere:
            spread[piece.name] = tensor.dtype
    if group is not None and dist.get_world_size(group) > 1:
        here = torch.tensor([name in spread for name in kinds], dtype=torch.int32, device=device)
        dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
        for name, present in zip(kinds, here.tolist(), strict=True):
            if present:
                if name not in whole:
                    whole[name] = torch.zeros(kinds[name].shape, dtype=kinds[name].dtype, device=device).flatten()
                dist.all_reduce(whole[name], group=group)  # every number lies on one rank; the others add zeros
    return {name: whole[name].view(kinds[name].shape) for name in kinds if name in whole}
