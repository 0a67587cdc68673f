"""One rank's part of a model: a profile with its own amounts, and what it tells the ranks that have the other parts.

A plan that splits the model (tile, cp, tp) makes such a profile, axis after axis, as the engine spreads its graph; all
that prices a profile then prices a rank of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..core.errors import PlanError
from ..models.profile import Affine, Layer, Op, Profile
from ..theory.roofline import BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Talk:
    """A message that a layer waits for, in the forward or in the backward of every micro-batch."""

    axis: str
    """`tp`, `cp`, `rows` or `columns` (of tiles)."""
    phase: str
    """`forward` or `backward`."""
    collective: str
    """Of the cost model's collectives; `send` is to a neighbour, `ring` to the next rank while it computes."""
    bytes: Affine
    """Of the whole buffer, in values as wide as the profile's activations; of a send, what this rank sends."""
    wide: bool = False
    """Whether its values are as wide as parameters, whatever the plan's precision: autocast leaves norms, residuals
    and gradients of parameters so."""

    def size(self, n: float, precision: str, profile: Profile) -> float:
        """Bytes for n samples."""
        width = profile.parameter_bytes if self.wide else BYTES_PER_VALUE[precision]
        return self.bytes.at(n) * width / profile.activation_bytes


Talks = tuple[Talk, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank has."""

    profile: Profile
    talks: tuple[Talks, ...]
    """By layer of the profile; each of its repeats says the same."""
    notes: tuple[str, ...] = ()
    """What had to be assumed."""


def whole(profile: Profile) -> Local:
    """A rank that has all of it."""
    return Local(profile, ((),) * len(profile.layers))


def undivided(local: Local, key: str, what: str) -> Local:
    """Where a profile does not know what a plan divides. A trace leaves that to the engine; a formula knows."""
    name = local.profile.name
    if local.profile.origin != "traced":
        raise PlanError(f"{key} for {name}, which has no {what}", rule="the plan splits what is there")
    note = f"{key} is priced as if it divided nothing: the trace of {name} shows no {what}"
    return replace(local, notes=(*local.notes, note))


def times(a: Affine, per_sample: float, fixed: float = 1.0) -> Affine:
    """An amount of which a rank has a share."""
    return Affine(a.fixed * fixed, a.per_sample * per_sample)


def shared(op: Op, share: float, *, fixed: float = 1.0) -> Op:
    """An operator of which a rank does a share: of what belongs to samples, and of what does not."""
    return replace(
        op,
        flops=times(op.flops, share, fixed),
        bytes=times(op.bytes, share, fixed),
        output=times(op.output, share, fixed),
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """What a layer adds to the memory of a step, apart from what others do."""

    saved: Affine
    forward: Affine
    """Alive in its forward beyond all that is kept."""
    backward: Affine


def kept_by(profile: Profile) -> list[Kept]:
    """By layer."""
    found = []
    sums = Affine()
    for x in profile.layers:
        sums = sums + times(x.saved, x.repeats, x.repeats)
        found.append(Kept(x.saved, _less(x.live_forward, sums), x.local_backward))
    return found


def with_layers(profile: Profile, layers: Sequence[Layer], kept: Sequence[Kept]) -> Profile:
    """The profile with other layers, whose live memory is summed along the model anew."""
    made = []
    sums = Affine()
    for x, k in zip(layers, kept, strict=True):
        sums = sums + times(k.saved, x.repeats, x.repeats)
        made.append(
            replace(
                x,
                saved=k.saved,
                live_forward=sums + k.forward,
                live_backward=sums + k.backward,
                local_backward=k.backward,
            )
        )
    return replace(profile, layers=tuple(made))


def each_layer(local: Local, change: Callable[[Layer, Kept], tuple[Layer, Kept, Talks]]) -> Local:
    """Every layer changed; what is said already stays."""
    layers, kept, talks = [], [], []
    for x, k, said in zip(local.profile.layers, kept_by(local.profile), local.talks, strict=True):
        layer, own, more = change(x, k)
        layers.append(layer)
        kept.append(own)
        talks.append((*said, *more))
    return Local(with_layers(local.profile, layers, kept), tuple(talks), local.notes)


def _less(a: Affine, b: Affine) -> Affine:
    return Affine(max(0.0, a.fixed - b.fixed), max(0.0, a.per_sample - b.per_sample))
