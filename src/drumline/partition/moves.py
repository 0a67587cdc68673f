"""Between layouts: what a rank sends so that a tensor lies as an operator wants it, and the gradients lie as they must.

Everyone has the whole gradient of a whole tensor, and of a split tensor its own part. So `gather` has `take` as its
backward and the other way round; `reduce` (of summands) passes the gradient on; `enter` gives a whole tensor to work
that is split, whose gradients are summands, and so adds them up in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..comm.scatter import reduce_scatter
from ..tracing.running import only_shapes
from .layout import Split

_gather_parts: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer releases of torch have a new name for it."""


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks of one mesh axis, as this rank sees them."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None = None
    """None while nothing runs: shapes can be computed without a group."""
    watch: Callable[[str, str, torch.Tensor], AbstractContextManager[None]] | None = None
    """(axis, message, tensor) -> around every message, for those who record."""
    halo: bool = True
    """Whether windows bring rows of others. Without, what lies beyond this rank's own is filled: that is not exact."""

    @property
    def with_halo(self) -> Axis:
        """The same, for what cannot do without the rows of others."""
        return self if self.halo else replace(self, halo=True)

    def told(self, message: str, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Around a message. Tensors without values go through the same functions, and nothing is sent for them."""
        if self.watch is None or only_shapes(tensor):
            return nullcontext()
        return self.watch(self.name, message, tensor)


def part_of(x: torch.Tensor, split: Split, index: int) -> torch.Tensor:
    """This rank's part of a whole tensor, as a view where it is one run."""
    runs = [x.narrow(split.dim, run.start, len(run)) for run in split.ranges(index)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, split.dim)


def gather(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Split -> whole; its gradient is cut again."""
    return _Gather.apply(x, split, axis, False)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def gather_to_enter(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Split -> whole for work that is split: the summands of its gradient are added up and scattered."""
    return _Gather.apply(x, split, axis, True)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def take(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Whole -> split; its gradient is gathered."""
    return _Take.apply(x, split, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Summands -> whole."""
    return _Reduce.apply(x, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def scatter(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Summands -> split; its gradient is gathered."""
    return _Scatter.apply(x, split, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Whole -> whole, for work that is split: the summands of its gradient are added up."""
    return _Enter.apply(x, axis)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: Split, axis: Axis, summands: bool) -> torch.Tensor:
        ctx.split, ctx.axis, ctx.summands = split, axis, summands
        return gathered(x, split, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.summands:
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


# -- the messages


def _idle(x: torch.Tensor, axis: Axis) -> bool:
    """Whether only shapes are wanted."""
    return only_shapes(x) or axis.size == 1


def _summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    if _idle(x, axis):
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    with axis.told("all_reduce", total):
        dist.all_reduce(total, group=axis.group)
    return total


def gathered(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """Without gradients: all parts, put where they belong. Uneven parts are padded to the longest on the way."""
    shape = list(x.shape)
    shape[split.dim] = split.size
    if _idle(x, axis):
        return x.new_empty(shape) if axis.size > 1 else x.clone()
    longest = max(split.length(r) for r in range(axis.size))
    mine = x.movedim(split.dim, 0).contiguous()
    if mine.shape[0] < longest:
        mine = torch.cat([mine, mine.new_zeros(longest - mine.shape[0], *mine.shape[1:])])
    parts = mine.new_empty(axis.size * longest, *mine.shape[1:])
    with axis.told("all_gather", parts):
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
    """Dim 0 goes to its place: in memory too, because who takes a view of it, or writes into it, expects that."""
    return x.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else x


def _scattered(x: torch.Tensor, split: Split, axis: Axis) -> torch.Tensor:
    """The sum over the ranks, of which each keeps its part."""
    if _idle(x, axis):
        return part_of(x, split, axis.index).clone()
    lengths = {split.length(r) for r in range(axis.size)}
    if len(lengths) > 1:
        return part_of(_summed(x, axis), split, axis.index).contiguous()
    if len(split.cuts) > 1:  # the parts of a rank are brought together
        x = torch.cat([part_of(x, split, r) for r in range(axis.size)], split.dim)
    parts = x.movedim(split.dim, 0).contiguous()
    mine = parts.new_empty(lengths.pop(), *parts.shape[1:])
    with axis.told("reduce_scatter", parts):
        reduce_scatter(mine, parts, group=axis.group)
    return _with_dim(mine, split.dim)
