"""Gossip (`sync=gossip`, `gossip:random`): after each step of its own, a replica averages with its neighbours alone.

    gossip          two neighbours on a ring of all ranks: w <- (w + left + right) / 3; of two ranks: (w + other) / 2
    gossip:random   one partner of a random matching, drawn for every step: w <- (w + partner) / 2

Weights and changing buffers are exchanged, optimizer states are not (D-PSGD). A rank waits for its neighbours, not for
all ranks; differences between replicas spread and shrink around the ring. Every `EVERY` steps all ranks meet, to
exchange losses and requests to stop. A checkpoint and the end of a training make all replicas the average of all.
"""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist

from ...comm import gloo_fallbacks
from ...schedules import random_partner, ring_neighbours
from ..state.pieces import bundles
from .independent import IndependentReplica
from .replica_tensors import joined, separate

EVERY = 10
"""Steps between two meetings of all ranks."""


@final
class Gossip(IndependentReplica):
    """A replica that averages with neighbours: on a ring, or with a `seed`, those of random matchings."""

    def __init__(self, group: dist.ProcessGroup, *, seed: int | None) -> None:
        super().__init__(group)
        self._seed = seed
        self._agreed = False
        """Whether all ranks have agreed on what they exchange; again at every meeting."""

    def meets(self, step: int) -> bool:
        return step % EVERY == 0

    def _exchange(self, step: int) -> None:
        if not self._agreed or self.meets(step):
            self._tensors.agree(self._group, self._device, self._message_in(self._group), states=False)
            self._agreed = True
        neighbours = self.neighbours(step)
        if neighbours:
            self._mix(neighbours)

    def neighbours(self, step: int) -> tuple[int, ...]:
        """The ranks with which this one averages after a step."""
        if self._seed is None:
            return ring_neighbours(self._rank, self._ranks)
        partner = random_partner(self._rank, self._ranks, seed=self._seed, step=step)
        return () if partner is None else (partner,)

    @torch.no_grad()
    def _mix(self, neighbours: tuple[int, ...]) -> None:
        """Replace the weights by the mean of this rank's and its neighbours'."""
        for run in bundles(t for t in self._tensors.weights() if t.numel()):
            own = joined(run)
            received = [torch.empty_like(own) for _ in neighbours]
            # no tags: each pair of ranks exchanges its messages in the same order
            batch = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
                for peer, buffer in zip(neighbours, received, strict=True)
                for operation, tensor in ((dist.irecv, buffer), (dist.isend, own))
            ]
            with self._direct_message("gossip", own):
                for work in gloo_fallbacks.batch_isend_irecv(batch):
                    work.wait()
            for other in received:
                own.add_(other)
            separate(own.div_(1 + len(neighbours)), run)
