"""Assembles parts into layers, and layers into a `Profile` whose live memory is summed along the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..profile import Affine, ExpertLayer, Layer, Profile, ProfiledOp
from .parts import LayerPart

COMMON_NOTES = (
    "by formula: activations and the weights that operators read take 2 bytes per value (bf16), "
    "the loss and statistics 4; parameters are 4-byte masters",
    "operations count matmuls, attention and convolutions only; other operators are priced by their bytes",
    "no dropout; casts of weights between 4 and 2 bytes are not counted",
)


_KEEP_RESULTS = ("norm", "attention", "softmax", "recurrent", "reduce")
"""Kinds of operators whose backward reads their result; the others read their input."""

_ENDS = ("embedding", "head")
"""They may share a weight, so under zero=3 they belong to the unit of the whole model."""


@dataclass(frozen=True, slots=True)
class LayerDraft:
    """A layer before its position in the model is known."""

    name: str
    kind: str
    parts: tuple[LayerPart, ...]
    output: float
    """Bytes per sample of its output."""
    carried: float = 0.0
    """Bytes per sample of a gradient that bypasses its parts: of a residual connection."""
    repeats: int = 1
    experts: ExpertLayer | None = None

    def layer(self, before: Affine) -> Layer:
        """The layer, given the bytes kept by the layers before it; live values are of its last repeat."""
        weights = [n for part in self.parts for n in part.weights]
        saved = sum((part.saved for part in self.parts), Affine())
        local = max(part.gradients for part in self.parts) + self.carried
        after = before + saved.times(self.repeats)
        forward = self.output + max(part.temporary for part in self.parts)
        return Layer(
            name=self.name,
            kind=self.kind,
            parameters=sum(weights),
            tensors=len(weights),
            largest=max(weights, default=0),
            tied=sum(part.tied for part in self.parts),
            ops=_forward(self.parts)
            + tuple(op for part in reversed(self.parts) for op in part.ops if op.phase == "backward"),
            saved=saved,
            output=Affine(0.0, float(self.output)),
            live_forward=after + Affine(0.0, float(forward)),
            live_backward=after + Affine(0.0, float(local)),
            local_backward=Affine(0.0, float(local)),
            depth_forward=float(sum(part.depth[0] for part in self.parts)),
            depth_backward=float(sum(part.depth[1] for part in self.parts)),
            composite=len(self.parts) > 1,
            shard_unit=len(self.parts) > 1 and sum(weights) >= 2**14 and self.name not in _ENDS,
            repeats=self.repeats,
            experts=self.experts,
        )


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Cost of an update per trained parameter."""

    name: str
    state: float
    """Bytes of state."""
    moved: float
    """Bytes read and written: the parameter, its gradient and the state, all in fp32."""
    ops: float
    """Operators per parameter tensor."""


ADAMW = OptimizerCost("AdamW", 8.0, 28.0, 14.0)
MOMENTUM = OptimizerCost("SGD", 4.0, 20.0, 3.0)


def assemble(
    name: str,
    drafts: Iterable[LayerDraft],
    *,
    batch_size: int,
    input: float,
    notes: tuple[str, ...],
    optimizer: OptimizerCost = ADAMW,
) -> Profile:
    """A profile of the drafts in execution order; `input` is bytes of inputs and targets per sample."""
    drafts = tuple(drafts)
    layers: list[Layer] = []
    before = Affine()
    for draft in drafts:
        layer = draft.layer(before)
        before = before + layer.saved.times(layer.repeats)
        layers.append(layer)
    return Profile(
        name=name,
        batch_size=batch_size,
        layers=tuple(layers),
        optimizer=optimizer.name,
        state_per_parameter=optimizer.state,
        optimizer_bytes=optimizer.moved,
        optimizer_ops=optimizer.ops,
        activation_bytes=2,
        buffers=sum(part.buffers * draft.repeats for draft in drafts for part in draft.parts),
        input=Affine(0.0, float(input)),
        depth=Affine(sum((x.depth_forward + x.depth_backward) * x.repeats for x in layers)),
        notes=(*notes, *COMMON_NOTES),
    )


def _forward(parts: tuple[LayerPart, ...]) -> tuple[ProfiledOp, ...]:
    """The forward operators in execution order; no backward needs the results of the last ones."""
    needed = len(parts)
    while needed > 1 and not (parts[needed - 1].weights or parts[needed - 1].saved != Affine()):
        needed -= 1  # it keeps nothing: a sum of two branches
    ends = [op for op in parts[needed - 1].ops if op.phase == "forward"]
    if not any(op.kind in _KEEP_RESULTS or op.name in ("relu", "tanh") for op in ends):
        needed -= 1  # it keeps its input
    ops = [
        op if i < needed else replace(op, recompute="never")
        for i, part in enumerate(parts)
        for op in part.ops
        if op.phase == "forward"
    ]
    last = max((i for i, op in enumerate(ops) if op.output != Affine()), default=0)
    ops[last] = replace(ops[last], is_output=True)  # the operators after it write in place
    return tuple(ops)
