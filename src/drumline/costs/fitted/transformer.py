"""Which models the closed form describes: language models, read back from their operators, by formula or traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...models.profile import Layer, Profile
from ...models.shapes import Attention, Product, shape_of
from .inputs import Models

CAUSAL = ("gpt:", "llama:")
"""Models of the zoo that predict every next token: what the published runs are of."""


def transformer_of(profile: Profile) -> Models | None:
    """The model as one row of arrays; None where it is no such transformer."""
    formula = profile.origin == "formula"
    if formula and not profile.name.startswith(CAUSAL):
        return None
    cores = [(x, _cores(x)) for x in profile.layers]
    blocks = [(x, found[0]) for x, found in cores if len(found) == 1]
    others = [(x, _products(x)) for x, found in cores if not found and _products(x)]
    if not blocks or len(others) != 1 or any(len(found) > 1 for _, found in cores):
        return None
    (block, core), (head, last) = blocks[0], others[0]
    maps = _products(block)
    if any(_products(x) != maps or c != core for x, c in blocks[1:]):
        return None
    if not maps or len(last) != 1 or any(p.rows != core.tokens for p in (*maps, *last)):
        return None
    return _model(
        maps,
        core,
        last[0],
        layers=sum(x.repeats for x, _ in blocks),
        tied=head.tied > 0,
        # a model of the zoo counts all pairs; a trace that hands a mask over has a kernel that computes all of them
        causal=formula or core.causal > 0,
    )


def _model(
    maps: Sequence[Product], core: Attention, last: Product, *, layers: int, tied: bool, causal: bool
) -> Models | None:
    """By the widths of a block's maps, the last of which leads out of the feed-forward part; None if there are more."""
    inner, hidden = maps[-1].inputs, maps[-1].outputs
    widths = Counter((p.inputs, p.outputs) for p in maps)
    gated = widths[hidden, inner] > 1 or widths[hidden, 2 * inner] > 0
    # keys and values may be repeated for the kernel: their maps tell how many there are
    left = sum(p.numbers for p in maps) - (2 + gated) * hidden * inner - 2 * hidden**2
    kv_heads, rest = divmod(left, 2 * hidden * core.width)
    if rest or core.width * core.heads != hidden or not 1 <= kv_heads <= core.heads or core.heads % kv_heads:
        return None
    return Models.of(
        layers=layers,
        hidden=hidden,
        heads=core.heads,
        kv_heads=kv_heads,
        inner=inner,
        gated=gated,
        vocabulary=last.outputs,
        tied=tied,
        sequence=core.tokens,
        causal=causal,
        predicted=1,
        experts=1,
        active=1,
    )


def _cores(layer: Layer) -> list[Attention]:
    """The attentions of a layer."""
    forward = (op for op in layer.ops if op.phase == "forward" for _ in range(op.count))
    return [s for op in forward if isinstance(s := shape_of(op), Attention)]


def _products(layer: Layer) -> list[Product]:
    """The maps of a layer, in the order in which they run."""
    forward = (op for op in layer.ops if op.phase == "forward" for _ in range(op.count))
    return [s for op in forward if isinstance(s := shape_of(op), Product)]
