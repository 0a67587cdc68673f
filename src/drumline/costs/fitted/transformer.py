"""Recognise the language models that the fitted model covers, from the operators of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...models.op_shapes import AttentionShape, MatmulShape, shape_of
from ...models.profile import Layer, Profile
from .inputs import ModelColumns

CAUSAL = ("gpt:", "llama:")
"""Causal language models of the zoo; published runs are of these."""


def transformer_of(profile: Profile) -> ModelColumns | None:
    """The model as one row; None where it is not such a transformer."""
    formula = profile.origin == "formula"
    if formula and not profile.name.startswith(CAUSAL):
        return None
    attentions = [(x, _attentions(x)) for x in profile.layers]
    blocks = [(x, own[0]) for x, own in attentions if len(own) == 1]
    others = [(x, _projections(x)) for x, own in attentions if not own and _projections(x)]
    if not blocks or len(others) != 1 or any(len(own) > 1 for _, own in attentions):
        return None
    (block, attention), (head, last) = blocks[0], others[0]
    projections = _projections(block)
    if any(_projections(x) != projections or a != attention for x, a in blocks[1:]):
        return None
    if not projections or len(last) != 1 or any(p.rows != attention.tokens for p in (*projections, *last)):
        return None
    return _model(
        projections,
        attention,
        last[0],
        layers=sum(x.repeats for x, _ in blocks),
        tied=head.tied > 0,
        # the zoo counts all pairs; a traced kernel with an explicit mask computes all of them
        causal=formula or attention.causal > 0,
    )


def _model(
    projections: Sequence[MatmulShape],
    attention: AttentionShape,
    last: MatmulShape,
    *,
    layers: int,
    tied: bool,
    causal: bool,
) -> ModelColumns | None:
    """Sizes from the projections of a block, the last of which is the output of the feed-forward network."""
    ffn, hidden, heads = projections[-1].inputs, projections[-1].outputs, attention.heads
    widths = Counter((p.inputs, p.outputs) for p in projections)
    gated = widths[hidden, ffn] > 1 or widths[hidden, 2 * ffn] > 0
    # keys and values may be repeated for the kernel: their projections give the number of heads
    left = sum(p.numbers for p in projections) - (2 + gated) * hidden * ffn - 2 * hidden**2
    kv_heads, rest = divmod(left, 2 * hidden * attention.width)
    if rest or attention.width * heads != hidden or not 1 <= kv_heads <= heads or heads % kv_heads:
        return None
    return ModelColumns.of(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=gated,
        vocabulary=last.outputs,
        tied=tied,
        sequence=attention.tokens,
        causal=causal,
        predicted_fraction=1,
        experts=1,
        active_experts=1,
    )


def _attentions(layer: Layer) -> list[AttentionShape]:
    """Attention operators of a layer's forward."""
    forward = (op for op in layer.ops if op.phase == "forward" for _ in range(op.count))
    return [s for op in forward if isinstance(s := shape_of(op), AttentionShape)]


def _projections(layer: Layer) -> list[MatmulShape]:
    """Linear projections of a layer's forward, in order."""
    forward = (op for op in layer.ops if op.phase == "forward" for _ in range(op.count))
    return [s for op in forward if isinstance(s := shape_of(op), MatmulShape)]
