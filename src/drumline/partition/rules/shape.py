"""Operators that only rearrange: the split goes along with its dim, through views also into segments of a dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import moves
from ..layout import Bounds, Split, first_of, last_of, merged, reshaped
from ..spread import Pass, rule
from ..values import Value, values_in
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
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def view(at: Pass, node: Node, x: Value, *_: Any, **__: Any) -> Any:
    """To the local shape of the result, if one of its dims carries the split."""
    if not isinstance(x, Value) or x.layout is None:
        return NotImplemented
    shape = node.meta["val"].shape
    split = _unsqueezed(node, x, shape) or reshaped(x.split, x.whole, shape)
    if split is None:
        return NotImplemented
    return at.value(at.call(aten.reshape.default, x, _local(shape, split, at.axis.index)), split)


def _unsqueezed(node: Node, x: Value, shape: torch.Size) -> Split | None:
    """Where dims of one element come or go, the dim is known without counting."""
    if node.target is aten.unsqueeze.default:
        new = _norm(int(node.args[1]), len(shape))  # type: ignore[arg-type]
        return x.split.at(x.split.dim + (new <= x.split.dim))
    return None


@rule(aten.transpose.int)
def transpose(at: Pass, node: Node, x: Value, a: int, b: int) -> Any:
    """The dims a and b change places."""
    a, b = _norm(a, x.dim), _norm(b, x.dim)
    dim = {a: b, b: a}.get(x.split.dim, x.split.dim)
    return at.value(at.call(node.target, x, a, b), x.split.at(dim))


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def turned(at: Pass, node: Node, x: Value) -> Any:
    """The last two dims change places."""
    if x.dim < 2:
        return at.value(at.call(node.target, x), x.layout)
    if x.dim != 2 and node.target is aten.numpy_T.default:
        return NotImplemented
    dim = {x.dim - 1: x.dim - 2, x.dim - 2: x.dim - 1}.get(x.split.dim, x.split.dim)
    return at.value(at.call(node.target, x), x.split.at(dim))


@rule(aten.permute.default)
def permute(at: Pass, node: Node, x: Value, dims: Sequence[int]) -> Any:
    """Dims in another order."""
    order = [_norm(d, x.dim) for d in dims]
    return at.value(at.call(node.target, x, order), x.split.at(order.index(x.split.dim)))


@rule(aten.movedim.int, aten.movedim.intlist)
def movedim(at: Pass, node: Node, x: Value, source: Any, destination: Any) -> Any:
    """Some dims go elsewhere."""
    marks = torch.empty([1 + i for i in range(x.dim)], device="meta").movedim(source, destination)
    return at.value(at.call(node.target, x, source, destination), x.split.at(list(marks.shape).index(1 + x.split.dim)))


@rule(aten.expand.default, aten.broadcast_to.default)
def expand(at: Pass, node: Node, x: Value, *_: Any, **__: Any) -> Any:
    """Repeat along dims of one element; new dims come first."""
    shape = node.meta["val"].shape
    split = x.split.at(x.split.dim + len(shape) - x.dim)
    return at.value(at.call(node.target, x, _local(shape, split, at.axis.index)), split)


@rule(aten.expand_as.default)
def expand_as(at: Pass, node: Node, x: Value, other: Value) -> Any:
    """As `expand`, to the shape of another."""
    shape = node.meta["val"].shape
    split = other.split if x.layout is None else x.split.at(x.split.dim + len(shape) - x.dim)
    x = align(at, x, split, shape)
    return at.value(at.call(aten.expand.default, x, _local(shape, split, at.axis.index)), split)


@rule(aten.broadcast_tensors.default)
def broadcast_tensors(at: Pass, node: Node, tensors: Sequence[Value]) -> Any:
    """All to one shape, cut alike."""
    shape = node.meta["val"][0].shape
    split = _common(values_in(tensors), shape)
    local = _local(shape, split, at.axis.index)
    return [Value(at.call(aten.expand.default, align(at, v, split, shape), local), split, shape) for v in tensors]


@rule(aten.repeat.default)
def repeat(at: Pass, node: Node, x: Value, times: Sequence[int]) -> Any:
    """Copies along dims that are not split."""
    ahead = len(times) - x.dim
    if times[ahead + x.split.dim] != 1:
        return at.value(
            at.call(node.target, x, list(times)), Split(ahead + x.split.dim, x.split.cuts * times[ahead + x.split.dim])
        )
    return at.value(at.call(node.target, x, list(times)), x.split.at(ahead + x.split.dim))


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(at: Pass, node: Node, x: Value, times: int, dim: int | None = None, **_: Any) -> Any:
    """Every index several times: the bounds grow along the split dim."""
    if dim is None:
        return NotImplemented
    dim, split = _norm(dim, x.dim), x.split
    if dim == split.dim:
        split = Split(dim, tuple(tuple(b * times for b in bounds) for bounds in split.cuts))
    return at.value(at.call(node.target, x, times, dim), split)


@rule(aten.select.int)
def select(at: Pass, node: Node, x: Value, dim: int, index: int) -> Any:
    """One index: of the split dim, its owner gives it to all."""
    dim = _norm(dim, x.dim)
    if dim == x.split.dim:
        if x.fake.dtype is torch.bool:
            return NotImplemented  # it cannot be added up
        made = at.call(own_index, x, dim, _place(x.split, _norm(index, x.split.size), at.axis.index))
        return at.value(at.call(moves.reduce, made, at.axis), None)
    return at.value(at.call(node.target, x, dim, index), x.split.at(x.split.dim - (dim < x.split.dim)))


def own_index(x: torch.Tensor, dim: int, place: int | None) -> torch.Tensor:
    """The index that this rank has, or its summand, zeros."""
    if place is None:
        return x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)  # of nothing: zeros that have a way back as everybody's
    return x.select(dim, place)


def _place(split: Split, index: int, rank: int) -> int | None:
    """Where a rank has an index of the whole dim."""
    at = 0
    for run in split.ranges(rank):
        if index in run:
            return at + index - run.start
        at += len(run)
    return None


@rule(aten.unbind.int)
def unbind(at: Pass, node: Node, x: Value, dim: int = 0) -> Any:
    """All indices of a dim that is not split."""
    dim = _norm(dim, x.dim)
    if dim == x.split.dim:
        return NotImplemented
    made = at.call(node.target, x, dim)
    split = x.split.at(x.split.dim - (dim < x.split.dim))
    return _items(at, made, node, lambda _: split)


@rule(
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections
)
def split(at: Pass, node: Node, x: Value, _: Any, dim: int = 0) -> Any:
    """Along another dim as it is; along the split dim where each piece is a run of segments."""
    dim = _norm(dim, x.dim)
    if dim != x.split.dim:
        made = at.call(node.target, x, node.args[1], dim)
        return _items(at, made, node, lambda _: x.split)
    sizes = [v.shape[dim] for v in node.meta["val"]]
    groups = _grouped(x.split, sizes)
    if groups is None:
        return NotImplemented
    lengths = [g.length(at.axis.index) for g in groups]
    made = at.call(aten.split_with_sizes.default, x, lengths, dim)
    return _items(at, made, node, lambda i: groups[i])


def _items(at: Pass, made: Node, node: Node, split_of: Any) -> list[Value]:
    wholes = node.meta["val"]
    return [Value(at.call(operator.getitem, made, i), split_of(i), wholes[i].shape) for i in range(len(wholes))]


def _grouped(whole: Split, sizes: Sequence[int]) -> list[Split] | None:
    """Segments in runs of the given sizes."""
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
    at: Pass, node: Node, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Along another dim as it is; along the split dim a run of segments, or rows that move to their new owners."""
    dim = _norm(dim, x.dim)
    if dim != x.split.dim:
        return at.value(at.call(node.target, x, *_rest(node, dim)), x.layout)
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
        offset = groups[0].length(at.axis.index) if first else 0
        return at.value(at.call(aten.narrow.default, x, dim, offset, chosen.length(at.axis.index)), chosen)
    return _shifted(at, x, dim, first, length)


def _rest(node: Node, dim: int) -> list[Any]:
    return [dim, *node.args[2:]]


def _shifted(at: Pass, x: Value, dim: int, first: int, length: int) -> Any:
    """x[:, 1:] of split tokens: a rank keeps its number of rows, and gets those that it lacks from its neighbours."""
    from ..window import window

    if len(x.split.cuts) > 1 or length == 0:
        return NotImplemented
    bounds = (*(min(b, length) for b in x.split.bounds[:-1]), length)
    wanted = tuple((bounds[r] + first, bounds[r + 1] + first) for r in range(at.axis.size))
    return at.value(at.call(window, x, dim, x.split.bounds, wanted, at.axis), Split(dim, (bounds,)))


@rule(aten.cat.default)
def cat(at: Pass, node: Node, tensors: Sequence[Value], dim: int = 0) -> Any:
    """Along another dim: all cut alike. Along the split dim: their segments one behind the other."""
    parts = [v for v in tensors if v.whole.numel() or v.dim > 1]
    dims = len(node.meta["val"].shape)
    dim = _norm(dim, dims)
    first = next(v for v in parts if v.layout is not None).split
    if first.dim != dim:
        return at.value(at.call(node.target, [at.split(v, first) for v in parts], dim), first)
    if any(v.layout is not None and v.layout.dim != dim for v in parts):
        return NotImplemented
    n = at.axis.size
    if parts[0].layout is None:  # a token before all others goes to who has the first of them
        parts[0] = at.split(parts[0], Split(dim, (first_of(parts[0].whole[dim], n),)))
    if parts[-1].layout is None:
        parts[-1] = at.split(parts[-1], Split(dim, (last_of(parts[-1].whole[dim], n),)))
    if any(v.layout is None for v in parts):
        return NotImplemented
    cuts = merged(tuple(c for v in parts for c in v.split.cuts))
    return at.value(at.call(node.target, list(parts), dim), Split(dim, cuts))


@rule(aten.stack.default)
def stack(at: Pass, node: Node, tensors: Sequence[Value], dim: int = 0) -> Any:
    """Along a new dim, all cut alike."""
    dim = _norm(dim, len(node.meta["val"].shape))
    first = next(v for v in values_in(tensors) if v.layout is not None).split
    made = at.call(node.target, [at.split(v, first) for v in tensors], dim)
    return at.value(made, first.at(first.dim + (dim <= first.dim)))


@rule(aten.flip.default, aten.roll.default, aten.cumsum.default, aten.triu.default, aten.tril.default)
def along_others(at: Pass, node: Node, x: Value, *args: Any, **kwargs: Any) -> Any:
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
    return at.value(at.call(node.target, x, *args, **kwargs), x.layout)
