"""A layer as one of n tensor-parallel ranks has it: its share of the work, of the parameters and of what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..models.profile import Affine, Layer, Op
from ..models.shapes import Attention, Convolution, Product, Shape, Table, shape_of
from .local import Kept, Talks, shared, times
from .roles import COLUMN, HEAD, INSIDE, LOSS, OUTSIDE, ROW, SPLIT, TABLE


@dataclass(frozen=True, slots=True)
class Part:
    """A layer and all that its local form depends on."""

    layer: Layer
    kept: Kept
    roles: tuple[str, ...]
    talks: Talks
    said: Talks
    tokens: int
    common: int

    def equals(self, other: Part) -> bool:
        """Whether a rank has the same of another one."""
        return self.layer is other.layer and (self.roles, self.talks, self.common) == (
            other.roles,
            other.talks,
            other.common,
        )


def local_layer(part: Part, n: int) -> tuple[Layer, Kept]:
    """A layer as one rank has it."""
    layer, beside = part.layer, 1.0 / n if part.tokens else 1.0
    by_name = {op.name: role for op, role in zip(layer.ops, part.roles, strict=True) if role}
    ops = []
    for op, role in zip(layer.ops, part.roles, strict=True):
        role = role or _backward_role(op, layer, part.roles, by_name)
        ops.append(_op(op, role, n, beside, _forward_of(op, layer)))
    split, largest = _divided(layer, part.roles)
    parameters = layer.parameters - split + split // n
    made = replace(
        layer,
        ops=tuple(ops),
        parameters=parameters,
        common=part.common,
        repeats=1,
        output=times(layer.output, beside),
        largest=max(largest // n, min(layer.largest, layer.parameters - split)) if split else layer.largest,
        tied=layer.tied // n if HEAD in part.roles else layer.tied,
    )
    return made, _kept(part, n, beside, parameters / layer.parameters if layer.parameters else 1.0)


def _kept(part: Part, n: int, beside: float, numbers: float) -> Kept:
    """Inside, a rank keeps 1/n; what columns read is whole."""
    inside = sum(
        op.output.per_sample * op.count
        for op, role in zip(part.layer.ops, part.roles, strict=True)
        if role in (COLUMN, INSIDE, HEAD, LOSS)
    )
    saved = part.kept.saved
    inside = min(inside, saved.per_sample)
    gathered = sum(t.bytes.per_sample for t in part.talks if t.phase == "forward" and t.collective == "all_gather")
    moving = max((t.bytes.per_sample for t in part.talks), default=0.0)
    rest = max(0.0, saved.per_sample - inside - gathered)
    per_sample = min(saved.per_sample, inside / n + gathered + rest * beside)

    def temporary(a: Affine) -> Affine:
        return Affine(a.fixed * numbers, min(a.per_sample, a.per_sample / n + 2 * moving))

    return Kept(Affine(saved.fixed, per_sample), temporary(part.kept.forward), temporary(part.kept.backward))


def _divided(layer: Layer, roles: Sequence[str]) -> tuple[int, int]:
    """Numbers of a layer that ranks divide, and the largest parameter among them."""
    sizes = []
    for op, role in zip(layer.ops, roles, strict=True):
        shape = shape_of(op)
        if role == TABLE and isinstance(shape, Table):
            sizes.append(shape.rows * shape.width)
        elif role in SPLIT and isinstance(shape, Product | Convolution):
            sizes.append(shape.numbers)
            if role != ROW and shape.bias:
                sizes.append(shape.outputs)
    # what the layer only reads, another one counts
    own = sum(sizes) - (layer.tied if HEAD in roles else 0)
    return min(layer.parameters, max(0, own)), max(sizes, default=0)


def _op(op: Op, role: str, n: int, beside: float, shape: Shape | None) -> Op:
    """An operator of one rank."""
    if role in (INSIDE, LOSS):
        return shared(op, 1.0 / n, fixed=1.0 / n)
    if role == TABLE:
        return replace(op, bytes=times(op.bytes, 1.0, 1.0 / n))
    if role in SPLIT:
        share = _bytes_share(op, role, n, shape)
        return replace(
            op,
            flops=times(op.flops, 1.0 / n, 1.0 / n),
            bytes=times(op.bytes, share, 1.0 / n),
            output=times(op.output, 1.0 if role == ROW else 1.0 / n),
        )
    return shared(op, beside)


def _bytes_share(op: Op, role: str, n: int, shape: Shape | None) -> float:
    """Columns read all inputs and give 1/n of the outputs; a row the other way round."""
    if not isinstance(shape, Product | Convolution):
        return 1.0 / n
    read, given = shape.inputs, shape.outputs
    return (read / n + given if role == ROW else read + given / n) / (read + given)


def _forward_of(op: Op, layer: Layer) -> Shape | None:
    """The sizes of a product, also of one of its two backward products: those have as many operations."""
    if op.phase == "forward":
        return shape_of(op)
    if op.kind not in ("matmul", "conv_backward"):
        return None
    for other in layer.ops:
        if other.dims and other.kind in ("matmul", "conv") and _same_work(op, other):
            return shape_of(other)
    return None


def _same_work(backward: Op, forward: Op) -> bool:
    ratio = backward.flops.per_sample / forward.flops.per_sample if forward.flops.per_sample else 0.0
    return ratio in (1.0, 2.0) if forward.kind == "conv" else abs(ratio - 1.0) < 1e-9


def _backward_role(op: Op, layer: Layer, roles: Sequence[str], by_name: dict[str, str]) -> str:
    """Of an operator of the backward: as its forward."""
    if op.kind in ("matmul", "conv_backward"):
        same = [r for o, r in zip(layer.ops, roles, strict=True) if r in SPLIT and _same_work(op, o)]
        return same[0] if same else OUTSIDE
    if op.kind == "attention_backward":
        same = [r for o, r in zip(layer.ops, roles, strict=True) if isinstance(shape_of(o), Attention)]
        return same[0] if same else OUTSIDE
    for ending in ("_backward_data", "_dense_backward", "_backward", ""):
        if op.name.endswith(ending) and op.name.removesuffix(ending) in by_name:
            role = by_name[op.name.removesuffix(ending)]
            return role if role not in SPLIT else INSIDE
    return OUTSIDE
