"""Mamba by formula: blocks of a selective state space instead of attention."""

from __future__ import annotations

from dataclasses import dataclass

from ..profile import Affine, Profile
from .assemble import LayerDraft
from .parts import SINGLE, VALUE, LayerPart, activation, add, cross_entropy, embedding, linear, log2, multiply, norm, op
from .transformer import language_model, residual_bytes

_VOCABULARY = 50280
_STATE, _WINDOW = 16, 4
"""Numbers of a channel's state, and tokens of its convolution."""


@dataclass(frozen=True, slots=True)
class MambaSize:
    """Sizes of a Mamba."""

    layers: int
    hidden: int


MAMBA = {
    "130m": MambaSize(24, 768),
    "370m": MambaSize(48, 1024),
    "790m": MambaSize(48, 1536),
    "1.4b": MambaSize(48, 2048),
    "2.8b": MambaSize(64, 2560),
}


def mamba(size: str, batch_size: int | None, sequence: int | None) -> Profile:
    """Norm, a wide projection, a short convolution, a scan over the tokens, a gate; the head tied to the embedding."""
    z, s = MAMBA[size], sequence or 2048
    h, v, row = z.hidden, _VOCABULARY, residual_bytes(s, z.hidden)
    drafts = (
        LayerDraft("embedding", "Embedding", (embedding(s, v, h, tied=True),), row),
        LayerDraft("blocks.0", "Block", _block(s, h), row, carried=row, repeats=z.layers),
        LayerDraft(
            "head",
            "Head",
            (norm(s, h, root_mean_square=True), linear(s, h, v, bias=False, tied=True), cross_entropy(s, v)),
            0,
        ),
    )
    note = "the scan is one kernel that reads and writes its channels once, and keeps no states"
    return language_model(f"mamba:{size}", drafts, batch=batch_size or 256, sequence=s, vocabulary=v, note=note)


def _block(s: int, h: int) -> tuple[LayerPart, ...]:
    inner, rank = 2 * h, -(-h // 16)
    return (
        norm(s, h, root_mean_square=True),
        linear(s, h, 2 * inner, bias=False),
        _short_convolution(s, inner),
        activation("silu", s * inner),
        linear(s, inner, rank + 2 * _STATE, bias=False),
        linear(s, rank, inner),
        _scan(s, inner),
        activation("silu", s * inner).parallel_branch,
        multiply(s * inner),
        linear(s, inner, h, bias=False),
        add(s * h),
    )


def _short_convolution(s: int, c: int) -> LayerPart:
    """A sum over the last tokens of each channel."""
    moved, work = 2 * VALUE * s * c, 2 * s * c * _WINDOW
    return LayerPart(
        (
            op("conv1d", "pointwise", "forward", flops=work, per_sample=moved, made=VALUE * s * c),
            op("conv1d_backward", "pointwise", "backward", flops=2 * work, per_sample=2 * moved),
        ),
        weights=(c * _WINDOW, c),
        saved=Affine(0.0, float(VALUE * s * c)),
        gradients=moved,
        depth=(1 + log2(_WINDOW), 1 + log2(s)),
    )


def _scan(s: int, c: int) -> LayerPart:
    """A linear recurrence in every channel, computed as a parallel scan; its backward runs it again."""
    moved = VALUE * s * (3 * c + 2 * _STATE)
    chain = 3 * log2(s) + 2 * log2(_STATE)
    work = 9 * s * c * _STATE
    return LayerPart(
        (
            op("selective_scan", "special", "forward", flops=work, per_sample=2 * moved, made=VALUE * s * c),
            op("selective_scan_backward", "special", "backward", flops=2.5 * work, per_sample=5 * moved),
        ),
        weights=(c * _STATE, c),
        saved=Affine(0.0, float(moved)),
        gradients=2 * moved + SINGLE * s * c,
        depth=(chain, 2 * chain),
    )
