"""Mixtures of experts and latent attention by formula."""

from __future__ import annotations

from dataclasses import dataclass

from ..profile import Affine, ExpertLayer
from .parts import VALUE, LayerPart, activation, attention, copy, linear, log2, multiply, norm, op

HEAD_WIDTH, VALUE_WIDTH, QUERY_LATENT, KV_LATENT = 192, 128, 1536, 512
"""Latent attention as DeepSeek-V2 and V3 publish it: heads of 128 with 64 rotated values besides, and latent widths."""


@dataclass(frozen=True, slots=True)
class MixtureSize:
    """Experts of one layer."""

    experts: int
    active: int
    """Routed experts per token."""
    inner: int
    """Width of one expert."""
    shared: int = 0
    """Experts that every token visits."""

    def of(self, hidden: int) -> ExpertLayer:
        """The routed experts as a profile lists them."""
        return ExpertLayer(self.experts, self.active, self.experts * 3 * hidden * self.inner)


def mixture(s: int, h: int, z: MixtureSize) -> tuple[LayerPart, ...]:
    """A router, tokens sorted by expert, gated experts as grouped matmuls, their sum, and the shared experts."""
    rows, f = s * z.active, z.inner
    parts = [
        linear(s, h, z.experts, bias=False),
        activation("softmax", s * z.experts, kind="softmax"),
        copy("index", rows * h),
        _grouped(rows, h, f, z.experts),
        _grouped(rows, h, f, z.experts, keep=False).parallel_branch,
        activation("silu", rows * f),
        multiply(rows * f),
        _grouped(rows, f, h, z.experts),
        copy("index_add", rows * h),
    ]
    if z.shared:
        wide = z.shared * f
        parts += [
            linear(s, h, wide, bias=False, keep=False).parallel_branch,
            linear(s, h, wide, bias=False, keep=False).parallel_branch,
            activation("silu", s * wide).parallel_branch,
            multiply(s * wide).parallel_branch,
            linear(s, wide, h, bias=False).parallel_branch,
        ]
    return tuple(parts)


def _grouped(rows: int, k: int, n: int, experts: int, *, keep: bool = True) -> LayerPart:
    """Rows sorted by expert times the matrix of each expert, in one kernel."""
    work, weight, moved = 2 * rows * k * n, VALUE * experts * k * n, VALUE * rows * (k + n)
    backward = op("grouped_mm", "matmul", "backward", flops=work, fixed=weight, per_sample=moved)
    return LayerPart(
        (
            op("grouped_mm", "matmul", "forward", flops=work, fixed=weight, per_sample=moved, made=VALUE * rows * n),
            backward,
            backward,
        ),
        weights=(experts * k * n,),
        saved=Affine(0.0, float(VALUE * rows * k if keep else 0)),
        gradients=VALUE * rows * (k + n),
        depth=(1 + log2(k), 1 + log2(n)),
    )


def latent_projections(s: int, h: int, heads: int) -> tuple[LayerPart, ...]:
    """Queries, keys and values through narrow widths, attention over their heads, and the output."""
    q, v = heads * HEAD_WIDTH, heads * VALUE_WIDTH
    rotated = HEAD_WIDTH - VALUE_WIDTH
    wide = (HEAD_WIDTH + VALUE_WIDTH) // 2  # scores and sums of values cost as much as with heads of the mean width
    return (
        linear(s, h, QUERY_LATENT, bias=False),
        norm(s, QUERY_LATENT, root_mean_square=True),
        linear(s, QUERY_LATENT, q, bias=False),
        linear(s, h, KV_LATENT + rotated, bias=False, keep=False).parallel_branch,
        norm(s, KV_LATENT, root_mean_square=True).parallel_branch,
        linear(s, KV_LATENT, 2 * v, bias=False).parallel_branch,
        copy("rotary", s * q),
        attention(s, heads * wide, heads * wide, heads),
        linear(s, v, h, bias=False),
    )
