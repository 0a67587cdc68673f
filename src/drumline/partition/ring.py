"""Attention over a sequence that is split over the ranks of an axis: keys and values travel round a ring.

Forward: every rank keeps its queries. In step s it works on the keys and values of rank r - s, while it sends them on
to rank r + 1 and receives those of rank r - s - 1. The blocks are added up by the logarithms of their sums, so nothing
is rounded twice and no rank ever holds the scores, or the keys, of the whole sequence.

Backward: keys and values go round again. What a rank finds of their gradients follows them one step behind, is added to
on every rank, and goes home from the last one.

A block travels only as far as somebody needs it. In causal attention that is up to the last rank: half of the sends
and half of the work fall away. A rank holds one run of positions, so the last rank has the most causal work. Shorter
runs for later ranks even that out. Folding the sequence (zigzag: the first and the last run on one rank) would too; it
needs two runs per rank, and is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tracing.running import only_shapes, without_values
from .block import View, attend, attend_backward, exact, finite
from .moves import Axis
from .way import Batch, Bounds, Pair, Ring


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bounds: Bounds,
    axis: Axis,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    q_bounds: Bounds | None = None,
) -> Tensor:
    """This rank's rows of `scaled_dot_product_attention` of the whole sequence.

    q, k, v are [..., heads, T_local, d]. Rank r has the keys and values of positions bounds[r] to bounds[r+1], and the
    queries of positions q_bounds[r] to q_bounds[r+1] (the same if not given). `mask` is this rank's rows of the whole
    mask (or one row for all), with all columns: bool (True is seen) or added to the scores.

    Gradients: of q, k, v and of a mask with rows of its own, this rank's part of the whole gradient; of a mask with one
    row, this rank's summand.
    """
    q, k, v, mask = _autocast(q, k, v, mask)
    ring = Ring(axis.index, bounds, q_bounds or bounds, is_causal)
    assert ring.size == axis.size, f"bounds {bounds} are not those of {axis.size} ranks"
    assert (q.shape[-2], k.shape[-2]) == ring.rows, f"{q.shape[-2]} queries, {k.shape[-2]} keys; bounds: {ring.rows}"
    seed = int(torch.randint(1 << 62, ())) if dropout_p and not without_values(q) else 0
    how = _How(q.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed, enable_gqa, axis)
    out = _Attention.apply(q, k, v, mask, ring, how)  # type: ignore[no-untyped-call]  # torch's own
    assert isinstance(out, Tensor)
    return out


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As torch's own attention: in the type of autocast, where that is on."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v, mask
    kind = torch.get_autocast_dtype(device)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(kind)
    return q.to(kind), k.to(kind), v.to(kind), mask


@dataclass(frozen=True, slots=True)
class _How:
    """What is the same for all blocks of a call."""

    scale: float
    dropout: float
    seed: int
    grouped: bool
    """Whether several heads of queries share one of keys."""
    axis: Axis


class _Attention(torch.autograd.Function):
    """The ring, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring, how: _How) -> Tensor:
        if only_shapes(q):
            ctx.save_for_backward(q, k, v, mask, None, None)
            return q.new_empty([*q.shape[:-1], v.shape[-1]])
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(q, k, v, mask, ring, how)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.ring, ctx.how = ring, how
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        learned = mask is not None and ctx.needs_input_grad[3]
        if only_shapes(q):
            return *(torch.empty_like(t) for t in (q, k, v)), torch.empty_like(mask) if learned else None, None, None
        with torch.autocast(q.device.type, enabled=False):
            run = _Backward(gradient, q, k, v, mask, out, lse, ctx.ring, ctx.how, learned)
            run.go()
        dq, dk, dv = run.dq.to(q.dtype), run.dk.to(k.dtype), run.dv.to(v.dtype)
        return dq, dk, dv, run.dmask.to(mask.dtype) if learned and run.dmask is not None else None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring, how: _How) -> tuple[Tensor, Tensor]:
    kind = exact(q.dtype)
    out = torch.zeros([*q.shape[:-1], v.shape[-1]], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=kind, device=q.device)
    pair = Pair(k, v, ring, k.dtype)
    here: Tensor | None = pair.pack(k, v)
    for step in range(ring.size):
        batch = Batch(how.axis)
        ahead = _shift(batch, ring, pair, step, here)
        batch.start()
        block = ring.block(step)
        if here is not None and ring.needs(ring.rank, block):
            keys, values = (_for_queries(t, q, how) for t in pair.unpack(here, block))
            out, lse = _merge(out, lse, *attend(q, keys, values, _view(mask, ring, how, block, kind)))
        batch.wait()
        here = ahead
    return out, lse


def _shift(batch: Batch, ring: Ring, pair: Pair, step: int, here: Tensor | None) -> Tensor | None:
    """Send on what is here as far as it is to travel; where the block of the next step will be."""
    if here is not None and step + 1 < ring.size and ring.reach(ring.block(step)) > step:
        batch.send(here, (ring.rank + 1) % ring.size)
    if not ring.arrives(step + 1):
        return None
    return batch.receive(pair.empty(ring.block(step + 1)), (ring.rank - 1) % ring.size)


def _merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmaxes over parts of the keys as one over both."""
    both = torch.logaddexp(lse, lse_b)
    by = finite(both)
    return out * torch.exp(lse - by).unsqueeze(-1) + out_b * torch.exp(lse_b - by).unsqueeze(-1), both


def _view(mask: Tensor | None, ring: Ring, how: _How, block: int, kind: torch.dtype) -> View:
    """What this rank's queries see of a block."""
    bias = None
    if mask is not None:
        bias = mask[_slice(mask, ring, block)]
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=kind, device=mask.device).masked_fill(~bias, -torch.inf)
        bias = bias.to(kind)
    seed = how.seed + ring.rank * ring.size + block
    return View(how.scale, bias, ring.offset(block), how.dropout, seed)


def _slice(mask: Tensor, ring: Ring, block: int) -> tuple[Any, ...]:
    """The columns of the block; a mask of one column serves all."""
    whole = mask.shape[-1] == 1 and ring.bounds[-1] != 1
    return (..., slice(None) if whole else slice(ring.bounds[block], ring.bounds[block + 1]))


def _for_queries(x: Tensor, q: Tensor, how: _How) -> Tensor:
    """Keys or values with as many heads as the queries."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if how.grouped else x


def _of_keys(gradient: Tensor, shape: torch.Size, how: _How) -> Tensor:
    """The gradient of keys or values from that of what the queries saw of them."""
    if how.grouped:
        gradient = gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(shape)


class _Backward:
    """The way round with the gradients. In the batch of step s a rank, in this order,

    - sends on what was found in step s - 1 of the gradients of that step's block: to the next rank, or home,
    - receives the same for its block of this step, from the rank before,
    - sends on the keys and values of this step and receives those of the next.
    """

    def __init__(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        out: Tensor,
        lse: Tensor,
        ring: Ring,
        how: _How,
        learned: bool,
    ) -> None:
        self.gradient, self.q, self.mask, self.out, self.lse = gradient, q, mask, out, lse
        self.ring, self.how, self.kind = ring, how, exact(q.dtype)
        self.pair, self.found = Pair(k, v, ring, k.dtype), Pair(k, v, ring, self.kind)
        self.dq, self.dk, self.dv = (torch.zeros(t.shape, dtype=self.kind, device=t.device) for t in (q, k, v))
        self.dmask = torch.zeros(mask.shape, dtype=self.kind, device=q.device) if mask is not None and learned else None
        self.here: Tensor | None = self.pair.pack(k, v)

    def go(self) -> None:
        """All steps, and one more in which the last gradients come home."""
        ring = self.ring
        carried: Tensor | None = None
        for step in range(ring.size + 1):
            batch = Batch(self.how.axis)
            self._send_found(batch, step, carried)
            coming = home = None
            if step > 1 and ring.arrives(step):
                coming = batch.receive(self.found.empty(ring.block(step)), (ring.rank - 1) % ring.size)
            if step > 1 and ring.reach(ring.rank) == step - 1:
                home = batch.receive(self.found.empty(ring.rank), (ring.rank + step - 1) % ring.size)
            ahead = _shift(batch, ring, self.pair, step, self.here)
            batch.start()
            mine = self._summand(step)
            batch.wait()
            carried = _sum(coming, mine)
            if carried is None and step and ring.arrives(step):  # the first rank on the way sees nothing of the block
                carried = torch.zeros_like(self.found.empty(ring.block(step)))
            if step == 0 or home is not None:
                self._keep(home if step else carried)
            self.here = ahead

    def _send_found(self, batch: Batch, step: int, carried: Tensor | None) -> None:
        ring, block = self.ring, self.ring.block(step - 1)
        if step > 1 and carried is not None:
            batch.send(carried, (ring.rank + 1) % ring.size if ring.reach(block) >= step else block)

    def _keep(self, found: Tensor | None) -> None:
        """Add to the gradients of this rank's own keys and values."""
        if found is not None:
            dk, dv = self.found.unpack(found, self.ring.rank)
            self.dk += dk
            self.dv += dv

    def _summand(self, step: int) -> Tensor | None:
        """What this rank's queries add to the gradients of the block that is here; dq and dmask grow as well."""
        ring, block = self.ring, self.ring.block(step)
        if self.here is None or step == ring.size or not ring.needs(ring.rank, block):
            return None
        k, v = self.pair.unpack(self.here, block)
        keys, values = _for_queries(k, self.q, self.how), _for_queries(v, self.q, self.how)
        view = _view(self.mask, ring, self.how, block, self.kind)
        found = attend_backward(self.gradient, self.q, keys, values, self.out, self.lse, view)
        self.dq += found.q.sum_to_size(self.q.shape)
        if self.dmask is not None and found.bias is not None:
            self.dmask[_slice(self.dmask, ring, block)] += found.bias
        return self.found.pack(_of_keys(found.k, k.shape, self.how), _of_keys(found.v, v.shape, self.how))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)
