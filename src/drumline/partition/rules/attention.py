"""Attention: by heads (also grouped ones) or samples ranks work alone; along the sequence keys and values travel."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from ..layout import Split
from ..random import forked
from ..ring import ring_attention
from ..spread import Pass, rule
from ..values import Value

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
    """Attention of this rank's heads or samples; its dropout is its own."""
    run = aten.scaled_dot_product_attention.default
    if p == 0.0 or isinstance(q, FakeTensor):
        return run(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]  # torch's
    with forked(index, q.device):
        return run(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)  # type: ignore[no-any-return]  # torch's


@rule(aten.scaled_dot_product_attention.default)
def attention(
    at: Pass,
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
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
    if split is None:  # only the mask is
        return NotImplemented
    if split.dim == q.dim - 2:
        return _sequence(at, node, q, k, v, mask, p, causal, scale, enable_gqa)
    if split.dim == q.dim - 1:
        return NotImplemented
    places = _heads(q, k, split, enable_gqa)
    if places is None:
        return NotImplemented
    q, k, v = (at.split(x, s) for x, s in zip((q, k, v), (places[0], places[1], places[1]), strict=True))
    if mask is not None:
        dim = split.dim - (q.dim - mask.dim)
        wide = dim >= 0 and mask.whole[dim] > 1
        mask = at.split(mask, places[0].at(dim)) if wide else at.whole(mask, enter=True)
    made = at.call(own_heads, q, k, v, mask, p, causal, scale, enable_gqa, at.axis.index)
    return at.value(made, places[0])


def _heads(q: Value, k: Value, split: Split, grouped: bool) -> tuple[Split, Split] | None:
    """The splits of queries and of keys: with grouped heads, a rank has the queries of its keys."""
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
    at: Pass,
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    p: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Any:
    """Each rank has some of the tokens: keys and values go round, or are gathered where the ring cannot serve."""
    dim = q.dim - 2
    for x in (q, k, v):
        if x.layout is not None and (x.layout.dim != dim or len(x.layout.cuts) > 1):
            return NotImplemented
    if p:
        return NotImplemented  # a mask of dropout over all keys would have to be drawn as one
    if q.layout is None or (k.layout is None) != (v.layout is None):
        return NotImplemented
    if mask is not None:
        rows = mask.dim - 2
        mask = at.split(mask, q.split.at(rows)) if mask.whole[rows] > 1 else at.whole(mask, enter=True)
    if k.layout is None:  # everybody has all keys
        if causal:
            return NotImplemented
        made = at.call(own_heads, q, at.enter(k), at.enter(v), mask, p, causal, scale, grouped, at.axis.index)
        return at.value(made, q.layout)
    made = at.call(
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
        axis=at.axis,
    )
    return at.value(made, q.layout)
