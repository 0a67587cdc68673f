"""Cross-entropy over a tiled vocabulary: one tile of the logits is in memory at a time.

Each tile gives three scores per token: the log-sum-exp of its logits, the logit of the target if the tile has it, and
the sum of its logits (for label smoothing). They combine to the loss. The backward recomputes a tile's logits; nothing
of the size of the logits is kept between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...torchkit.operators import assert_async

Scorer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""(hidden, index, in_tile, total) -> the three scores per token, shape (3, tokens), of one tile of the head."""


class _Scores(torch.autograd.Function):
    """The three scores per token of one tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        index: torch.Tensor,
        in_tile: torch.Tensor,
        dtype: torch.dtype | None,
        total: bool,
    ) -> torch.Tensor:
        logits = _logits(hidden, weight, bias, dtype)
        picked = logits.gather(1, index[:, None]).squeeze(1).masked_fill(~in_tile, 0.0)
        added = logits.sum(1) if total else torch.zeros_like(picked)
        most = _finite(logits.amax(1))
        lse = logits.sub_(most[:, None]).exp_().sum(1).log_().add_(most)
        ctx.save_for_backward(hidden, weight, bias, index, in_tile, lse)
        ctx.dtype, ctx.total = dtype, total
        return torch.stack([lse, picked, added])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        hidden, weight, bias, index, in_tile, lse = ctx.saved_tensors
        slope = _logits(hidden, weight, bias, ctx.dtype).sub_(_finite(lse)[:, None]).exp_().mul_(g[0][:, None])
        slope.scatter_add_(1, index[:, None], g[1].masked_fill(~in_tile, 0.0)[:, None])
        if ctx.total:
            slope.add_(g[2][:, None])
        kind = ctx.dtype or hidden.dtype
        slope = slope.to(kind)
        with _plain(hidden):
            dh = (slope @ weight.to(kind)).to(hidden.dtype) if ctx.needs_input_grad[0] else None
            dw = (slope.t() @ hidden.to(kind)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = slope.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return dh, dw, db, None, None, None, None


def part_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    in_tile: torch.Tensor,
    *,
    total: bool,
) -> torch.Tensor:
    """The three scores per token of one tile; `index` is the target's row in it, where it is `in_tile`."""
    dtype = None
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    out = _Scores.apply(hidden, weight, bias, index, in_tile, dtype, total)  # type: ignore[no-untyped-call]  # torch's
    assert isinstance(out, torch.Tensor)
    return out


def cross_entropy(
    parts: Sequence[tuple[range, Scorer]],
    hidden: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    """`F.cross_entropy` of the logits of all tiles: hidden (tokens, width), target (tokens)."""
    words = parts[-1][0].stop
    counts = target != ignore_index
    chosen = target.masked_fill(~counts, 0)
    assert_async(((chosen >= 0) & (chosen < words)).all(), f"a target is not one of the {words} classes")
    scores = []
    for rows, scorer in parts:
        in_tile = (chosen >= rows.start) & (chosen < rows.stop)
        index = (chosen - rows.start).clamp(0, len(rows) - 1)
        scores.append(scorer(hidden, index, in_tile, label_smoothing > 0))
    table = torch.stack(scores)
    lse = torch.logsumexp(table[:, 0], 0)
    loss = lse - table[:, 1].sum(0)
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - table[:, 2].sum(0) / words)
    loss, count = loss.masked_fill(~counts, 0.0), counts.to(loss.dtype)
    if weight is not None:
        count = weight.to(loss.dtype)[chosen] * count
        loss = loss * count
    if reduction == "none":
        return loss
    return loss.sum() / count.sum() if reduction == "mean" else loss.sum()


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """Logits of one tile, rounded as by the plain layer, then at least float32. The caller may overwrite them."""
    kind = dtype or hidden.dtype
    with _plain(hidden):
        made = torch.nn.functional.linear(hidden.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
    return made.float() if made.dtype in (torch.bfloat16, torch.float16) else made


def _plain(t: torch.Tensor) -> torch.autocast:
    """No autocast inside: the types are chosen explicitly, and are the same in the backward."""
    return torch.autocast(t.device.type, enabled=False)


def _finite(most: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract before the exponential: 0 where every logit is minus infinity."""
    return most.masked_fill(most.isinf(), 0.0)
