"""One parameter server's share of a model: an equal range of the flattened parameters, and never a forward.

Parameters of one dtype are stored one after the other in a flat vector, in the order of the model; each of n servers
has an equal range of it. Workers send the same ranges of their gradients, so a message needs no names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from ..state.pieces import Piece
from .strategy import Strategy


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Position of a parameter in the flat vector of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The trained parameters of a model in flat vectors, one per dtype, cut over the servers."""

    ranges: tuple[FlatRange, ...]
    lengths: tuple[tuple[torch.dtype, int], ...]
    """The vectors, and the elements of each."""
    servers: int

    @classmethod
    def of(cls, model: nn.Module, servers: int) -> FlatLayout:
        """The layout of a model's trained parameters."""
        lengths: dict[torch.dtype, int] = {}
        ranges = []
        for name, p in model.named_parameters():
            if p.requires_grad:
                start = lengths.get(p.dtype, 0)
                lengths[p.dtype] = start + p.numel()
                ranges.append(FlatRange(name, tuple(p.shape), p.dtype, start, start + p.numel()))
        return cls(tuple(ranges), tuple(lengths.items()), servers)

    def share(self, length: int, server: int) -> slice:
        """A server's range of a vector of some length."""
        size = -(-length // self.servers)
        return slice(min(length, server * size), min(length, (server + 1) * size))

    def vectors(self, device: torch.device | str = "cpu") -> list[torch.Tensor]:
        """Empty vectors for all elements."""
        return [torch.empty(n, dtype=dtype, device=device) for dtype, n in self.lengths]

    def shares(self, vectors: Sequence[torch.Tensor], server: int) -> list[torch.Tensor]:
        """The parts of whole vectors that one server holds."""
        return [v[self.share(v.numel(), server)] for v in vectors]

    def of_dtype(self, vectors: Sequence[torch.Tensor], r: FlatRange) -> torch.Tensor:
        """A parameter's elements of whole vectors."""
        which = [dtype for dtype, _ in self.lengths].index(r.dtype)
        return vectors[which][r.start : r.stop]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return sum(n * dtype.itemsize for dtype, n in self.lengths)


@final
class ServerShard(Strategy):
    """A server's range of every vector; its pieces are views of it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._servers, self._index = dist.get_world_size(group), dist.get_rank(group)
        self.group = group if self._servers > 1 else None
        self.layout: FlatLayout
        self.weights: list[torch.Tensor] = []
        """This server's part of each vector: what workers read."""
        self._model: nn.Module
        self._pieces: list[tuple[Piece, int, int]] = []
        """Each piece, with its vector and its first element there."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = model
        self.layout = layout = FlatLayout.of(model, self._servers)
        self.weights = [torch.empty_like(t) for t in layout.shares(layout.vectors(), self._index)]
        parameters = dict(model.named_parameters())
        which = {dtype: i for i, (dtype, _) in enumerate(layout.lengths)}
        for r in layout.ranges:
            i, p = which[r.dtype], parameters[r.name]
            own = layout.share(layout.lengths[i][1], self._index)
            start, stop = max(r.start, own.start), min(r.stop, own.stop)
            if start < stop or (start == stop and self._servers == 1):
                view = self.weights[i][start - own.start : stop - own.start]
                view.copy_(p.detach().reshape(-1)[start - r.start : stop - r.start])
                self._pieces.append((self._piece(r, p, start, view), i, start - own.start))
            if self._servers > 1:  # only the shape is needed any more
                _replace_parameter(model, r.name, nn.Parameter(torch.empty(r.shape, dtype=r.dtype, device="meta")))
        return model

    def _piece(self, r: FlatRange, p: nn.Parameter, start: int, view: torch.Tensor) -> Piece:
        if self._servers == 1:
            p.data = view.view(r.shape)
            return Piece(r.name, r.shape, 0, p, replicated=True)
        return Piece(r.name, r.shape, start - r.start, nn.Parameter(view))

    def pieces(self) -> list[Piece]:
        own = {piece.name: piece for piece, _, _ in self._pieces}
        frozen = {n: p for n, p in self._model.named_parameters() if not p.requires_grad}
        names = [name for name, _ in self._model.named_parameters()]
        known = own | {n: Piece(n, tuple(p.shape), 0, p, replicated=True) for n, p in frozen.items()}
        return [known[name] for name in names if name in known]

    def link(self) -> None:
        """Point the parameters to the vectors again, after those have moved; for one server."""
        for piece, i, start in self._pieces:
            piece.value.data = self.weights[i][start : start + piece.value.numel()].view(piece.value.shape)

    def set_gradients(self, vectors: Sequence[torch.Tensor], unreached: frozenset[str]) -> None:
        """Give the pieces their gradients, as views of this server's part of each vector."""
        for piece, i, start in self._pieces:
            part = vectors[i][start : start + piece.value.numel()].view(piece.value.shape)
            piece.value.grad = None if piece.name in unreached else part

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        raise AssertionError("a parameter server runs no batches")

    def gather_gradients(self) -> None:
        """Nothing to do: `set_gradients` gives them."""

    def after_update(self) -> None:
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for piece, _, _ in self._pieces:
            piece.value.grad = None


def _replace_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put another parameter in the place of one, under all of its names."""
    old = model.get_parameter(name)
    for module in model.modules():
        for key, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if value is old:
                setattr(module, key, parameter)


def unreached_names(ranges: Sequence[FlatRange], numbers: Iterator[Sequence[int]]) -> frozenset[str]:
    """Parameters that no gradient of an update has reached, from the numbers of those that each has not."""
    missing = [set(n) for n in numbers]
    return frozenset(ranges[i].name for i in set.intersection(*missing)) if missing else frozenset()
