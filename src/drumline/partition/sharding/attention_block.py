"""Attention of a block of queries to a block of keys, and its gradients: the unit of ring attention.

A block returns its output and the log of its sum of exponentials (lse), so that blocks can be combined. The backward
takes the lse over ALL keys and returns the block's share of every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...torchkit.operators import flash_attention_cpu, flash_attention_cpu_backward

MAX_SCORES = 1 << 24
"""The most scores in memory at once where torch has no kernel that avoids them: 64 MiB in float32."""

_forward_cpu = flash_attention_cpu
_backward_cpu = flash_attention_cpu_backward


@dataclass(frozen=True, slots=True)
class BlockView:
    """Mask, bias and dropout of a block."""

    scale: float
    bias: Tensor | None = None
    """Added to the scores: [..., rows or 1, columns or 1]."""
    offset: int | None = None
    """Row i attends to columns up to i + offset; None: to all."""
    dropout: float = 0.0
    seed: int = 0
    """Seed of the dropout mask: the backward draws it again instead of keeping it."""


@dataclass(frozen=True, slots=True)
class BlockGradients:
    """A block's shares of the gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and sums."""
    return dtype if dtype == torch.float64 else torch.float32


def finite_lse(lse: Tensor) -> Tensor:
    """The lse by which a row is divided; a row without keys has -inf, and its exponentials are all 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, block: BlockView) -> tuple[Tensor, Tensor]:
    """Output [..., rows, d] and lse [..., rows], in the accumulation type."""
    kind = accumulation_dtype(q.dtype)
    if _has_kernel(q, k, v, block):
        out, lse = _forward_cpu(_four(q), _four(k), _four(v), 0.0, block.offset == 0, scale=block.scale)
        return out.to(kind).reshape(*q.shape[:-1], v.shape[-1]), lse.to(kind).reshape(q.shape[:-1])
    outs, lses = [], []
    draw = _drawing(q, block)
    k, v = k.to(kind), v.to(kind)
    for rows in _chunks(q, k):
        scores = _scores(q[..., rows, :], k, block, rows)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - finite_lse(lse).unsqueeze(-1))
        if draw is not None:
            p *= _kept(p, block.dropout, draw)
        outs.append(p @ v)
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -1)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: BlockView
) -> BlockGradients:
    """The block's shares, where `out` and `lse` are those of the whole softmax, over all blocks."""
    kind = accumulation_dtype(q.dtype)
    if _has_kernel(q, k, v, block):
        # the kernel expects lse in the type that it returned
        gradients = _backward_cpu(
            _four(gradient),
            _four(q),
            _four(k),
            _four(v),
            _four(out),
            lse.reshape(_four(q).shape[:-1]),
            0.0,
            block.offset == 0,
            scale=block.scale,
        )
        dq, dk, dv = (g.to(kind).reshape(t.shape) for g, t in zip(gradients, (q, k, v), strict=True))
        return BlockGradients(dq, dk, dv, None)
    gradient, k, v = gradient.to(kind), k.to(kind), v.to(kind)
    delta = (gradient * out.to(kind)).sum(-1, keepdim=True)
    draw = _drawing(q, block)
    dq, dbias = [], []
    dk = dv = torch.zeros((), dtype=kind, device=q.device)
    for rows in _chunks(q, k):
        some, dy = q[..., rows, :], gradient[..., rows, :]
        p = torch.exp(_scores(some, k, block, rows) - finite_lse(lse[..., rows]).unsqueeze(-1))
        dp = dy @ v.mT
        if draw is not None:
            kept = _kept(p, block.dropout, draw)
            dp *= kept
            dv = dv + (p * kept).mT @ dy
        else:
            dv = dv + p.mT @ dy
        ds = p * (dp - delta[..., rows, :])
        dq.append(ds @ k * block.scale)
        dk = dk + ds.mT @ some.to(kind) * block.scale
        if block.bias is not None:
            dbias.append(ds.sum_to_size(_rows(block.bias, rows).shape))
    return BlockGradients(torch.cat(dq, -2), dk, dv, _joined(block.bias, dbias))


def _joined(bias: Tensor | None, parts: list[Tensor]) -> Tensor | None:
    """The bias gradient from those of row chunks: concatenated, or added if all rows share one."""
    if bias is None:
        return None
    return torch.cat(parts, -2) if bias.shape[-2] > 1 else torch.stack(parts).sum(0)


def _scores(q: Tensor, k: Tensor, block: BlockView, rows: slice) -> Tensor:
    scores = (q.to(k.dtype) * block.scale) @ k.mT
    if block.bias is not None:
        scores = scores + _rows(block.bias, rows)
    if block.offset is not None:
        row = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        column = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(column > row + block.offset, -torch.inf)
    return scores


def _rows(bias: Tensor, rows: slice) -> Tensor:
    return bias if bias.shape[-2] == 1 else bias[..., rows, :]


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Ranges of rows whose scores fit into memory at once."""
    n = q.shape[-2]
    step = max(1, MAX_SCORES // max(1, prod(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])) * k.shape[-2]))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def _drawing(q: Tensor, block: BlockView) -> torch.Generator | None:
    return torch.Generator(q.device).manual_seed(block.seed) if block.dropout else None


def _kept(p: Tensor, dropout: float, draw: torch.Generator) -> Tensor:
    """0 where a probability is dropped, else the factor that preserves the mean."""
    kept = torch.rand(p.shape, generator=draw, device=p.device, dtype=p.dtype) >= dropout
    return kept / (1.0 - dropout)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, block: BlockView) -> bool:
    """Whether torch's fused kernel supports this block."""
    return (
        q.device.type == "cpu"
        and block.bias is None
        and block.offset in (None, 0)
        and not block.dropout
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and q.shape[-1] == v.shape[-1]
    )


def _four(x: Tensor) -> Tensor:
    """The same as [batch, heads, rows, d], the kernel's form."""
    return x.reshape(prod(x.shape[:-3]), *(x.shape[-3:] if x.dim() > 2 else (1, *x.shape)))
