"""Averaged weights: after each update, average = decay * average + (1 - decay) * weights, element by element.

Each rank averages the pieces that it updates, so the average is sharded as the optimizer's state is, and needs no
message. Replicas that step by themselves average their own; the mean over the ranks is then the average of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .pieces import Piece, bundles


class WeightAverage:
    """The exponential moving average of a rank's pieces, in float32 at least. It begins at the initial weights."""

    def __init__(self, pieces: Sequence[Piece], decay: float) -> None:
        self._pieces, self._decay = tuple(pieces), decay
        self._values = {id(p.value): _copy(p) for p in self._pieces}

    def has(self, piece: Piece) -> bool:
        """Whether the piece is averaged: it is trained."""
        return id(piece.value) in self._values

    def of(self, piece: Piece) -> torch.Tensor:
        """The average of a piece."""
        return self._values[id(piece.value)]

    def tensors(self) -> list[torch.Tensor]:
        """All averages."""
        return list(self._values.values())

    @torch.no_grad()
    def follow(self) -> None:
        """The pieces were updated."""
        for piece in self._pieces:
            average = self.of(piece)
            average.lerp_(piece.value.detach().to(average.dtype), 1.0 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the pieces' values, which are those of a checkpoint or of pretrained weights."""
        for piece in self._pieces:
            self.of(piece).copy_(piece.value)

    @torch.no_grad()
    def over_ranks(self, group: dist.ProcessGroup) -> None:
        """Replace the averages of replicas by their mean, the same on every rank."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return
        for run in bundles(t for t in self._values.values() if t.numel()):
            flat = torch.cat([t.reshape(-1) for t in run])
            dist.all_reduce(flat, group=group)
            for t, mean in zip(run, flat.div_(ranks).split([t.numel() for t in run]), strict=True):
                t.copy_(mean.view(t.shape))

    @contextmanager
    def shown(self, changed: Callable[[], None]) -> Iterator[None]:
        """Put the averages into the place of the weights, and call `changed`; afterwards the same with the weights."""
        kept = [p.value.detach().clone() for p in self._pieces]
        with torch.no_grad():
            for p in self._pieces:
                p.value.copy_(self.of(p))
            changed()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._pieces, kept, strict=True):
                    p.value.copy_(value)
                changed()


def _copy(piece: Piece) -> torch.Tensor:
    value = piece.value.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
