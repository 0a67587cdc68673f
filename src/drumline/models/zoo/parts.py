"""Parts of layers (a linear map, an attention, a norm, ...), each by formula.

A part has its operators forward and backward, its parameters, kept activations and depth. Sizes: t rows (tokens) per
sample, k values in and n values out of a row, s tokens of a sequence, c channels. A value takes two bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..op_shapes import AttentionShape, EmbeddingShape, MatmulShape, NormShape, OpShape, dims
from ..profile import Affine, ProfiledOp

VALUE = 2
"""Bytes of an activation, and of a weight as operators read it: bf16."""
SINGLE = 4
"""Bytes of a value in fp32: statistics, the loss, and the parameters themselves."""
INDEX = 8
"""Bytes of a token, a class or the index of a maximum: int64."""

NOTHING = Affine()


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One part of a layer."""

    ops: tuple[ProfiledOp, ...]
    weights: tuple[int, ...] = ()
    """Elements of each of its parameters."""
    saved: Affine = NOTHING
    """Bytes kept for its backward. A value that two parts need counts once, with the first."""
    temporary: float = 0.0
    """Bytes per sample that its forward writes and does not keep."""
    gradients: float = 0.0
    """Bytes per sample of activation gradients alive at once in its backward."""
    depth: tuple[float, float] = (0.0, 0.0)
    """Longest chain of unit operations, forward and backward."""
    buffers: float = 0.0
    """Bytes of untrained state."""
    tied: int = 0
    """Trained parameters that it reads and another part counts."""

    @property
    def parallel_branch(self) -> LayerPart:
        """The same part in parallel to an equally long one: it adds nothing to the longest chain."""
        return replace(self, depth=(0.0, 0.0))


def log2(n: float) -> int:
    """Depth of a reduction over n values."""
    return math.ceil(math.log2(n)) if n > 1 else 0


def op(
    name: str,
    kind: str,
    phase: str,
    *,
    flops: float = 0,
    fixed: float = 0,
    per_sample: float = 0,
    made: float = 0,
    shape: OpShape | None = None,
) -> ProfiledOp:
    """An operator: `flops` per sample, `fixed` and `per_sample` bytes moved, a result of `made` bytes per sample."""
    work, moved, output = Affine(0.0, float(flops)), Affine(float(fixed), float(per_sample)), Affine(0.0, float(made))
    return ProfiledOp(name, kind, phase, work, moved, output=output, dims=dims(shape) if shape else ())


def kept(values: float, *, fixed: float = 0.0) -> Affine:
    """Bytes of `values` activations per sample."""
    return Affine(fixed, float(VALUE * values))


def linear(
    t: int, k: int, n: int, *, bias: bool = True, keep: bool = True, tied: bool = False, first: bool = False
) -> LayerPart:
    """y = x W + b.

    `keep`: x is not kept by an earlier part. `tied`: W is counted elsewhere. `first`: x needs no gradient.
    """
    work = 2 * t * k * n
    weight, moved = VALUE * k * n, VALUE * t * (k + n)
    name, read = ("addmm", weight + VALUE * n) if bias else ("mm", weight)
    shape = MatmulShape(t, k, n, int(bias))
    ops = [op(name, "matmul", "forward", flops=work, fixed=read, per_sample=moved, made=VALUE * t * n, shape=shape)]
    if not first:
        ops.append(op("mm", "matmul", "backward", flops=work, fixed=weight, per_sample=moved))
    ops.append(op("mm", "matmul", "backward", flops=work, fixed=weight, per_sample=moved))
    if bias:
        ops.append(op("sum", "reduce", "backward", fixed=VALUE * n, per_sample=VALUE * t * n))
    return LayerPart(
        tuple(ops),
        weights=() if tied else (k * n, n) if bias else (k * n,),
        saved=kept(t * k if keep else 0),
        gradients=VALUE * t * (n if first else k + n),
        depth=(1 + log2(k) + bias, 1 + log2(t if first else n)),
        tied=k * n if tied else 0,
    )


def attention(s: int, width: int, kv_width: int, heads: int) -> LayerPart:
    """Fused attention over all pairs of s tokens; its backward recomputes the scores instead of keeping s * s."""
    work = 4 * s * s * width
    own, shared, sums = VALUE * s * width, VALUE * s * kv_width, SINGLE * s * heads
    chain = 2 + log2(width // heads) + log2(s) + 2 * log2(s) + 3  # scores, values, and the softmax between them
    forward = op(
        "scaled_dot_product_attention",
        "attention",
        "forward",
        flops=work,
        per_sample=2 * own + 2 * shared + sums,
        made=own + sums,
        shape=AttentionShape(s, heads, kv_width * heads // width, width // heads, 0),
    )
    backward = op(
        "scaled_dot_product_attention_backward",
        "attention_backward",
        "backward",
        flops=2.5 * work,
        per_sample=4 * own + 4 * shared + sums,
    )
    return LayerPart(
        (forward, backward),
        saved=Affine(0.0, own + 2 * shared + sums),
        gradients=2 * own + 2 * shared + SINGLE * s * width + sums,  # the gradient of queries is summed in fp32
        depth=(chain, chain + 2 + log2(s)),
    )


def norm(t: int, n: int, *, root_mean_square: bool = False, keep: bool = True) -> LayerPart:
    """Layer normalisation of rows of n values, or by their root mean square alone."""
    name = "rms_norm" if root_mean_square else "native_layer_norm"
    terms = 1 if root_mean_square else 2
    statistics = SINGLE * terms * t
    moved, affine = VALUE * t * n, SINGLE * terms * n
    return LayerPart(
        (
            op(
                name,
                "norm",
                "forward",
                fixed=affine,
                per_sample=2 * moved + statistics,
                made=moved + statistics,
                shape=NormShape(n, terms),
            ),
            op(f"{name}_backward", "norm", "backward", fixed=2 * affine, per_sample=3 * moved + statistics),
        ),
        weights=(n,) * terms,
        saved=Affine(0.0, (moved if keep else 0) + statistics),
        gradients=2 * moved,
        depth=(terms * (log2(n) + 1) + 3, 2 * log2(n) + 4),
    )


def activation(
    name: str, values: int, *, keep: bool = True, kind: str = "special", in_place: bool = False
) -> LayerPart:
    """One function of each value; `keep`: the input of its backward is not kept by an earlier part."""
    return LayerPart(
        (
            op(name, kind, "forward", per_sample=2 * VALUE * values, made=0 if in_place else VALUE * values),
            op(f"{name}_backward", kind, "backward", per_sample=3 * VALUE * values),
        ),
        saved=kept(values if keep else 0),
        gradients=2 * VALUE * values,
        depth=(1, 1),
    )


def add(values: int, *, in_place: bool = False) -> LayerPart:
    """The sum of two branches; in the backward, their gradients are summed where they branch."""
    return LayerPart(
        (
            op("add", "pointwise", "forward", per_sample=3 * VALUE * values, made=0 if in_place else VALUE * values),
            op("add", "pointwise", "backward", per_sample=3 * VALUE * values),
        ),
        temporary=0 if in_place else VALUE * values,
        depth=(1, 1),
    )


def multiply(values: int) -> LayerPart:
    """The product of two branches, both kept."""
    return LayerPart(
        (
            op("mul", "pointwise", "forward", per_sample=3 * VALUE * values, made=VALUE * values),
            op("mul", "pointwise", "backward", per_sample=3 * VALUE * values),
            op("mul", "pointwise", "backward", per_sample=3 * VALUE * values),
        ),
        saved=kept(2 * values),
        gradients=3 * VALUE * values,
        depth=(1, 1),
    )


def copy(name: str, values: int) -> LayerPart:
    """A pass that moves values and keeps none: a rotation by position, a concatenation."""
    moved = 2 * VALUE * values
    return LayerPart(
        (
            op(name, "pointwise", "forward", per_sample=moved, made=VALUE * values),
            op(f"{name}_backward", "pointwise", "backward", per_sample=moved),
        ),
        temporary=VALUE * values,
        gradients=moved,
        depth=(1, 1),
    )


def embedding(s: int, rows: int, n: int, *, tied: bool = False) -> LayerPart:
    """s rows of a table. If `tied`, the head's gradient of the table is added to its own."""
    table, moved = rows * n, VALUE * s * n
    ops = [
        op(
            "embedding",
            "gather",
            "forward",
            per_sample=2 * moved + INDEX * s,
            made=moved,
            shape=EmbeddingShape(rows, n, s),
        ),
        op("embedding_dense_backward", "gather", "backward", fixed=SINGLE * table, per_sample=3 * moved + INDEX * s),
    ]
    if tied:
        ops.append(op("add", "pointwise", "backward", fixed=3 * SINGLE * table))
    return LayerPart(tuple(ops), weights=(table,), saved=Affine(0.0, float(INDEX * s)), gradients=moved, depth=(1, 1))


def position(s: int, rows: int, n: int) -> LayerPart:
    """A learned row per position, added to the tokens; its gradient is a sum over the samples."""
    moved = VALUE * s * n
    return LayerPart(
        (
            op("add", "pointwise", "forward", fixed=moved, per_sample=2 * moved, made=moved),
            op("sum", "reduce", "backward", fixed=SINGLE * rows * n, per_sample=moved),
        ),
        weights=(rows * n,),
        temporary=moved,
        gradients=moved,
        depth=(1, 0),
    )


def cross_entropy(t: int, classes: int) -> LayerPart:
    """Mean cross entropy of t rows of logits, in fp32; the caller still keeps the logits."""
    values = t * classes
    return LayerPart(
        (
            op("_to_copy", "pointwise", "forward", per_sample=(VALUE + SINGLE) * values, made=SINGLE * values),
            op("_log_softmax", "softmax", "forward", per_sample=2 * SINGLE * values, made=SINGLE * values),
            op("nll_loss", "gather", "forward", fixed=SINGLE, per_sample=(SINGLE + INDEX) * t),
            op("nll_loss_backward", "pointwise", "backward", per_sample=SINGLE * values + INDEX * t),
            op("_log_softmax_backward_data", "softmax", "backward", per_sample=3 * SINGLE * values),
            op("_to_copy", "pointwise", "backward", per_sample=(VALUE + SINGLE) * values),
        ),
        saved=Affine(0.0, float(SINGLE * values)),
        temporary=(VALUE + SINGLE) * values,
        gradients=(VALUE + 2 * SINGLE) * values,
        depth=(2 * log2(classes) + 4 + log2(t), log2(classes) + 3),
    )
