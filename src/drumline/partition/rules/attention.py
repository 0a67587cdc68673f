"""Attention: by heads (also grouped) or samples each rank works alone; along the sequence, keys and values travel."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...torchkit.fake_tensors import FakeTensor
from ..sharding.layout import ShardedValue, Split
from ..sharding.ring_attention import ring_attention
from ..sharding_pass import ShardingPass, rule
from .common import per_rank_random

aten = torch.ops.aten


def own_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
    index: int,
) -> torch.Tensor:
    """Attention of this rank's heads or samples, with its own dropout."""
    run = aten.scaled_dot_product_attention.default
    if p == 0.0 or isinstance(q, FakeTensor):
        return run(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]  # torch's
    with per_rank_random(index, q.device):
        return run(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]  # torch's


@rule(aten.scaled_dot_product_attention.default)
def attention(
    ctx: ShardingPass,
    node: Node,
    q: ShardedValue,
    k: ShardedValue,
    v: ShardedValue,
    mask: ShardedValue | None = None,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """q, k, v: (samples, heads, tokens, width)."""
    if any(x.dim != q.dim for x in (k, v)) or q.dim < 3:
        return NotImplemented
    split = next((x.layout for x in (q, k, v) if x.layout is not None), None)
    if split is None:  # only the mask is split
        return NotImplemented
    if split.dim == q.dim - 2:
        return _sequence(ctx, node, q, k, v, mask, p, causal, scale, enable_gqa)
    if split.dim == q.dim - 1:
        return NotImplemented
    splits = _heads(q, k, split, enable_gqa)
    if splits is None:
        return NotImplemented
    q, k, v = (ctx.split(x, s) for x, s in zip((q, k, v), (splits[0], splits[1], splits[1]), strict=True))
    if mask is not None:
        dim = split.dim - (q.dim - mask.dim)
        wide = dim >= 0 and mask.whole[dim] > 1
        mask = ctx.split(mask, splits[0].along(dim)) if wide else ctx.whole(mask, enter=True)
    result = ctx.call(own_heads, q, k, v, mask, p, causal, scale, enable_gqa, ctx.axis.index)
    return ctx.value(result, splits[0])


def _heads(q: ShardedValue, k: ShardedValue, split: Split, grouped: bool) -> tuple[Split, Split] | None:
    """The splits of queries and keys; with grouped heads, a rank has the queries of its keys."""
    dim = split.dim
    many, few = q.whole[dim], k.whole[dim]
    if many == few:
        return split, split
    if not grouped or dim != q.dim - 3:
        return None
    times = many // few
    if q.layout is None:
        return Split(dim, tuple(tuple(b * times for b in bounds) for bounds in split.cuts)), split
    if any(b % times for bounds in split.cuts for b in bounds):
        return None
    return split, Split(dim, tuple(tuple(b // times for b in bounds) for bounds in split.cuts))


def _sequence(
    ctx: ShardingPass,
    node: Node,
    q: ShardedValue,
    k: ShardedValue,
    v: ShardedValue,
    mask: ShardedValue | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Any:
    """Each rank has some of the tokens: keys and values travel around the ring, or are gathered where it cannot be
    used."""
    dim = q.dim - 2
    for x in (q, k, v):
        if x.layout is not None and (x.layout.dim != dim or len(x.layout.cuts) > 1):
            return NotImplemented
    if p:
        return NotImplemented  # a dropout mask over all keys would have to be drawn as one
    if q.layout is None or (k.layout is None) != (v.layout is None):
        return NotImplemented
    if mask is not None:
        rows = mask.dim - 2
        mask = ctx.split(mask, q.split.along(rows)) if mask.whole[rows] > 1 else ctx.whole(mask, enter=True)
    if k.layout is None:  # every rank has all keys
        if causal:
            return NotImplemented
        result = ctx.call(own_heads, q, ctx.enter(k), ctx.enter(v), mask, p, causal, scale, grouped, ctx.axis.index)
        return ctx.value(result, q.layout)
    result = ctx.call(
        ring_attention,
        q,
        k,
        v,
        mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
        q_bounds=q.split.bounds,
        bounds=k.split.bounds,
        axis=ctx.axis,
    )
    return ctx.value(result, q.layout)
