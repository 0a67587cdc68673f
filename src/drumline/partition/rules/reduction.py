"""Sums, means and what runs along a dim: local where the dim is not split, added up where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import moves
from ..layout import Split
from ..spread import Pass, rule
from ..values import Value

aten = torch.ops.aten


def _dims(dim: Any, dims: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(dims))
    return [d + dims if d < 0 else d for d in (dim if isinstance(dim, list | tuple) else [dim])]


def kept(split: Split, dims: Sequence[int], keepdim: bool) -> Split:
    """The split after other dims were reduced."""
    return split if keepdim else split.at(split.dim - sum(d < split.dim for d in dims))


@rule(aten.sum.dim_IntList, aten.mean.dim)
def over_dims(at: Pass, node: Node, x: Value, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over some dims."""
    dims = _dims(dim, x.dim)
    more = {} if dtype is None else {"dtype": dtype}
    if x.split.dim not in dims:
        return at.value(at.call(node.target, x, dims, keepdim, **more), kept(x.split, dims, keepdim))
    total = at.call(moves.reduce, at.call(aten.sum.dim_IntList, x, dims, keepdim, **more), at.axis)
    if node.target is aten.mean.dim:
        count = 1
        for d in dims:
            count *= x.whole[d]
        total = at.call(aten.div.Tensor, total, count)
    return at.value(total, None)


@rule(aten.sum.default, aten.mean.default)
def over_all(at: Pass, node: Node, x: Value, *, dtype: Any = None) -> Any:
    """Over everything."""
    more = {} if dtype is None else {"dtype": dtype}
    total = at.call(moves.reduce, at.call(aten.sum.default, x, **more), at.axis)
    if node.target is aten.mean.default:
        total = at.call(aten.div.Tensor, total, x.whole.numel())
    return at.value(total, None)


@rule(
    aten.softmax.int,
    aten.log_softmax.int,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.var.correction,
    aten.std.correction,
    aten.any.dim,
    aten.all.dim,
    aten.prod.dim_int,
    aten.var.dim,
    aten.std.dim,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
)
def along(at: Pass, node: Node, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Along dims that are not split."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names[1:], args, strict=False)) | kwargs
    if given.get("dim") is None:
        return NotImplemented
    dims = _dims(given["dim"], x.dim)
    if x.split.dim in dims:
        return NotImplemented
    same = node.meta["val"].dim() == x.dim
    return at.value(at.call(node.target, x, *args, **kwargs), kept(x.split, dims, same))


@rule(aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default)
def with_places(at: Pass, node: Node, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Values and places along a dim that is not split."""
    import operator

    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names[1:], args, strict=False)) | kwargs
    dims = _dims(given.get("dim", -1), x.dim)
    if x.split.dim in dims:
        return NotImplemented
    made = at.call(node.target, x, *args, **kwargs)
    shapes = [v.shape for v in node.meta["val"]]
    split = kept(x.split, dims, len(shapes[0]) == x.dim)
    return [Value(at.call(operator.getitem, made, i), split, s) for i, s in enumerate(shapes)]
