"""Attention of some queries to some keys, and its gradients: the unit that ring attention is made of.

A block gives its output and the logarithm of the sum of its exponentials, so that blocks can be added up later. The
backward takes that logarithm over ALL keys, and then gives the block's summand of every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

SCORES = 1 << 24
"""The most scores that are held at once where torch has no kernel that holds none: 64 MiB in float32."""

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class View:
    """What the queries of a block see of its keys, and how."""

    scale: float
    bias: Tensor | None = None
    """Added to the scores: [..., rows or 1, columns or 1]."""
    offset: int | None = None
    """Row i sees the columns up to i + offset; None: all of them."""
    dropout: float = 0.0
    seed: int = 0
    """Of the dropout's mask: the backward draws the same one again instead of keeping it."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """A block's summands of the gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores and sums are kept."""
    return dtype if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """The logarithm by which a row is divided: a row that sees nothing has -inf, and its exponentials are all 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Output [..., rows, d] and the log of the sum of exponentials [..., rows], in the exact type."""
    kind = exact(q.dtype)
    if _has_kernel(q, k, v, view):
        out, lse = _forward_cpu(_four(q), _four(k), _four(v), 0.0, view.offset == 0, scale=view.scale)
        return out.to(kind).reshape(*q.shape[:-1], v.shape[-1]), lse.to(kind).reshape(q.shape[:-1])
    outs, lses = [], []
    draw = _drawing(q, view)
    k, v = k.to(kind), v.to(kind)
    for rows in _chunks(q, k):
        scores = _scores(q[..., rows, :], k, view, rows)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - finite(lse).unsqueeze(-1))
        if draw is not None:
            p *= _kept(p, view.dropout, draw)
        outs.append(p @ v)
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -1)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: View
) -> Gradients:
    """The block's summands, where `out` and `lse` are those of the whole softmax, over all blocks."""
    kind = exact(q.dtype)
    if _has_kernel(q, k, v, view):
        # The kernel knows lse in the type that it gave it in.
        found = _backward_cpu(
            _four(gradient),
            _four(q),
            _four(k),
            _four(v),
            _four(out),
            lse.reshape(_four(q).shape[:-1]),
            0.0,
            view.offset == 0,
            scale=view.scale,
        )
        dq, dk, dv = (g.to(kind).reshape(t.shape) for g, t in zip(found, (q, k, v), strict=True))
        return Gradients(dq, dk, dv, None)
    gradient, k, v = gradient.to(kind), k.to(kind), v.to(kind)
    delta = (gradient * out.to(kind)).sum(-1, keepdim=True)
    draw = _drawing(q, view)
    dq, dbias = [], []
    dk = dv = torch.zeros((), dtype=kind, device=q.device)
    for rows in _chunks(q, k):
        some, dy = q[..., rows, :], gradient[..., rows, :]
        p = torch.exp(_scores(some, k, view, rows) - finite(lse[..., rows]).unsqueeze(-1))
        dp = dy @ v.mT
        if draw is not None:
            kept = _kept(p, view.dropout, draw)
            dp *= kept
            dv = dv + (p * kept).mT @ dy
        else:
            dv = dv + p.mT @ dy
        ds = p * (dp - delta[..., rows, :])
        dq.append(ds @ k * view.scale)
        dk = dk + ds.mT @ some.to(kind) * view.scale
        if view.bias is not None:
            dbias.append(ds.sum_to_size(_rows(view.bias, rows).shape))
    return Gradients(torch.cat(dq, -2), dk, dv, _joined(view.bias, dbias))


def _joined(bias: Tensor | None, parts: list[Tensor]) -> Tensor | None:
    """The bias's gradient from those of the chunks of rows: side by side, or added where one row serves all."""
    if bias is None:
        return None
    return torch.cat(parts, -2) if bias.shape[-2] > 1 else torch.stack(parts).sum(0)


def _scores(q: Tensor, k: Tensor, view: View, rows: slice) -> Tensor:
    scores = (q.to(k.dtype) * view.scale) @ k.mT
    if view.bias is not None:
        scores = scores + _rows(view.bias, rows)
    if view.offset is not None:
        row = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        column = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(column > row + view.offset, -torch.inf)
    return scores


def _rows(bias: Tensor, rows: slice) -> Tensor:
    return bias if bias.shape[-2] == 1 else bias[..., rows, :]


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Runs of rows whose scores may be held at once."""
    n = q.shape[-2]
    step = max(1, SCORES // max(1, prod(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])) * k.shape[-2]))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def _drawing(q: Tensor, view: View) -> torch.Generator | None:
    return torch.Generator(q.device).manual_seed(view.seed) if view.dropout else None


def _kept(p: Tensor, dropout: float, draw: torch.Generator) -> Tensor:
    """0 where a probability is dropped, else the factor that keeps the mean."""
    kept = torch.rand(p.shape, generator=draw, device=p.device, dtype=p.dtype) >= dropout
    return kept / (1.0 - dropout)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, view: View) -> bool:
    """Whether torch's kernel that never holds the scores does this block."""
    return (
        q.device.type == "cpu"
        and view.bias is None
        and view.offset in (None, 0)
        and not view.dropout
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1] == v.shape[-1]
    )


def _four(x: Tensor) -> Tensor:
    """The same as [batch, heads, rows, d], which is what the kernel takes."""
    return x.reshape(prod(x.shape[:-3]), *(x.shape[-3:] if x.dim() > 2 else (1, *x.shape)))
