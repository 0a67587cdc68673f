"""Transformers by formula: GPT, BERT and ViT; gated ones are in gated.py."""

from __future__ import annotations

from dataclasses import dataclass

from ..profile import Profile
from .assemble import LayerDraft, assemble
from .parts import (
    INDEX,
    SINGLE,
    VALUE,
    LayerPart,
    activation,
    add,
    attention,
    cross_entropy,
    embedding,
    linear,
    norm,
    op,
    position,
)


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """Sizes of a transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` if groups of queries share them."""
    inner: int
    """Width between the two maps of the feed-forward part."""
    vocabulary: int
    sequence: int
    """Default tokens per sample."""
    batch: int
    """Default samples per step."""


def _gpt(layers: int, hidden: int, heads: int, batch: int = 512) -> TransformerSize:
    return TransformerSize(layers, hidden, heads, heads, 4 * hidden, 50257, 2048, batch)


GPT = {
    "125m": _gpt(12, 768, 12),
    "350m": _gpt(24, 1024, 16),
    "760m": _gpt(24, 1536, 16),
    "1.3b": _gpt(24, 2048, 16),
    "2.7b": _gpt(32, 2560, 32),
    "6.7b": _gpt(32, 4096, 32),
    "7b": _gpt(32, 4096, 32),
    "13b": _gpt(40, 5120, 40),
    "30b": _gpt(48, 7168, 56, 1024),
    "66b": _gpt(64, 9216, 72, 1024),
    "175b": _gpt(96, 12288, 96, 1536),
    "530b": _gpt(105, 20480, 128, 1920),
    "1t": _gpt(128, 25600, 160, 3072),
}
BERT = {
    "base": TransformerSize(12, 768, 12, 12, 3072, 30522, 512, 256),
    "large": TransformerSize(24, 1024, 16, 16, 4096, 30522, 512, 256),
}
VIT = {  # the vocabulary is the classes, the sequence follows from the patches
    "base": (TransformerSize(12, 768, 12, 12, 3072, 1000, 197, 1024), 16),
    "large": (TransformerSize(24, 1024, 16, 16, 4096, 1000, 197, 1024), 16),
    "huge": (TransformerSize(32, 1280, 16, 16, 5120, 1000, 257, 1024), 14),
}
_FULL = (
    "attention counts all pairs of tokens, also masked ones; "
    "its backward, which recomputes the scores, is 2.5 times its forward"
)


def gpt(size: str, batch_size: int | None, sequence: int | None) -> Profile:
    """A GPT of the table."""
    return gpt_of_size(f"gpt:{size}", GPT[size], batch_size, sequence)


def gpt_of_size(name: str, z: TransformerSize, batch_size: int | None = None, sequence: int | None = None) -> Profile:
    """Learned positions, norm before, GELU, biases, the head tied to the embedding."""
    s, h, v = sequence or z.sequence, z.hidden, z.vocabulary
    row = residual_bytes(s, h)
    drafts = (
        LayerDraft("embedding", "Embedding", (embedding(s, v, h, tied=True), position(s, s, h)), row),
        LayerDraft("blocks.0", "Block", _block(z, s), row, carried=row, repeats=z.layers),
        LayerDraft("head", "Head", (norm(s, h), linear(s, h, v, bias=False, tied=True), cross_entropy(s, v)), 0),
    )
    note = "as many learned positions, head tied to the embedding"
    batch = batch_size or z.batch
    return language_model(name, drafts, batch=batch, sequence=s, vocabulary=v, note=note)


def bert(size: str, batch_size: int | None, sequence: int | None) -> Profile:
    """Learned positions and segments, norm after, GELU, a pooler; tokens are predicted through the embedding."""
    z = BERT[size]
    s, h, v = sequence or z.sequence, z.hidden, z.vocabulary
    words = (embedding(s, v, h, tied=True), position(s, max(512, s), h), embedding(s, 2, h), add(s * h), norm(s, h))
    pooler = (linear(1, h, h), activation("tanh", h))
    row = residual_bytes(s, h)
    drafts = (
        LayerDraft("embedding", "Embedding", words, row),
        LayerDraft("blocks.0", "Block", _block(z, s, separate=True), row, carried=row, repeats=z.layers),
        LayerDraft("head", "Head", (*pooler, linear(s, h, v, bias=False, tied=True), cross_entropy(s, v)), 0),
    )
    note = "no heads beyond the pooler: tokens are predicted at every position through the embedding"
    batch = batch_size or z.batch
    return language_model(f"bert:{size}", drafts, batch=batch, sequence=s, vocabulary=v, note=note)


def vit(size: str, batch_size: int | None) -> Profile:
    """Patches of a 224 x 224 image as tokens behind a class token, norm before, the class read from that token."""
    z, patch = VIT[size]
    s, h = z.sequence, z.hidden
    row = residual_bytes(s, h)
    drafts = (
        LayerDraft("embedding", "Patches", (_patches(s - 1, patch, h), position(s, s, h)), row),
        LayerDraft("blocks.0", "Block", _block(z, s), row, carried=row, repeats=z.layers),
        LayerDraft("head", "Head", (norm(s, h), linear(1, h, z.vocabulary), cross_entropy(1, z.vocabulary)), 0),
    )
    batch = batch_size or z.batch
    notes = (f"batch of {batch}, images of 224 x 224 in patches of {patch} x {patch}: {s} tokens", _FULL)
    image = SINGLE * 3 * 224 * 224 + INDEX
    return assemble(f"vit:{size}", drafts, batch_size=batch, input=image, notes=notes)


def language_model(
    name: str, drafts: tuple[LayerDraft, ...], *, batch: int, sequence: int, vocabulary: int, note: str
) -> Profile:
    """A profile of sequences of tokens, each with its next token as its target."""
    notes = (f"batch of {batch}, sequences of {sequence} tokens, vocabulary of {vocabulary}; {note}", _FULL)
    return assemble(name, drafts, batch_size=batch, input=2 * INDEX * sequence, notes=notes)


def _block(z: TransformerSize, s: int, *, separate: bool = False) -> tuple[LayerPart, ...]:
    """Attention and a GELU feed-forward with biases; keeps slightly more than 32 bytes per token and hidden value."""
    h, f = z.hidden, z.inner
    maps: tuple[LayerPart, ...] = (linear(s, h, 3 * h),)
    if separate:
        other = linear(s, h, h, keep=False).parallel_branch
        maps = (linear(s, h, h), other, other)
    return (
        norm(s, h),
        *maps,
        attention(s, h, h, z.heads),
        linear(s, h, h),
        add(s * h),
        norm(s, h),
        linear(s, h, f),
        activation("gelu", s * f),
        linear(s, f, h),
        add(s * h),
    )


def _patches(t: int, patch: int, h: int) -> LayerPart:
    """A convolution whose windows do not overlap, that is a linear map of each patch, and the class token."""
    k = 3 * patch * patch
    projection = linear(t, k, h, first=True)
    made = VALUE * (t + 1) * h
    token = op("cat", "pointwise", "forward", fixed=SINGLE * h, per_sample=2 * made, made=made)
    conv = tuple(
        op(
            "convolution" if x.phase == "forward" else "convolution_backward",
            "conv" if x.phase == "forward" else "conv_backward",
            x.phase,
            flops=x.flops.per_sample,
            fixed=x.bytes.fixed,
            per_sample=x.bytes.per_sample,
            made=x.output.per_sample,
        )
        for x in projection.ops
        if x.kind == "matmul"
    )
    return LayerPart(
        (*conv, token),
        weights=(*projection.weights, h),
        saved=projection.saved,
        temporary=VALUE * t * h,
        gradients=projection.gradients,
        depth=projection.depth,
    )


def residual_bytes(s: int, h: int) -> float:
    """Bytes of the residual stream of one sample."""
    return float(VALUE * s * h)
