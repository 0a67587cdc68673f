"""Flat buckets of parameters: one buffer each, cut into equal shards over the ranks that share it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...plans.engine_constants import FIRST_BUCKET_BYTES
from ..state.pieces import Piece
from .gradient_collectives import BackendCollectives, GradientCollectives

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, eq=False)
class GradientGroups:
    """The ranks over which a gradient is summed."""

    shard: dist.ProcessGroup | None
    """The ranks over which one copy is sharded; None: this rank alone."""
    replica: dist.ProcessGroup | None
    """The ranks that have the same shard of other copies; None: there is one copy."""
    shard_schedules: GradientCollectives | None = None
    """The collectives that carry gradients over the shard group; None: the backend's own."""
    replica_schedules: GradientCollectives | None = None
    """The same over the replicas."""

    @property
    def over_shards(self) -> GradientCollectives:
        """The collectives of the shard group."""
        return self.shard_schedules or BackendCollectives(self.shard)

    @property
    def over_replicas(self) -> GradientCollectives:
        """The collectives of the replicas."""
        return self.replica_schedules or BackendCollectives(self.replica)

    @property
    def shards(self) -> int:
        """Number of shards of a bucket."""
        return dist.get_world_size(self.shard) if self.shard is not None else 1

    @property
    def index(self) -> int:
        """The index of this rank's shard."""
        return dist.get_rank(self.shard) if self.shard is not None else 0

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Both groups, where they exist."""
        return [g for g in (self.shard, self.replica) if g is not None]


class Bucket:
    """Parameters whose gradients are sent together."""

    def __init__(self, parameters: list[Named], groups: GradientGroups) -> None:
        self.groups, shards, index = groups, groups.shards, groups.index
        elements = sum(p.numel() for _, p in parameters)
        like = parameters[0][1]
        self.size = -(-elements // shards)
        """Elements of one shard; the last one is padded."""
        self.flat = torch.zeros(self.size * shards, dtype=like.dtype, device=like.device)
        self.own = slice(index * self.size, (index + 1) * self.size)
        self.ranges: dict[nn.Parameter, slice] = {}
        self.names = {p: name for name, p in parameters}
        self.title = parameters[0][0]
        """Name of its first parameter, which identifies its messages among those of other buckets."""
        self.buffer: torch.Tensor | None = None
        """The whole gradients, while they are in memory."""
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        """Each parameter's view of the buffer."""
        self.reduced: torch.Tensor | None = None
        """The gradients of this rank's shard, summed over the shard group."""
        self.arrived: set[nn.Parameter] = set()
        """Parameters with a gradient in this micro-batch."""
        self.reached: set[nn.Parameter] = set()
        """Parameters with a gradient in any micro-batch of the step."""
        offset = 0
        for _, p in parameters:
            span = slice(offset, offset + p.numel())
            self.flat[span].view(p.shape).copy_(p.detach())
            self.ranges[p] = span
            offset += p.numel()
        self.show(self.flat)

    def show(self, flat: torch.Tensor) -> None:
        """Let the parameters be views of this memory."""
        for p, span in self.ranges.items():
            p.data = flat[span].view(p.shape)

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """The parameters' ranges in this rank's shard, and their places in it."""
        for p, span in self.ranges.items():
            start, stop = max(span.start, self.own.start), min(span.stop, self.own.stop)
            if start < stop:
                piece = Piece(self.names[p], tuple(p.shape), start - span.start, nn.Parameter(self.flat[start:stop]))
                yield piece, slice(start - self.own.start, stop - self.own.start)

    def take(self, p: nn.Parameter, *, keep: bool) -> None:
        """Put a new gradient into the buffer. `keep`: later micro-batches add to it there, in place."""
        assert p.grad is not None
        self._allocated()
        view = self._views[p]
        if p.grad is not view:
            view.copy_(p.grad)
        p.grad = view if keep else None
        self.arrived.add(p)
        self.reached.add(p)

    @property
    def is_full(self) -> bool:
        """Whether all gradients of this micro-batch have arrived."""
        return len(self.arrived) == len(self.ranges)

    def complete(self, arrived: set[nn.Parameter]) -> torch.Tensor:
        """The buffer, with zeros for parameters that are not in `arrived`."""
        buffer = self._allocated()
        for p, span in self.ranges.items():
            if p not in arrived:
                buffer[span] = 0
        buffer[max(span.stop for span in self.ranges.values()) :] = 0
        return buffer

    def release(self) -> None:
        """Drop the buffer; the message in flight keeps it alive."""
        self.buffer, self._views = None, {}

    def _allocated(self) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(self.flat)
            self._views = {p: self.buffer[span].view(p.shape) for p, span in self.ranges.items()}
        return self.buffer


def in_buckets(model: nn.Module, largest: int, separate: Collection[str]) -> list[list[Named]]:
    """The trained parameters from the last to the first, in runs of one type and about `largest` bytes.

    Those named in `separate` have runs of their own. Ranks may have different ones of these, so the runs and the order
    of the rest do not depend on them.
    """
    passed = 0
    kinds: dict[bool, list[tuple[int, Named]]] = {False: [], True: []}
    for name, p in reversed(list(model.named_parameters())):
        if p.requires_grad:
            own = name in separate
            passed += not own
            kinds[own].append((passed, (name, p)))
    runs = [
        (run[-1][0], own, [named for _, named in run]) for own, given in kinds.items() for run in _runs(given, largest)
    ]
    return [run for _, _, run in sorted(runs, key=lambda item: item[:2])]


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
