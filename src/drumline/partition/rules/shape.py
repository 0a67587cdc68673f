"""Operators that rearrange: the split follows its dim, through views also into segments of a dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...torchkit.operators import unsafe_view
from ..sharding import redistribution
from ..sharding.halo_exchange import window
from ..sharding.layout import (
    Bounds,
    ShardedValue,
    Split,
    all_on_first,
    all_on_last,
    merge_segments,
    reshape_split,
    values_in,
)
from ..sharding_pass import ShardingPass, rule
from .pointwise import _common, align

aten = torch.ops.aten


def _norm(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def _local(shape: Sequence[int], split: Split, index: int) -> list[int]:
    local = list(shape)
    local[split.dim] = split.length(index)
    return local


@rule(
    aten.view.default,
    aten.reshape.default,
    unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def view(ctx: ShardingPass, node: Node, x: ShardedValue, *_: Any, **__: Any) -> Any:
    """View as the local shape of the result, if one of its dims carries the split."""
    if not isinstance(x, ShardedValue) or x.layout is None:
        return NotImplemented
    shape = node.meta["val"].shape
    split = _unsqueezed(node, x, shape) or reshape_split(x.split, x.whole, shape)
    if split is None:
        return NotImplemented
    return ctx.value(ctx.call(aten.reshape.default, x, _local(shape, split, ctx.axis.index)), split)


def _unsqueezed(node: Node, x: ShardedValue, shape: torch.Size) -> Split | None:
    """Where dims of size 1 are added, the dim is known without counting."""
    if node.target is aten.unsqueeze.default:
        new = _norm(int(node.args[1]), len(shape))  # type: ignore[arg-type]
        return x.split.along(x.split.dim + (new <= x.split.dim))
    return None


@rule(aten.transpose.int)
def transpose(ctx: ShardingPass, node: Node, x: ShardedValue, a: int, b: int) -> Any:
    """Swap the dims a and b."""
    a, b = _norm(a, x.dim), _norm(b, x.dim)
    dim = {a: b, b: a}.get(x.split.dim, x.split.dim)
    return ctx.value(ctx.call(node.target, x, a, b), x.split.along(dim))


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def transpose_last(ctx: ShardingPass, node: Node, x: ShardedValue) -> Any:
    """Swap the last two dims."""
    if x.dim < 2:
        return ctx.value(ctx.call(node.target, x), x.layout)
    if x.dim != 2 and node.target is aten.numpy_T.default:
        return NotImplemented
    dim = {x.dim - 1: x.dim - 2, x.dim - 2: x.dim - 1}.get(x.split.dim, x.split.dim)
    return ctx.value(ctx.call(node.target, x), x.split.along(dim))


@rule(aten.permute.default)
def permute(ctx: ShardingPass, node: Node, x: ShardedValue, dims: Sequence[int]) -> Any:
    """Reorder the dims."""
    order = [_norm(d, x.dim) for d in dims]
    return ctx.value(ctx.call(node.target, x, order), x.split.along(order.index(x.split.dim)))


@rule(aten.movedim.int, aten.movedim.intlist)
def movedim(ctx: ShardingPass, node: Node, x: ShardedValue, source: Any, destination: Any) -> Any:
    """Move some dims."""
    marks = torch.empty([1 + i for i in range(x.dim)], device="meta").movedim(source, destination)
    return ctx.value(
        ctx.call(node.target, x, source, destination), x.split.along(list(marks.shape).index(1 + x.split.dim))
    )


@rule(aten.expand.default, aten.broadcast_to.default)
def expand(ctx: ShardingPass, node: Node, x: ShardedValue, *_: Any, **__: Any) -> Any:
    """Repeat along dims of size 1; new dims come first."""
    shape = node.meta["val"].shape
    split = x.split.along(x.split.dim + len(shape) - x.dim)
    return ctx.value(ctx.call(node.target, x, _local(shape, split, ctx.axis.index)), split)


@rule(aten.expand_as.default)
def expand_as(ctx: ShardingPass, node: Node, x: ShardedValue, other: ShardedValue) -> Any:
    """As `expand`, to the shape of another tensor."""
    shape = node.meta["val"].shape
    split = other.split if x.layout is None else x.split.along(x.split.dim + len(shape) - x.dim)
    x = align(ctx, x, split, shape)
    return ctx.value(ctx.call(aten.expand.default, x, _local(shape, split, ctx.axis.index)), split)


@rule(aten.broadcast_tensors.default)
def broadcast_tensors(ctx: ShardingPass, node: Node, tensors: Sequence[ShardedValue]) -> Any:
    """All to one shape, split alike."""
    shape = node.meta["val"][0].shape
    split = _common(values_in(tensors), shape)
    local = _local(shape, split, ctx.axis.index)
    return [
        ShardedValue(ctx.call(aten.expand.default, align(ctx, v, split, shape), local), split, shape) for v in tensors
    ]


@rule(aten.repeat.default)
def repeat(ctx: ShardingPass, node: Node, x: ShardedValue, times: Sequence[int]) -> Any:
    """Copy along a dim; copies of the split dim become segments."""
    ahead = len(times) - x.dim
    if times[ahead + x.split.dim] != 1:
        return ctx.value(
            ctx.call(node.target, x, list(times)), Split(ahead + x.split.dim, x.split.cuts * times[ahead + x.split.dim])
        )
    return ctx.value(ctx.call(node.target, x, list(times)), x.split.along(ahead + x.split.dim))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(
    ctx: ShardingPass, node: Node, x: ShardedValue, times: int, dim: int | None = None, **_: Any
) -> Any:
    """Repeat every index: the bounds grow along the split dim."""
    if dim is None:
        return NotImplemented
    dim, split = _norm(dim, x.dim), x.split
    if dim == split.dim:
        split = Split(dim, tuple(tuple(b * times for b in bounds) for bounds in split.cuts))
    return ctx.value(ctx.call(node.target, x, times, dim), split)


@rule(aten.select.int)
def select(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int, index: int) -> Any:
    """Select one index; of the split dim, its owner shares it."""
    dim = _norm(dim, x.dim)
    if dim == x.split.dim:
        if x.fake.dtype is torch.bool:
            return NotImplemented  # booleans cannot be summed
        result = ctx.call(select_own_index, x, dim, _place(x.split, _norm(index, x.split.size), ctx.axis.index))
        return ctx.value(ctx.call(redistribution.reduce_partial, result, ctx.axis), None)
    return ctx.value(ctx.call(node.target, x, dim, index), x.split.along(x.split.dim - (dim < x.split.dim)))


def select_own_index(x: torch.Tensor, dim: int, place: int | None) -> torch.Tensor:
    """The selected index if this rank has it, else zeros."""
    if place is None:
        return x.narrow(dim, 0, 0).sum(
            dim, dtype=x.dtype
        )  # a sum over nothing: zeros with the same backward as on other ranks
    return x.select(dim, place)


def _place(split: Split, index: int, rank: int) -> int | None:
    """Local position of an index of the whole dim, or None."""
    at = 0
    for run in split.ranges(rank):
        if index in run:
            return at + index - run.start
        at += len(run)
    return None


@rule(aten.unbind.int)
def unbind(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int = 0) -> Any:
    """All indices of a dim that is not split."""
    dim = _norm(dim, x.dim)
    if dim == x.split.dim:
        return NotImplemented
    result = ctx.call(node.target, x, dim)
    split = x.split.along(x.split.dim - (dim < x.split.dim))
    return _items(ctx, result, node, lambda _: split)


@rule(
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections
)
def split(ctx: ShardingPass, node: Node, x: ShardedValue, _: Any, dim: int = 0) -> Any:
    """Along another dim unchanged; along the split dim where each piece is a run of segments."""
    dim = _norm(dim, x.dim)
    if dim != x.split.dim:
        result = ctx.call(node.target, x, node.args[1], dim)
        return _items(ctx, result, node, lambda _: x.split)
    sizes = [v.shape[dim] for v in node.meta["val"]]
    groups = _grouped(x.split, sizes)
    if groups is None:
        return NotImplemented
    lengths = [g.length(ctx.axis.index) for g in groups]
    result = ctx.call(aten.split_with_sizes.default, x, lengths, dim)
    return _items(ctx, result, node, lambda i: groups[i])


def _items(ctx: ShardingPass, result: Node, node: Node, split_of: Any) -> list[ShardedValue]:
    wholes = node.meta["val"]
    return [
        ShardedValue(ctx.call(operator.getitem, result, i), split_of(i), wholes[i].shape) for i in range(len(wholes))
    ]


def _grouped(whole: Split, sizes: Sequence[int]) -> list[Split] | None:
    """Group segments into runs of the given sizes."""
    rest, groups = list(whole.cuts), []
    for size in sizes:
        run: list[Bounds] = []
        while rest and sum(b[-1] for b in run) < size:
            run.append(rest.pop(0))
        if not run or sum(b[-1] for b in run) != size:
            return None
        groups.append(Split(whole.dim, tuple(run)))
    return groups if not rest else None


@rule(aten.slice.Tensor, aten.narrow.default)
def slice_(
    ctx: ShardingPass,
    node: Node,
    x: ShardedValue,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Along another dim unchanged; along the split dim a run of segments, or rows that move to new owners."""
    dim = _norm(dim, x.dim)
    if dim != x.split.dim:
        return ctx.value(ctx.call(node.target, x, *_rest(node, dim)), x.layout)
    if step != 1:
        return NotImplemented
    size = x.whole[dim]
    first = 0 if start is None else max(0, _norm(start, size))
    length = int(node.meta["val"].shape[dim])
    if length == 0:
        return NotImplemented
    if (first, length) == (0, size):
        return x
    ends = [first, length, size - first - length]
    groups = _grouped(x.split, [n for n in ends if n])
    if groups is not None:
        chosen = groups[1 if first else 0]
        offset = groups[0].length(ctx.axis.index) if first else 0
        return ctx.value(ctx.call(aten.narrow.default, x, dim, offset, chosen.length(ctx.axis.index)), chosen)
    return _shifted(ctx, x, dim, first, length)


def _rest(node: Node, dim: int) -> list[Any]:
    return [dim, *node.args[2:]]


def _shifted(ctx: ShardingPass, x: ShardedValue, dim: int, first: int, length: int) -> Any:
    """x[:, 1:] of split tokens: a rank keeps its number of rows, and gets missing ones from its neighbours."""
    if len(x.split.cuts) > 1 or length == 0:
        return NotImplemented
    bounds = (*(min(b, length) for b in x.split.bounds[:-1]), length)
    wanted = tuple((bounds[r] + first, bounds[r + 1] + first) for r in range(ctx.axis.size))
    return ctx.value(ctx.call(window, x, dim, x.split.bounds, wanted, ctx.axis), Split(dim, (bounds,)))


@rule(aten.cat.default)
def cat(ctx: ShardingPass, node: Node, tensors: Sequence[ShardedValue], dim: int = 0) -> Any:
    """Along another dim: all split alike. Along the split dim: their segments, concatenated."""
    parts = [v for v in tensors if v.whole.numel() or v.dim > 1]
    dims = len(node.meta["val"].shape)
    dim = _norm(dim, dims)
    first = next(v for v in parts if v.layout is not None).split
    if first.dim != dim:
        return ctx.value(ctx.call(node.target, [ctx.split(v, first) for v in parts], dim), first)
    if any(v.layout is not None and v.layout.dim != dim for v in parts):
        return NotImplemented
    n = ctx.axis.size
    if parts[0].layout is None:  # a token before all others goes to the rank with the first of them
        parts[0] = ctx.split(parts[0], Split(dim, (all_on_first(parts[0].whole[dim], n),)))
    if parts[-1].layout is None:
        parts[-1] = ctx.split(parts[-1], Split(dim, (all_on_last(parts[-1].whole[dim], n),)))
    if any(v.layout is None for v in parts):
        return NotImplemented
    cuts = merge_segments(tuple(c for v in parts for c in v.split.cuts))
    return ctx.value(ctx.call(node.target, list(parts), dim), Split(dim, cuts))


@rule(aten.stack.default)
def stack(ctx: ShardingPass, node: Node, tensors: Sequence[ShardedValue], dim: int = 0) -> Any:
    """Along a new dim, all split alike."""
    dim = _norm(dim, len(node.meta["val"].shape))
    first = next(v for v in values_in(tensors) if v.layout is not None).split
    result = ctx.call(node.target, [ctx.split(v, first) for v in tensors], dim)
    return ctx.value(result, first.along(first.dim + (dim <= first.dim)))


@rule(aten.flip.default, aten.roll.default, aten.cumsum.default, aten.triu.default, aten.tril.default)
def along_others(ctx: ShardingPass, node: Node, x: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    """Along dims that are not split."""
    if node.target in (aten.triu.default, aten.tril.default):
        dims: Sequence[int] = (x.dim - 2, x.dim - 1)
    elif node.target is aten.roll.default:
        dims = [_norm(d, x.dim) for d in (args[1] if len(args) > 1 else ())]
        if not dims:
            return NotImplemented
    else:
        given = args[0]
        dims = [_norm(d, x.dim) for d in (given if isinstance(given, list | tuple) else [given])]
    if x.split.dim in dims:
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, *args, **kwargs), x.layout)
