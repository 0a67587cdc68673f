"""One tensor-parallel rank's part of a layer: its share of the work, of the parameters and of saved activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..models.op_shapes import AttentionShape, ConvolutionShape, EmbeddingShape, MatmulShape, OpShape, shape_of
from ..models.profile import Affine, Layer, ProfiledOp
from .rank_model import LayerActivationMemory, LayerMessages, scaled, scaled_op
from .tensor_roles import COLUMN, HEAD, INSIDE, LOSS, OUTSIDE, ROW, SPLIT, TABLE


@dataclass(frozen=True, slots=True)
class TensorLayer:
    """A layer and all that its part on one rank depends on."""

    layer: Layer
    memory: LayerActivationMemory
    roles: tuple[str, ...]
    messages: LayerMessages
    earlier: LayerMessages
    """Messages of the axes that were split before."""
    tokens: int
    common: int

    def equals(self, other: TensorLayer) -> bool:
        """Whether a rank has the same part of another layer."""
        return self.layer is other.layer and (self.roles, self.messages, self.common) == (
            other.roles,
            other.messages,
            other.common,
        )


def local_layer(part: TensorLayer, n: int) -> tuple[Layer, LayerActivationMemory]:
    """The part of one of n ranks."""
    layer, outside = part.layer, 1.0 / n if part.tokens else 1.0
    by_name = {op.name: role for op, role in zip(layer.ops, part.roles, strict=True) if role}
    ops = []
    for op, role in zip(layer.ops, part.roles, strict=True):
        role = role or _backward_role(op, layer, part.roles, by_name)
        ops.append(_op(op, role, n, outside, _forward_of(op, layer)))
    split, largest = _split_numbers(layer, part.roles)
    parameters = layer.parameters - split + split // n
    made = replace(
        layer,
        ops=tuple(ops),
        parameters=parameters,
        tp_replicated=part.common,
        repeats=1,
        output=scaled(layer.output, outside),
        largest=max(largest // n, min(layer.largest, layer.parameters - split)) if split else layer.largest,
        tied=layer.tied // n if HEAD in part.roles else layer.tied,
    )
    return made, _memory(part, n, outside, parameters / layer.parameters if layer.parameters else 1.0)


def _memory(part: TensorLayer, n: int, outside: float, numbers: float) -> LayerActivationMemory:
    """Between columns and row a rank saves 1/n; the input of columns is whole."""
    inside = sum(
        op.output.per_sample * op.count
        for op, role in zip(part.layer.ops, part.roles, strict=True)
        if role in (COLUMN, INSIDE, HEAD, LOSS)
    )
    saved = part.memory.saved
    inside = min(inside, saved.per_sample)
    gathered = sum(m.bytes.per_sample for m in part.messages if m.phase == "forward" and m.collective == "all_gather")
    moving = max((m.bytes.per_sample for m in part.messages), default=0.0)
    rest = max(0.0, saved.per_sample - inside - gathered)
    per_sample = min(saved.per_sample, inside / n + gathered + rest * outside)

    def temporary(a: Affine) -> Affine:
        return Affine(a.fixed * numbers, min(a.per_sample, a.per_sample / n + 2 * moving))

    return LayerActivationMemory(
        Affine(saved.fixed, per_sample), temporary(part.memory.forward), temporary(part.memory.backward)
    )


def _split_numbers(layer: Layer, roles: Sequence[str]) -> tuple[int, int]:
    """Parameters of a layer that ranks divide, and the largest tensor among them."""
    sizes = []
    for op, role in zip(layer.ops, roles, strict=True):
        shape = shape_of(op)
        if role == TABLE and isinstance(shape, EmbeddingShape):
            sizes.append(shape.rows * shape.width)
        elif role in SPLIT and isinstance(shape, MatmulShape | ConvolutionShape):
            sizes.append(shape.numbers)
            if role != ROW and shape.bias:
                sizes.append(shape.outputs)
    # a tied table is counted by another layer
    own = sum(sizes) - (layer.tied if HEAD in roles else 0)
    return min(layer.parameters, max(0, own)), max(sizes, default=0)


def _op(op: ProfiledOp, role: str, n: int, outside: float, shape: OpShape | None) -> ProfiledOp:
    """An operator of one rank."""
    if role in (INSIDE, LOSS):
        return scaled_op(op, 1.0 / n, fixed=1.0 / n)
    if role == TABLE:
        return replace(op, bytes=scaled(op.bytes, 1.0, 1.0 / n))
    if role in SPLIT:
        share = _bytes_share(op, role, n, shape)
        return replace(
            op,
            flops=scaled(op.flops, 1.0 / n, 1.0 / n),
            bytes=scaled(op.bytes, share, 1.0 / n),
            output=scaled(op.output, 1.0 if role == ROW else 1.0 / n),
        )
    return scaled_op(op, outside)


def _bytes_share(op: ProfiledOp, role: str, n: int, shape: OpShape | None) -> float:
    """Columns read all inputs and write 1/n of the outputs; a row does the opposite."""
    if not isinstance(shape, MatmulShape | ConvolutionShape):
        return 1.0 / n
    read, written = shape.inputs, shape.outputs
    return (read / n + written if role == ROW else read + written / n) / (read + written)


def _forward_of(op: ProfiledOp, layer: Layer) -> OpShape | None:
    """The shape of a matmul, also for one of its two backward matmuls: those have as many operations."""
    if op.phase == "forward":
        return shape_of(op)
    if op.kind not in ("matmul", "conv_backward"):
        return None
    for other in layer.ops:
        if other.dims and other.kind in ("matmul", "conv") and _same_work(op, other):
            return shape_of(other)
    return None


def _same_work(backward: ProfiledOp, forward: ProfiledOp) -> bool:
    ratio = backward.flops.per_sample / forward.flops.per_sample if forward.flops.per_sample else 0.0
    return ratio in (1.0, 2.0) if forward.kind == "conv" else abs(ratio - 1.0) < 1e-9


def _backward_role(op: ProfiledOp, layer: Layer, roles: Sequence[str], by_name: dict[str, str]) -> str:
    """The role of an operator of the backward: that of its forward."""
    if op.kind in ("matmul", "conv_backward"):
        same = [r for o, r in zip(layer.ops, roles, strict=True) if r in SPLIT and _same_work(op, o)]
        return same[0] if same else OUTSIDE
    if op.kind == "attention_backward":
        same = [r for o, r in zip(layer.ops, roles, strict=True) if isinstance(shape_of(o), AttentionShape)]
        return same[0] if same else OUTSIDE
    for ending in ("_backward_data", "_dense_backward", "_backward", ""):
        if op.name.endswith(ending) and op.name.removesuffix(ending) in by_name:
            role = by_name[op.name.removesuffix(ending)]
            return role if role not in SPLIT else INSIDE
    return OUTSIDE
