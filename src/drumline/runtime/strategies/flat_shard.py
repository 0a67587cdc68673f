"""ZeRO-1 and ZeRO-2, as flat shards: every rank has the whole parameters, and updates an equal part of them.

The trained parameters are in buckets, in the order in which the backward reaches them. A bucket is one flat buffer, cut
into as many equal shards as the shard group has ranks, whatever the sizes of its parameters; the model's parameters are
views of it. Once the backward has filled a bucket's gradients, they are reduce-scattered while it continues; the
optimizer updates this rank's shard; then the shards are gathered into the buffers again. `allreduce` names the
algorithm of these collectives (gradient_collectives.py).

`zero=1` keeps the whole gradients over the micro-batches of a step, and sends them once, with the last. `zero=2` sends
those of every micro-batch and keeps its shard only: gradients take 1/n of the memory, and are sent `micro` times. With
`shard` < `dp`, the shards' gradients are then summed over the replicas of the shard group.

Plans that split the model itself use it too, with `zero=0` as one shard: `split` is the group over which one copy of
the model is spread. Experts (`ep`) have fewer replicas than the rest, so their gradients have buckets of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...comm.tensor_identity import naming_calls
from ...plans import Plan
from ...plans.engine_constants import REDUCE_BUCKETS_IN_FLIGHT
from ...torchkit.fake_tensors import agreed_numbers
from ..numerics.recurrent import keep_in_place
from ..state.pieces import Piece
from .buckets import Bucket, GradientGroups, in_buckets
from .gradient_collectives import GradientCollectives
from .strategy import Strategy


class FlatShard(Strategy):
    """Whole parameters on every rank, equal flat shards of optimizer state and, with `zero=2`, of gradients."""

    counts_unreached = True

    def __init__(
        self,
        plan: Plan,
        shard: dist.ProcessGroup | None,
        replica: dist.ProcessGroup | None,
        *,
        split: dist.ProcessGroup | None = None,
        schedules: tuple[GradientCollectives | None, GradientCollectives | None] = (None, None),
    ) -> None:
        self.group = split or shard
        self._groups = self._separate_groups = GradientGroups(shard, replica, *schedules)
        self._separate: frozenset[str] = frozenset()
        self._splits = split is not None
        self.keeps_gradients = self._keeps_whole = plan.zero <= 1
        self._bytes = plan.bucket
        self._model: nn.Module
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._pieces: list[tuple[Piece, Bucket, slice]] = []
        self._in_flight: list[tuple[Bucket, torch.Tensor, torch.Tensor, Any]] = []
        """In flight: a bucket, its whole gradients, the tensor for this rank's shard, the work to wait for."""
        self._launched = 0
        self._sends = False

    def sum_separately(self, names: Collection[str], groups: GradientGroups) -> None:
        """Before `wrap`: sum the gradients of these parameters over other groups than those of the rest."""
        self._separate, self._separate_groups = frozenset(names), groups

    def _groups_of(self, name: str) -> GradientGroups:
        return self._separate_groups if name in self._separate else self._groups

    def wrap(self, model: nn.Module) -> nn.Module:
        self._model = model
        for parameters in in_buckets(model, self._bytes, self._separate):
            bucket = Bucket(parameters, self._groups_of(parameters[0][0]))
            self._buckets.append(bucket)
            for _, p in parameters:
                self._bucket_of[p] = bucket
                p.register_post_accumulate_grad_hook(_gradient_hook(weakref.ref(self)))
        self._pieces = [(piece, b, span) for b in self._buckets for piece, span in b.pieces()]
        keep_in_place(model)
        return model

    def pieces(self) -> list[Piece]:
        order = {name: i for i, (name, _) in enumerate(self._model.named_parameters())}
        frozen = [
            Piece(
                name,
                tuple(p.shape),
                0,
                p,
                replicated=not self._splits,
                owned=not self._splits or self._groups_of(name).index == 0,
            )
            for name, p in self._model.named_parameters()
            if not p.requires_grad
        ]
        return sorted([*(piece for piece, _, _ in self._pieces), *frozen], key=lambda piece: order[piece.name])

    # -- the backward

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self._sends = last or not self._keeps_whole
        self._launched = 0
        for bucket in self._buckets:
            bucket.arrived.clear()
        yield
        if self._sends:
            self._launch(len(self._buckets))
        if not last:
            self._land(0)

    def send_gradients(self) -> None:
        """Send the gradients of the step, all of which have been computed."""
        self._sends, self._launched = True, 0
        self._launch(len(self._buckets))

    def _add_gradient(self, p: torch.Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        self._bucket_of[p].take(p, keep=self._keeps_whole)
        if self._sends:
            full = self._launched
            while full < len(self._buckets) and self._buckets[full].is_full:
                full += 1
            self._launch(full)

    def _launch(self, until: int) -> None:
        """Send the buckets up to `until`: always in their order, which is the same on every rank."""
        for bucket in self._buckets[self._launched : until]:
            if not self._keeps_whole:
                self._land(REDUCE_BUCKETS_IN_FLIGHT - 1)
            buffer = bucket.complete(bucket.reached if self._keeps_whole else bucket.arrived)
            mine, work = buffer[bucket.own], None
            if bucket.groups.shards > 1:
                if not self._keeps_whole:
                    mine = torch.empty_like(mine)  # it outlives the buffer
                over = bucket.groups.over_shards
                with naming_calls(bucket.title):
                    work = over.reduce_scatter(mine, buffer)
                work = self.follow("reduce_scatter", work, buffer, unreported=over.scheduled)
            self._in_flight.append((bucket, buffer, mine, work))
            if not self._keeps_whole:
                bucket.release()
        self._launched = max(self._launched, until)

    def _land(self, left: int) -> None:
        """Wait until at most `left` buckets are in flight."""
        while len(self._in_flight) > left:
            bucket, _, mine, work = self._in_flight.pop(0)
            if work is not None:
                work.wait()
            if self._keeps_whole or bucket.reduced is None:
                bucket.reduced = mine
            else:
                bucket.reduced += mine

    # -- the update

    def unreached(self) -> int:
        return sum(len(b.ranges) - len(b.reached) for b in self._buckets)

    def gather_gradients(self) -> None:
        self._land(0)
        works = []
        for b in self._buckets:
            if b.groups.replica is not None:
                assert b.reduced is not None
                over = b.groups.over_replicas
                with naming_calls(b.title):
                    work = over.all_reduce(b.reduced)
                works.append(self.follow("all_reduce", work, b.reduced, unreported=over.scheduled))
        for work in works:
            work.wait()
        for piece, bucket, span in self._pieces:
            assert bucket.reduced is not None
            piece.value.grad = bucket.reduced[span]

    def drop_unreached(self) -> None:
        """One device would not update them; with a gradient of zero, weight decay would."""
        missed: set[str] = set()
        for groups in (self._groups, self._separate_groups) if self._separate else (self._groups,):
            parameters = [(p, b) for b in self._buckets if b.groups is groups for p in b.ranges]
            if not parameters:
                continue
            device = parameters[0][1].flat.device
            own = [p in b.reached for p, b in parameters]
            reached = torch.tensor(own, dtype=torch.int32, device=device)
            for group in groups.groups:
                dist.all_reduce(reached, dist.ReduceOp.MAX, group=group)
            agreed = agreed_numbers(reached, own)
            missed |= {b.names[p] for (p, b), was_reached in zip(parameters, agreed, strict=True) if not was_reached}
        for piece, _, _ in self._pieces:
            if piece.name in missed:
                piece.value.grad = None

    @torch.no_grad()
    def after_update(self) -> None:
        self.drop_gradients()
        works = []
        for b in self._buckets:
            if b.groups.shards > 1:
                over = b.groups.over_shards
                with naming_calls(b.title):
                    work = over.all_gather(b.flat, b.flat[b.own])
                works.append(self.follow("all_gather", work, b.flat, unreported=over.scheduled))
        for work in works:
            work.wait()

    def gradient_buffers(self) -> list[torch.Tensor]:
        return [b.buffer for b in self._buckets if b.buffer is not None]

    # -- batches in flight: several versions of weights and gradients

    def weights(self) -> list[torch.Tensor]:
        """The memory of the trained parameters, by bucket."""
        return [b.flat for b in self._buckets]

    def show_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Let the model's parameters be views of this memory; the optimizer's stay where they are."""
        for bucket, flat in zip(self._buckets, weights, strict=True):
            bucket.show(flat)

    def move_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Let the model's and the optimizer's parameters be views of this memory."""
        self.show_weights(weights)
        for bucket, flat in zip(self._buckets, weights, strict=True):
            bucket.flat = flat
        for piece, bucket, span in self._pieces:
            piece.value.data = bucket.flat[bucket.own][span]

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The gradients that `gather_gradients` has set, by piece; the next batch begins with none."""
        taken = [piece.value.grad for piece, _, _ in self._pieces]
        self.drop_gradients()
        self._sends, self._launched = False, 0
        for bucket in self._buckets:
            bucket.arrived.clear()
            bucket.release()
        return taken

    def trained_pieces(self) -> list[Piece]:
        """The pieces that `take_gradients` lists."""
        return [piece for piece, _, _ in self._pieces]

    def put_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give the pieces gradients that were taken; those of the next batch are accumulated meanwhile."""
        for (piece, _, _), gradient in zip(self._pieces, gradients, strict=True):
            piece.value.grad = gradient

    def drop_gradients(self) -> None:
        for piece, _, _ in self._pieces:
            piece.value.grad = None
        for bucket in self._buckets:
            bucket.reduced = None
            bucket.reached.clear()
            for p in bucket.ranges:
                p.grad = None


def _gradient_hook(strategy: weakref.ref[FlatShard]) -> Callable[[torch.Tensor], None]:
    """A parameter's hook. It does not keep the strategy alive: the garbage collector cannot see torch's hooks."""

    def hook(p: torch.Tensor) -> None:
        owner = strategy()
        if owner is not None:
            owner._add_gradient(p)

    return hook
