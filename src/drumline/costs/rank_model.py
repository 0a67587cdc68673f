"""One rank's part of a model: a profile with its own amounts, and its messages to the ranks of the other parts.

A plan that splits the model (tile, cp, tp) makes such a profile, axis after axis, as the engine partitions its graph.
Whatever prices a profile then prices a rank of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..core.errors import PlanError
from ..models.op_shapes import EmbeddingShape, shape_of
from ..models.profile import Affine, Layer, Profile, ProfiledOp
from ..theory.roofline import STORED_BYTES


@dataclass(frozen=True, slots=True)
class LayerMessage:
    """A message that a layer waits for, in the forward or in the backward of every micro-batch."""

    axis: str
    """`tp`, `cp`, `ep`, `rows` or `columns` (of tiles)."""
    phase: str
    """`forward` or `backward`."""
    collective: str
    """A collective of the cost model; `send` is to a neighbour, `ring` to the next rank while it computes."""
    bytes: Affine
    """Of the whole buffer, in values as wide as the profile's activations; of a send, what this rank sends."""
    wide: bool = False
    """Whether its values are as wide as parameters, whatever the plan's precision: autocast leaves norms, residuals
    and gradients of parameters so."""

    def size(self, n: float, precision: str, profile: Profile) -> float:
        """Bytes for n samples."""
        width = profile.parameter_bytes if self.wide else STORED_BYTES[precision]
        return self.bytes.at(n) * width / profile.activation_bytes


LayerMessages = tuple[LayerMessage, ...]


@dataclass(frozen=True, slots=True)
class RankModel:
    """The part of a model on one rank."""

    profile: Profile
    messages: tuple[LayerMessages, ...]
    """By layer of the profile; each of its repeats exchanges the same."""
    notes: tuple[str, ...] = ()
    """Assumptions."""


def whole_model(profile: Profile) -> RankModel:
    """A rank that has all of the model."""
    return RankModel(profile, ((),) * len(profile.layers))


def not_split(rank: RankModel, key: str, what: str) -> RankModel:
    """Where a profile does not show what a plan splits. A trace leaves that to the engine; a formula knows."""
    name = rank.profile.name
    if rank.profile.origin != "traced":
        raise PlanError(f"{key} for {name}, which has no {what}", rule="a plan can only split what the model has")
    note = f"{key} is priced as if it divided nothing: the trace of {name} shows no {what}"
    return replace(rank, notes=(*rank.notes, note))


def tokens_of(profile: Profile) -> int:
    """Tokens of a sample; 0 where samples are not sequences of tokens."""
    shapes = (shape_of(op) for x in profile.layers for op in x.ops)
    tokens = max((s.tokens for s in shapes if isinstance(s, EmbeddingShape)), default=0)
    return tokens if tokens > 1 else 0


def scaled(a: Affine, per_sample: float, fixed: float = 1.0) -> Affine:
    """An amount of which a rank has a share."""
    return Affine(a.fixed * fixed, a.per_sample * per_sample)


def scaled_op(op: ProfiledOp, share: float, *, fixed: float = 1.0) -> ProfiledOp:
    """An operator of which a rank does a share: of what scales with samples, and of what does not."""
    return replace(
        op,
        flops=scaled(op.flops, share, fixed),
        bytes=scaled(op.bytes, share, fixed),
        output=scaled(op.output, share, fixed),
    )


@dataclass(frozen=True, slots=True)
class LayerActivationMemory:
    """The memory that a layer adds to a step, independent of other layers."""

    saved: Affine
    forward: Affine
    """Alive in its forward beyond all that is saved."""
    backward: Affine


def memory_by_layer(profile: Profile) -> list[LayerActivationMemory]:
    """The memory that each layer adds."""
    added = []
    sums = Affine()
    for x in profile.layers:
        sums = sums + scaled(x.saved, x.repeats, x.repeats)
        added.append(LayerActivationMemory(x.saved, _less(x.live_forward, sums), x.local_backward))
    return added


def with_layers(profile: Profile, layers: Sequence[Layer], memory: Sequence[LayerActivationMemory]) -> Profile:
    """The profile with other layers, whose live memory is summed along the model again."""
    made = []
    sums = Affine()
    for x, m in zip(layers, memory, strict=True):
        sums = sums + scaled(m.saved, x.repeats, x.repeats)
        made.append(
            replace(
                x,
                saved=m.saved,
                live_forward=sums + m.forward,
                live_backward=sums + m.backward,
                local_backward=m.backward,
            )
        )
    return replace(profile, layers=tuple(made))


def map_layers(
    rank: RankModel,
    change: Callable[[Layer, LayerActivationMemory], tuple[Layer, LayerActivationMemory, LayerMessages]],
) -> RankModel:
    """Change every layer; messages that it has already stay."""
    layers, memory, messages = [], [], []
    for x, m, before in zip(rank.profile.layers, memory_by_layer(rank.profile), rank.messages, strict=True):
        layer, own, more = change(x, m)
        layers.append(layer)
        memory.append(own)
        messages.append((*before, *more))
    return RankModel(with_layers(rank.profile, layers, memory), tuple(messages), rank.notes)


def _less(a: Affine, b: Affine) -> Affine:
    return Affine(max(0.0, a.fixed - b.fixed), max(0.0, a.per_sample - b.per_sample))
