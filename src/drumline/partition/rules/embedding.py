"""Tables and indexing: split by rows (each rank looks up its own, results are reduced), by columns, or by indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..sharding.layout import ShardedValue, Split
from ..sharding_pass import ShardingPass, rule
from .pointwise import align

aten = torch.ops.aten


def lookup_own_rows(
    weight: torch.Tensor, ids: torch.Tensor, start: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """Look up rows of this rank's part of a table: zeros where another rank has the row."""
    here = (ids >= start) & (ids < start + weight.shape[0])
    local = torch.where(here, ids - start, 0)
    inside = padding - start if start <= padding < start + weight.shape[0] else -1
    rows = aten.embedding.default(weight, local, inside, by_frequency)
    return torch.where(here.unsqueeze(-1), rows, 0)


@rule(aten.embedding.default)
def embedding(
    ctx: ShardingPass,
    node: Node,
    w: ShardedValue,
    ids: ShardedValue,
    padding: int = -1,
    by_frequency: bool = False,
    sparse: bool = False,
) -> Any:
    """One row per id."""
    if sparse:
        return NotImplemented
    if w.layout is None:
        result = ctx.call(node.target, ctx.enter(w), ids, padding, by_frequency)
        return ctx.value(result, ids.layout)
    ids = ctx.whole(ids)
    if w.layout.dim == 1:
        result = ctx.call(node.target, w, ids, padding, by_frequency)
        return ctx.value(result, w.split.along(ids.dim))
    if len(w.split.cuts) > 1:
        return NotImplemented
    result = ctx.call(lookup_own_rows, w, ids, w.split.bounds[ctx.axis.index], padding, by_frequency)
    return ctx.reduce_partial(result, node.meta["val"].shape)


@rule(aten.gather.default)
def gather(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int, ids: ShardedValue, **_: Any) -> Any:
    """Along a dim that is not split, the others split alike."""
    dim = dim + x.dim if dim < 0 else dim
    split = x.layout or ids.layout
    assert split is not None
    if split.dim == dim or x.whole[split.dim] != ids.whole[split.dim]:
        return NotImplemented
    return ctx.value(ctx.call(node.target, ctx.split(x, split), dim, ctx.split(ids, split)), split)


@rule(aten.scatter.src, aten.scatter_add.default)
def scatter(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int, ids: ShardedValue, source: ShardedValue) -> Any:
    """As `gather`: along a dim that is not split, the others split alike."""
    split = next(v for v in (x, ids, source) if v.layout is not None).split
    if split.dim == dim % x.dim or len({v.whole[split.dim] for v in (x, ids, source)}) > 1:
        return NotImplemented
    return ctx.value(
        ctx.call(node.target, ctx.split(x, split), dim, ctx.split(ids, split), ctx.split(source, split)), split
    )


@rule(aten.one_hot.default)
def one_hot(ctx: ShardingPass, node: Node, ids: ShardedValue, classes: int = -1) -> Any:
    """A new last dim."""
    return ctx.value(ctx.call(node.target, ids, classes), ids.layout)


@rule(aten.index.Tensor)
def index(ctx: ShardingPass, node: Node, x: ShardedValue, ids: Sequence[ShardedValue | None]) -> Any:
    """x[:, i, j]: split along a dim that is not indexed, or by the indices of a whole tensor."""
    indexed = [d for d, v in enumerate(ids) if v is not None]
    indices = [v for v in ids if v is not None]
    wide = max(v.dim for v in indices)
    together = indexed[-1] - indexed[0] == len(indexed) - 1
    front = indexed[0] if together else 0  # position of the index dims in the result
    if x.layout is not None:
        if x.split.dim in indexed:
            return NotImplemented
        dim = x.split.dim - sum(d < x.split.dim for d in indexed)
        result = ctx.call(node.target, x, [None if v is None else ctx.whole(v) for v in ids])
        return ctx.value(result, x.split.along(dim + (wide if dim >= front else 0)))
    split = next(v for v in indices if v.layout is not None).split
    shape = torch.broadcast_shapes(*(v.whole for v in indices))
    first = next(v for v in indices if v.layout is not None)
    want = split.along(split.dim + wide - first.dim)
    placed = [None if v is None else align(ctx, v, want, shape) for v in ids]
    return ctx.value(ctx.call(node.target, ctx.enter(x), placed), want.along(want.dim + front))


@rule(aten.index_select.default)
def index_select(ctx: ShardingPass, node: Node, x: ShardedValue, dim: int, ids: ShardedValue) -> Any:
    """Rows of a dim that is not split."""
    dim = dim + x.dim if dim < 0 else dim
    if x.layout is None:
        return ctx.value(ctx.call(node.target, ctx.enter(x), dim, ids), Split(dim, ids.split.cuts))
    if x.split.dim == dim:
        return NotImplemented
    return ctx.value(ctx.call(node.target, x, dim, ctx.whole(ids)), x.layout)
