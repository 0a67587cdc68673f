"""Ring attention: the sequence is split over the ranks of an axis, and keys and values travel around a ring.

Forward: every rank keeps its queries. In step s it works on the keys and values of rank r - s, while it sends them to
rank r + 1 and receives those of rank r - s - 1. Blocks are combined by their log-sum-exps, so nothing is rounded twice
and no rank ever has the scores, or the keys, of the whole sequence.

Backward: keys and values travel again. Their gradients follow one step behind, accumulate on every rank, and return to
their owner from the last one.

A block travels only as far as some rank needs it. In causal attention that is up to the last rank: half of the messages
and half of the work disappear. A rank has one range of positions, so the last rank has the most causal work; shorter
ranges for later ranks balance that. Folding the sequence (zigzag: the first and the last range on one rank) would too;
it needs two ranges per rank, and is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torchkit.fake_tensors import has_no_values, is_shape_only
from .attention_block import BlockView, accumulation_dtype, attend, attend_backward, finite_lse
from .redistribution import Axis
from .ring_messages import Bounds, KeyValueBuffer, RingMessages, RingSchedule


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
    queries of positions q_bounds[r] to q_bounds[r+1] (default: the same). `mask` is this rank's rows of the whole mask
    (or one row for all), with all columns: bool (True attends) or added to the scores.

    Gradients of q, k, v and of a mask with rows of its own are this rank's part of the whole gradient; of a mask with
    one row, this rank's partial sum.
    """
    q, k, v, mask = _autocast(q, k, v, mask)
    ring = RingSchedule(axis.index, bounds, q_bounds or bounds, is_causal)
    assert ring.size == axis.size, f"bounds {bounds} are not those of {axis.size} ranks"
    assert (q.shape[-2], k.shape[-2]) == ring.rows, f"{q.shape[-2]} queries, {k.shape[-2]} keys; bounds: {ring.rows}"
    seed = int(torch.randint(1 << 62, ())) if dropout_p and not has_no_values(q) else 0
    settings = _Settings(q.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed, enable_gqa, axis)
    out = _Attention.apply(q, k, v, mask, ring, settings)  # type: ignore[no-untyped-call]  # torch's own
    assert isinstance(out, Tensor)
    return out


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast to the autocast type where autocast is on, as torch's attention does."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v, mask
    kind = torch.get_autocast_dtype(device)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(kind)
    return q.to(kind), k.to(kind), v.to(kind), mask


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings shared by all blocks of a call."""

    scale: float
    dropout: float
    seed: int
    grouped: bool
    """Whether several query heads share one key head."""
    axis: Axis


class _Attention(torch.autograd.Function):
    """The ring, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: RingSchedule, settings: _Settings
    ) -> Tensor:
        if is_shape_only(q):
            ctx.save_for_backward(q, k, v, mask, None, None)
            return q.new_empty([*q.shape[:-1], v.shape[-1]])
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _forward(q, k, v, mask, ring, settings)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.ring, ctx.settings = ring, settings
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        mask_has_gradient = mask is not None and ctx.needs_input_grad[3]
        if is_shape_only(q):
            return (
                *(torch.empty_like(t) for t in (q, k, v)),
                torch.empty_like(mask) if mask_has_gradient else None,
                None,
                None,
            )
        with torch.autocast(q.device.type, enabled=False):
            backward = _Backward(gradient, q, k, v, mask, out, lse, ctx.ring, ctx.settings, mask_has_gradient)
            backward.run()
        dq, dk, dv = backward.dq.to(q.dtype), backward.dk.to(k.dtype), backward.dv.to(v.dtype)
        return (
            dq,
            dk,
            dv,
            backward.dmask.to(mask.dtype) if mask_has_gradient and backward.dmask is not None else None,
            None,
            None,
        )


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: RingSchedule, settings: _Settings
) -> tuple[Tensor, Tensor]:
    kind = accumulation_dtype(q.dtype)
    out = torch.zeros([*q.shape[:-1], v.shape[-1]], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=kind, device=q.device)
    buffer = KeyValueBuffer(k, v, ring, k.dtype)
    current: Tensor | None = buffer.pack(k, v)
    for step in range(ring.size):
        messages = RingMessages(settings.axis)
        upcoming = _shift(messages, ring, buffer, step, current)
        messages.start()
        block = ring.block(step)
        if current is not None and ring.needs(ring.rank, block):
            keys, values = (_to_query_heads(t, q, settings) for t in buffer.unpack(current, block))
            out, lse = _merge(out, lse, *attend(q, keys, values, _view(mask, ring, settings, block, kind)))
        messages.wait()
        current = upcoming
    return out, lse


def _shift(
    messages: RingMessages, ring: RingSchedule, buffer: KeyValueBuffer, step: int, current: Tensor | None
) -> Tensor | None:
    """Forward the current block if it travels further; returns the buffer of the next step's block."""
    if current is not None and step + 1 < ring.size and ring.reach(ring.block(step)) > step:
        messages.send(current, (ring.rank + 1) % ring.size)
    if not ring.arrives(step + 1):
        return None
    return messages.receive(buffer.empty(ring.block(step + 1)), (ring.rank - 1) % ring.size)


def _merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two softmaxes over parts of the keys into one over both."""
    both = torch.logaddexp(lse, lse_b)
    by = finite_lse(both)
    return out * torch.exp(lse - by).unsqueeze(-1) + out_b * torch.exp(lse_b - by).unsqueeze(-1), both


def _view(mask: Tensor | None, ring: RingSchedule, settings: _Settings, block: int, kind: torch.dtype) -> BlockView:
    """Mask, bias and dropout of this rank's queries for a block."""
    bias = None
    if mask is not None:
        bias = mask[_slice(mask, ring, block)]
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=kind, device=mask.device).masked_fill(~bias, -torch.inf)
        bias = bias.to(kind)
    seed = settings.seed + ring.rank * ring.size + block
    return BlockView(settings.scale, bias, ring.offset(block), settings.dropout, seed)


def _slice(mask: Tensor, ring: RingSchedule, block: int) -> tuple[Any, ...]:
    """The columns of the block; a mask of one column serves all."""
    whole = mask.shape[-1] == 1 and ring.bounds[-1] != 1
    return (..., slice(None) if whole else slice(ring.bounds[block], ring.bounds[block + 1]))


def _to_query_heads(x: Tensor, q: Tensor, settings: _Settings) -> Tensor:
    """Keys or values repeated to the number of query heads."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if settings.grouped else x


def _to_key_heads(gradient: Tensor, shape: torch.Size, settings: _Settings) -> Tensor:
    """The gradient of keys or values, summed over the query heads that share them."""
    if settings.grouped:
        gradient = gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(shape)


class _Backward:
    """The backward around the ring. In the messages of step s a rank, in this order,

    - sends the accumulated gradients of the block of step s - 1: to the next rank, or to the owner,
    - receives the same for its block of this step, from the rank before,
    - forwards the keys and values of this step and receives those of the next.
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
        ring: RingSchedule,
        settings: _Settings,
        mask_has_gradient: bool,
    ) -> None:
        self.gradient, self.q, self.mask, self.out, self.lse = gradient, q, mask, out, lse
        self.ring, self.settings, self.kind = ring, settings, accumulation_dtype(q.dtype)
        self.buffer, self.gradients = KeyValueBuffer(k, v, ring, k.dtype), KeyValueBuffer(k, v, ring, self.kind)
        self.dq, self.dk, self.dv = (torch.zeros(t.shape, dtype=self.kind, device=t.device) for t in (q, k, v))
        self.dmask = (
            torch.zeros(mask.shape, dtype=self.kind, device=q.device)
            if mask is not None and mask_has_gradient
            else None
        )
        self.current: Tensor | None = self.buffer.pack(k, v)

    def run(self) -> None:
        """All steps, and one more in which the last gradients return to their owner."""
        ring = self.ring
        carried: Tensor | None = None
        for step in range(ring.size + 1):
            messages = RingMessages(self.settings.axis)
            self._send_gradients(messages, step, carried)
            coming = returned = None
            if step > 1 and ring.arrives(step):
                coming = messages.receive(self.gradients.empty(ring.block(step)), (ring.rank - 1) % ring.size)
            if step > 1 and ring.reach(ring.rank) == step - 1:
                returned = messages.receive(self.gradients.empty(ring.rank), (ring.rank + step - 1) % ring.size)
            upcoming = _shift(messages, ring, self.buffer, step, self.current)
            messages.start()
            mine = self._contribution(step)
            messages.wait()
            carried = _sum(coming, mine)
            if carried is None and step and ring.arrives(step):  # no rank so far attends to this block
                carried = torch.zeros_like(self.gradients.empty(ring.block(step)))
            if step == 0 or returned is not None:
                self._keep(returned if step else carried)
            self.current = upcoming

    def _send_gradients(self, messages: RingMessages, step: int, carried: Tensor | None) -> None:
        ring, block = self.ring, self.ring.block(step - 1)
        if step > 1 and carried is not None:
            messages.send(carried, (ring.rank + 1) % ring.size if ring.reach(block) >= step else block)

    def _keep(self, gradients: Tensor | None) -> None:
        """Add to the gradients of this rank's own keys and values."""
        if gradients is not None:
            dk, dv = self.gradients.unpack(gradients, self.ring.rank)
            self.dk += dk
            self.dv += dv

    def _contribution(self, step: int) -> Tensor | None:
        """This rank's contribution to the gradients of the current block; dq and dmask grow as well."""
        ring, block = self.ring, self.ring.block(step)
        if self.current is None or step == ring.size or not ring.needs(ring.rank, block):
            return None
        k, v = self.buffer.unpack(self.current, block)
        keys, values = _to_query_heads(k, self.q, self.settings), _to_query_heads(v, self.q, self.settings)
        view = _view(self.mask, ring, self.settings, block, self.kind)
        grads = attend_backward(self.gradient, self.q, keys, values, self.out, self.lse, view)
        self.dq += grads.q.sum_to_size(self.q.shape)
        if self.dmask is not None and grads.bias is not None:
            self.dmask[_slice(self.dmask, ring, block)] += grads.bias
        return self.gradients.pack(
            _to_key_heads(grads.k, k.shape, self.settings), _to_key_heads(grads.v, v.shape, self.settings)
        )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)
