"""Which models the closed form describes: language models by formula, read back from their operators."""

from __future__ import annotations

from collections import Counter

from ...model.profile import Layer, Profile
from ...model.shapes import Attention, Product, shape_of
from .inputs import Models

CAUSAL = ("gpt:", "llama:")
"""Models that predict every next token: what the published runs are of. Masked models and images are not among them."""


def transformer_of(profile: Profile) -> Models | None:
    """The model as one row of arrays; None where it is no such transformer, or was traced.

    A trace has the operators of a user's own modules, with casts and copies that the published runs did not have.
    """
    if profile.origin != "formula" or not profile.name.startswith(CAUSAL):
        return None
    blocks = [x for x in profile.layers if any(op.kind == "attention" for op in x.ops)]
    if len(blocks) != 1 or not profile.layers[-1].ops:
        return None
    block, head = blocks[0], profile.layers[-1]
    core = next(s for op in block.ops if isinstance(s := shape_of(op), Attention))
    maps, last = _products(block), _products(head)
    if not maps or not last or last[-1].rows != core.tokens:
        return None
    inner, hidden = maps[-1].inputs, maps[-1].outputs
    gated = Counter((p.inputs, p.outputs) for p in maps)[hidden, inner] > 1
    found = Models.of(
        layers=block.repeats, hidden=hidden, heads=core.heads, kv_heads=core.kv_heads, inner=inner, gated=gated,
        vocabulary=last[-1].outputs, tied=head.tied > 0, sequence=core.tokens, causal=1, predicted=1, experts=1,
        active=1,
    )  # fmt: skip
    # anything else in a block, and it is another model
    return found if found.layer_weights[0] == sum(p.numbers for p in maps) else None


def _products(layer: Layer) -> list[Product]:
    """The maps of a layer, in the order in which they run."""
    forward = (op for op in layer.ops if op.phase == "forward" for _ in range(op.count))
    return [s for op in forward if isinstance(s := shape_of(op), Product)]
