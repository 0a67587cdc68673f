"""Context parallelism: each rank has some of the tokens of every sample; keys and values go round a ring.

All that belongs to samples is divided by n, parameters are whole. In causal attention the last rank sees all tokens, so
it has (2n - 1) / n of an even share. Gradients of parameters are summands: they are added up with the replicas'.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import PlanError
from ..models.profile import Affine, Layer, Op
from ..models.shapes import Attention, Product, Table, dims, shape_of
from .local import Kept, Local, Talk, Talks, each_layer, shared, times, undivided
from .tensor import tokens_of


def by_context(local: Local, n: int) -> Local:
    """The part of the busiest of n ranks."""
    if n == 1:
        return local
    profile = local.profile
    tokens = tokens_of(profile)
    if not tokens:
        return undivided(local, f"cp={n}", "tokens")
    if tokens < n:
        raise PlanError(f"cp={n} for {tokens} tokens", rule="every rank has a token", fix=f"cp={tokens} or less")
    share = -(-tokens // n) / tokens
    width = profile.activation_bytes

    def change(layer: Layer, kept: Kept) -> tuple[Layer, Kept, Talks]:
        causal = any(s.causal for s in map(shape_of, layer.ops) if isinstance(s, Attention))
        ops = tuple(_op(op, share, n, causal) for op in layer.ops)
        own = Kept(*(times(a, share) for a in (kept.saved, kept.forward, kept.backward)))
        return replace(layer, ops=ops, output=times(layer.output, share)), own, _ring(layer, share, n, width)

    if not any(isinstance(shape_of(op), Attention) for x in profile.layers for op in x.ops):
        note = f"cp={n}: {profile.name} shows no fused attention; what the engine gathers in its place is not counted"
        local = replace(local, notes=(*local.notes, note))
    return each_layer(local, change)


def _op(op: Op, share: float, n: int, causal: bool) -> Op:
    made = shared(op, share)
    if causal and op.kind in ("attention", "attention_backward"):
        made = replace(made, flops=times(op.flops, share * (2 * n - 1) / n))
    shape = shape_of(op)
    if isinstance(shape, Product) and shape.rows > 1:
        return replace(made, dims=dims(replace(shape, rows=round(shape.rows * share))))
    if isinstance(shape, Table) and shape.tokens:
        return replace(made, dims=dims(replace(shape, tokens=round(shape.tokens * share))))
    if isinstance(shape, Attention):
        return replace(made, dims=dims(replace(shape, tokens=round(shape.tokens * share))))
    return made


def _ring(layer: Layer, share: float, n: int, width: int) -> Talks:
    """Keys and values n - 1 times in the forward; in the backward again, and their gradients behind them."""
    found: list[Talk] = []
    for op in layer.ops:
        shape = shape_of(op)
        if isinstance(shape, Attention):
            tokens = round(shape.tokens * share)
            pair = Affine(0.0, float(2 * tokens * shape.kv_heads * shape.width * width * op.count))
            found += [Talk("cp", "forward", "ring", pair)] * (n - 1)
            found += [Talk("cp", "backward", "ring", pair)] * (n - 1)
            found += [Talk("cp", "backward", "ring", pair, wide=True)] * (n - 1)
    return tuple(found)
