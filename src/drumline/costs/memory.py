"""Peak memory of one rank, in parts that add up: what is held all the time, and the worst moment of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..models.profile import Affine, Layer, Profile
from ..models.selective import kept_bytes
from ..plans import Plan
from ..theory.roofline import BYTES_PER_VALUE
from .autocast import cast_bytes, wide_bytes
from .traffic import cut

IN_FLIGHT = 3
"""zero=2: buckets of gradients that are alive at once: one is filled while two are on their way."""

FUSED = 3.0
"""An optimizer that launches no more operators for a tensor than these has one kernel for all of its arithmetic."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors alive on one rank at the worst moment."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.communication + self.workspace

    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def peak_memory(profile: Profile, plan: Plan, n: float, *, device: str = "cpu") -> Memory:
    """The worst moment of a step whose micro-batches have n samples on this rank, a GPU where anything is offloaded."""
    held = _Held(profile, plan)
    inputs = profile.input.at(n) * plan.micro
    scale = BYTES_PER_VALUE[plan.precision] / profile.activation_bytes
    wide = wide_bytes(profile, plan, n)
    moments = [
        Memory(held.parameters + cast, gradients, held.optimizer, inputs + scale * live + more, communication)
        for (live, gradients, communication), cast, more in zip(
            _moments(profile, plan, n, held, device), cast_bytes(profile, plan), wide, strict=True
        )
    ]
    # the optimizer works piece by piece, with temporaries as large as the largest; nothing else is alive then. A fused
    # one needs no temporaries
    apart = plan.offload != "none" or (device == "cuda" and profile.optimizer_ops <= FUSED)
    temporary = 0.0 if apart else 2 * _largest_piece(profile, plan) * profile.parameter_bytes
    moments.append(Memory(held.parameters, held.gradients, held.optimizer, inputs + temporary, 0.0))
    return max(moments, key=lambda m: m.total)


class _Held:
    """What a rank holds all the time."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        width = profile.parameter_bytes
        s = plan.shards
        whole = profile.trained * width
        self.parameters = profile.parameters * width / (s if plan.zero == 3 else 1)
        self.optimizer = profile.trained * profile.state_per_parameter / s if plan.offload == "none" else 0.0
        self.gradients = whole / (s if plan.zero >= 2 else 1)
        """All gradients of the rank, when they are all there."""
        self.always = plan.micro > 1 or (plan.zero <= 1 and (plan.dp > 1 or plan.splits_model))
        """Whole gradients stay in the buckets that are sent; micro-batches add to what is there."""
        self.flight = 0.0
        """Gradients on their way to the ranks that keep them."""
        if plan.zero == 2 and plan.dp > 1:
            largest = max((x.largest for x in profile.layers), default=0) * width
            self.flight = min(whole, IN_FLIGHT * max(float(plan.bucket), largest))
        if plan.offload == "all":
            self.parameters = self.gradients = 0.0
        if plan.compress == "powersgd" and plan.dp > 1:
            self.gradients += whole  # what was not sent is added to the next step's gradients
        self.parameters += profile.buffers


def _moments(profile: Profile, plan: Plan, n: float, held: _Held, device: str) -> list[tuple[float, float, float]]:
    """(activations, gradients, communication) during the forward and the backward of every layer."""
    moments = []
    kept = 0.0
    after = profile.trained * profile.parameter_bytes
    around = _around(profile, plan)
    for x in profile.layers:
        # gradients that are there already; its own are among `live`
        after -= x.parameters * x.repeats * profile.parameter_bytes
        gathered, reduced = around(x)
        if plan.recompute != "none":
            chosen = _chosen(x, plan, device, profile.activation_bytes).at(n)
            before, kept = kept, kept + x.repeats * (_kept(x).at(n) + chosen)
            own = max(0.0, x.saved.at(n) - chosen)  # made again, beside what was kept
            forward = before + chosen + own + x.output.at(n)
            backward = kept + (own if x.composite else 0.0) + x.local_backward.at(n)  # a simple layer has kept it all
        else:
            forward, backward = x.live_forward.at(n), x.live_backward.at(n)
        backward -= _apart(x, profile, plan)
        there = held.gradients if held.always or plan.offload == "all" else after / plan.shards
        moments.append((forward, held.gradients if held.always else 0.0, gathered))
        moments.append((backward, there, reduced + held.flight))
    return moments


def _around(profile: Profile, plan: Plan) -> Callable[[Layer], tuple[float, float]]:
    """Bytes of parameters and gradients that zero=3 has on the device around a layer's forward and backward."""
    alone = plan.shards == 1
    if plan.zero < 3:
        return lambda _: (0.0, 0.0)
    width = profile.parameter_bytes
    copy = min(width, BYTES_PER_VALUE[plan.precision])
    root = sum(x.repeats * cut(x, profile, plan)[0] for x in profile.layers if not x.unit) * copy

    def around(x: Layer) -> tuple[float, float]:
        together, part = cut(x, profile, plan)
        numbers = (together if x.unit else 0) + part
        if alone:
            # a parameter is copied up and cast, one by one; gradients are copied twice on their way
            moved = (part or x.largest) * ((width if plan.offload == "all" else 0) + (copy if copy < width else 0))
            return root + numbers * copy + moved, root + 2 * numbers * width
        # a unit is gathered into one buffer and copied out of it; its gradients are copied into one to be sent
        return root + 2 * numbers * copy, root + numbers * (2 * copy + width)

    return around


def _apart(layer: Layer, profile: Profile, plan: Plan) -> float:
    """What `live` counts too much under chunk: the gradient of the largest parameter comes part by part."""
    _, part = cut(layer, profile, plan)
    apart = (layer.largest - part) * profile.activation_bytes if part else 0.0
    return apart if min(layer.live_backward.fixed, layer.local_backward.fixed) >= apart else 0.0


def _largest_piece(profile: Profile, plan: Plan) -> float:
    """Numbers of the largest piece that a rank updates at once: zero=3 cuts every parameter, a flat shard only some."""
    sizes = [float(x.largest) for x in profile.layers]
    if plan.chunk > 1:
        sizes = [size / plan.chunk if 2 * size >= max(sizes) else size for size in sizes]
    largest = max(sizes, default=0.0)
    return largest / plan.shards if plan.zero == 3 else min(largest, profile.trained / plan.shards)


def _kept(layer: Layer) -> Affine:
    """What stays of a layer between its forward and its backward under full recomputation."""
    return layer.output if layer.composite else layer.saved


def _chosen(layer: Layer, plan: Plan, device: str, width: int) -> Affine:
    """What selective recomputation keeps beyond that."""
    return kept_bytes(layer, device, width) if plan.recompute == "selective" and layer.composite else Affine()
