"""Flat buckets of parameters: each is one buffer, cut into equal shards over the ranks that share it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...plans.engine_constants import FIRST_BUCKET_BYTES
from ..state.pieces import Piece

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, eq=False)
class GradientGroups:
    """The other ranks that have the same parameters."""

    shard: dist.ProcessGroup | None
    """Those over which one copy of what is sharded lies; None: this rank alone."""
    replica: dist.ProcessGroup | None
    """Those that have this very shard in other copies; None: there is no other copy."""

    @property
    def shards(self) -> int:
        """Into how many shards a bucket is cut."""
        return dist.get_world_size(self.shard) if self.shard is not None else 1

    @property
    def index(self) -> int:
        """Which of them is this rank's."""
        return dist.get_rank(self.shard) if self.shard is not None else 0

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All that a gradient is summed over."""
        return [g for g in (self.shard, self.replica) if g is not None]


class Bucket:
    """Parameters that travel together."""

    def __init__(self, parameters: list[Named], reach: GradientGroups) -> None:
        self.reach, shards, index = reach, reach.shards, reach.index
        numbers = sum(p.numel() for _, p in parameters)
        like = parameters[0][1]
        self.size = -(-numbers // shards)
        """Numbers of one shard; the last one is padded."""
        self.flat = torch.zeros(self.size * shards, dtype=like.dtype, device=like.device)
        self.own = slice(index * self.size, (index + 1) * self.size)
        self.places: dict[nn.Parameter, slice] = {}
        self.names = {p: name for name, p in parameters}
        self.buffer: torch.Tensor | None = None
        """The whole gradients, while they are here."""
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        """Each parameter's part of it."""
        self.reduced: torch.Tensor | None = None
        """The gradients of this rank's shard, summed over the shard group."""
        self.arrived: set[nn.Parameter] = set()
        """Whose gradients of this micro-batch have come."""
        self.seen: set[nn.Parameter] = set()
        """Whose gradients have come in any micro-batch of the step."""
        offset = 0
        for _, p in parameters:
            place = slice(offset, offset + p.numel())
            view = self.flat[place].view(p.shape)
            view.copy_(p.detach())
            p.data = view
            self.places[p] = place
            offset += p.numel()

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """The parameters' runs that lie in this rank's shard, and where in it."""
        for p, place in self.places.items():
            start, stop = max(place.start, self.own.start), min(place.stop, self.own.stop)
            if start < stop:
                piece = Piece(self.names[p], tuple(p.shape), start - place.start, nn.Parameter(self.flat[start:stop]))
                yield piece, slice(start - self.own.start, stop - self.own.start)

    def take(self, p: nn.Parameter, *, keep: bool) -> None:
        """A gradient has come: put it into the buffer. `keep`: later micro-batches add to it there, in place."""
        assert p.grad is not None
        self._room()
        view = self._views[p]
        if p.grad is not view:
            view.copy_(p.grad)
        p.grad = view if keep else None
        self.arrived.add(p)
        self.seen.add(p)

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this micro-batch are there."""
        return len(self.arrived) == len(self.places)

    def complete(self, came: set[nn.Parameter]) -> torch.Tensor:
        """The buffer, with zeros where nothing came."""
        buffer = self._room()
        for p, place in self.places.items():
            if p not in came:
                buffer[place] = 0
        buffer[max(place.stop for place in self.places.values()) :] = 0
        return buffer

    def release(self) -> None:
        """The buffer lives as long as its flight."""
        self.buffer, self._views = None, {}

    def _room(self) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(self.flat)
            self._views = {p: self.buffer[place].view(p.shape) for p, place in self.places.items()}
        return self.buffer


def in_buckets(model: nn.Module, largest: int, apart: Collection[str]) -> list[list[Named]]:
    """The trained parameters from the last to the first, in runs of one type and about `largest` bytes.

    Those whose names are `apart` have runs of their own. A rank may have others of these than the next rank; where the
    runs of the rest begin and end does not depend on them, and neither does the order of the rest.
    """
    passed = 0
    kinds: dict[bool, list[tuple[int, Named]]] = {False: [], True: []}
    for name, p in reversed(list(model.named_parameters())):
        if p.requires_grad:
            own = name in apart
            passed += not own
            kinds[own].append((passed, (name, p)))
    found = [
        (run[-1][0], own, [named for _, named in run]) for own, given in kinds.items() for run in _runs(given, largest)
    ]
    return [run for _, _, run in sorted(found, key=lambda item: item[:2])]


def _runs(parameters: list[tuple[int, Named]], largest: int) -> Iterator[list[tuple[int, Named]]]:
    run: list[tuple[int, Named]] = []
    filled, limit = 0, min(FIRST_BUCKET_BYTES, largest)
    for item in parameters:
        p = item[1][1]
        size = p.numel() * p.element_size()
        if run and (filled + size > limit or p.dtype != run[0][1][1].dtype):
            yield run
            run, filled, limit = [], 0, largest
        run.append(item)
        filled += size
    if run:
        yield run
