"""Redistribution between layouts: the messages that give an operator the layout it needs, and their gradients.

A whole tensor has its whole gradient on every rank, a split tensor its own part. So `gather` and `take_part` are each
other's backward. `reduce_partial` passes the gradient on. `enter_split_work` gives a whole tensor to split work, whose
gradients are partial sums, and so adds them up in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...comm.gloo_fallbacks import reduce_scatter
from ...torchkit.fake_tensors import is_shape_only
from .layout import Split

_gather_parts: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch have a new name for it."""


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks of one mesh axis, from this rank's view."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None = None
    """None while nothing runs: shapes need no group."""
    observer: Callable[[str, str, torch.Tensor], AbstractContextManager[None]] | None = None
    """(axis, message, tensor) -> a context around every message, for recording."""
    halo: bool = True
    """Whether windows fetch rows of other ranks. If not, rows beyond this rank's own are filled, which is not exact."""

    @property
    def with_halo(self) -> Axis:
        """The same axis with halos, for operators that need them."""
        return self if self.halo else replace(self, halo=True)

    def observe(self, message: str, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """A context around a message. Nothing is sent, or recorded, for tensors that serve for their shape alone."""
        if self.observer is None or is_shape_only(tensor):
            return nullcontext()
        return self.observer(self.name, message, tensor)


def part_of(x: torch.Tensor, split: Split, index: int) -> torch.Tensor:
    """A rank's part of a whole tensor; a view if it is one range."""
    runs = [x.narrow(split.dim, run.start, len(run)) for run in split.ranges(index)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, split.dim)


def gather(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Split -> whole; the gradient is split again."""
    return _Gather.apply(x, split, axis, False)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def gather_into_split_work(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Split -> whole for split work: the partial gradients are reduced and scattered."""
    return _Gather.apply(x, split, axis, True)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def take_part(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Whole -> split; the gradient is gathered."""
    return _Take.apply(x, split, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def reduce_partial(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Partial sums -> whole."""
    return _Reduce.apply(x, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def reduce_scatter_partial(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Partial sums -> split; the gradient is gathered."""
    return _Scatter.apply(x, split, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def enter_split_work(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Whole -> whole, for split work: the partial gradients are reduced."""
    return _Enter.apply(x, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, axis: Axis, partial: bool) -> torch.Tensor:
        ctx.split, ctx.axis, ctx.partial = split, axis, partial
        return gathered(x, split, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.partial:
            return _scattered(gradient, ctx.split, ctx.axis), None, None, None
        return part_of(gradient, ctx.split, ctx.axis.index).contiguous(), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
        ctx.split, ctx.axis = split, axis
        return part_of(x, split, axis.index).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gathered(gradient, ctx.split, ctx.axis), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _summed(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
        ctx.split, ctx.axis = split, axis
        return _scattered(x, split, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gathered(gradient, ctx.split, ctx.axis), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.axis), None


# -- messages


def _sends_nothing(x: torch.Tensor, axis: Axis) -> bool:
    """Whether no message is needed."""
    return is_shape_only(x) or axis.size == 1


def _summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    if _sends_nothing(x, axis):
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    with axis.observe("all_reduce", total):
        dist.all_reduce(total, group=axis.group)
    return total


def gathered(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Gather all parts, without gradients. Uneven parts are padded to the longest for the message."""
    shape = list(x.shape)
    shape[split.dim] = split.size
    if _sends_nothing(x, axis):
        return x.new_empty(shape) if axis.size > 1 else x.clone()
    longest = max(split.length(r) for r in range(axis.size))
    mine = x.movedim(split.dim, 0).contiguous()
    if mine.shape[0] < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.shape[0], *mine.shape[1:])])
    parts = mine.new_empty(axis.size * longest, *mine.shape[1:])
    with axis.observe("all_gather", parts):
        _gather_parts(parts, mine, group=axis.group)
    if len(split.cuts) == 1 and all(split.length(r) == longest for r in range(axis.size)):
        return _with_dim(parts, split.dim)
    whole = mine.new_empty(split.size, *mine.shape[1:])
    for r in range(axis.size):
        at = r * longest
        for run in split.ranges(r):
            whole[run.start : run.stop] = parts[at : at + len(run)]
            at += len(run)
    return _with_dim(whole, split.dim)


def _with_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Move dim 0 to its position, in memory too: views of it and writes into it expect that."""
    return x.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else x


def _scattered(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Reduce over the ranks; each keeps its part of the sum."""
    if _sends_nothing(x, axis):
        return part_of(x, split, axis.index).clone()
    lengths = {split.length(r) for r in range(axis.size)}
    if len(lengths) > 1:
        return part_of(_summed(x, axis), split, axis.index).contiguous()
    if len(split.cuts) > 1:  # make each rank's parts contiguous
        x = torch.cat([part_of(x, split, r) for r in range(axis.size)], split.dim)
    parts = x.movedim(split.dim, 0).contiguous()
    mine = parts.new_empty(lengths.pop(), *parts.shape[1:])
    with axis.observe("reduce_scatter", parts):
        reduce_scatter(mine, parts, group=axis.group)
    return _with_dim(mine, split.dim)
