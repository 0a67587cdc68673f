"""Layer models: work, bytes and depth of common layers as functions of their sizes, from the zoo.

A multiplication and an addition count as two operations. Bytes are read and written in bf16, weights once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import InputError
from ..models.zoo import convolution as _convolution
from ..models.zoo import parts, recurrent
from ..models.zoo.parts import LayerPart


@dataclass(frozen=True, slots=True)
class LayerModel:
    """One layer on n samples."""

    work: float
    """W: operations of the forward."""
    bytes: float
    """Bytes that the forward reads and writes."""
    depth: float
    """D: longest chain of dependent operations in the forward."""
    backward_work: float
    backward_bytes: float
    backward_depth: float
    parameters: int
    saved: float
    """Bytes kept for the backward."""

    @property
    def intensity(self) -> float:
        """Operations per byte of the forward, for a roofline."""
        return self.work / self.bytes

    @property
    def parallelism(self) -> float:
        """W / D of the forward."""
        return self.work / self.depth if self.depth else 0.0


def linear(rows: int, inputs: int, outputs: int, *, bias: bool = True, n: int = 1) -> LayerModel:
    """W = 2 rows k n, D = 1 + log2 k (+ 1 for the bias): all products in parallel, then a tree of sums."""
    _sizes(rows=rows, inputs=inputs, outputs=outputs, n=n)
    return _model(parts.linear(rows, inputs, outputs, bias=bias), n)


def convolution(
    channels: int, outputs: int, kernel: int, side: int, *, stride: int = 1, bias: bool = False, n: int = 1
) -> LayerModel:
    """W = 2 c n k^2 (side/stride)^2, D = 1 + log2(c k^2)."""
    _sizes(channels=channels, outputs=outputs, kernel=kernel, side=side, stride=stride, n=n)
    part = _convolution.conv(channels, outputs, kernel, side, stride=stride, bias=bias, keep=True)
    return _model(part, n)


def pooling(channels: int, kernel: int, side: int, *, maximum: bool = True, n: int = 1) -> LayerModel:
    """Windows of k x k without overlap: W = k^2 - 1 operations per window, D = log2 k^2."""
    _sizes(channels=channels, kernel=kernel, side=side, n=n)
    after = side // kernel
    if not after:
        raise InputError(f"windows of {kernel} in {side} values", rule="kernel <= side")
    before, values = channels * (after * kernel) ** 2, channels * after * after
    name = "max" if maximum else "mean"
    made = _model(_convolution.pooled(name, before, values, indices=maximum), n)
    return _counted(made, n * (before - values), n * before)


def attention(tokens: int, width: int, heads: int, *, kv_heads: int | None = None, n: int = 1) -> LayerModel:
    """Fused: W = 4 s^2 h, D = 5 + log2(h/heads) + 3 log2 s; it keeps inputs and output, not the s x s scores."""
    kv = heads if kv_heads is None else kv_heads
    _sizes(tokens=tokens, width=width, heads=heads, kv_heads=kv, n=n)
    if width % heads or heads % kv:
        rule = "heads divide the width, kv_heads the heads"
        raise InputError(f"width {width}, {heads} heads, {kv} of keys", rule=rule)
    return _model(parts.attention(tokens, width, width * kv // heads, heads), n)


def normalisation(rows: int, width: int, *, root_mean_square: bool = False, n: int = 1) -> LayerModel:
    """Layer norm: W = 8 rows h (two sums, one pass to apply), or 4 rows h for RMS norm; D = 5 + 2 log2 h."""
    _sizes(rows=rows, width=width, n=n)
    made = _model(parts.norm(rows, width, root_mean_square=root_mean_square), n)
    each = 4 if root_mean_square else 8
    return _counted(made, n * each * rows * width, 2 * n * each * rows * width)


def embedding(tokens: int, rows: int, width: int, *, n: int = 1) -> LayerModel:
    """W = 0: rows are copied, D = 1; the backward adds each of them once."""
    _sizes(tokens=tokens, rows=rows, width=width, n=n)
    made = _model(parts.embedding(tokens, rows, width), n)
    return _counted(made, 0.0, n * tokens * width)


def recurrence(tokens: int, width: int, *, n: int = 1) -> LayerModel:
    """An LSTM layer: W = 16 s h^2, D = s (7 + log2 h) + 1 + log2 h: tokens form a chain of any width."""
    _sizes(tokens=tokens, width=width, n=n)
    return _model(recurrent.lstm_layer(tokens, width), n)


def _model(part: LayerPart, n: int) -> LayerModel:
    def total(phase: str) -> tuple[float, float]:
        ops = [op for op in part.ops if op.phase == phase]
        return sum(op.flops.at(n) * op.count for op in ops), sum(op.bytes.at(n) * op.count for op in ops)

    (work, moved), (back_work, back_moved) = total("forward"), total("backward")
    down, up = part.depth
    return LayerModel(work, moved, down, back_work, back_moved, up, sum(part.weights), part.saved.at(n))


def _counted(made: LayerModel, work: float, backward_work: float) -> LayerModel:
    """Add the operations of a memory-bound layer, which the zoo does not count."""
    return LayerModel(
        float(work),
        made.bytes,
        made.depth,
        float(backward_work),
        made.backward_bytes,
        made.backward_depth,
        made.parameters,
        made.saved,
    )


def _sizes(**sizes: int) -> None:
    for word, size in sizes.items():
        if size < 1:
            raise InputError(f"{word} = {size}", rule="sizes are at least 1")
