"""What autocast holds beyond activations of half the width: cast copies of weights, and what it leaves in fp32.

Each list has two numbers for every layer of a profile: during its forward, and during its backward.
"""

from __future__ import annotations

from ..models.profile import Layer, Profile
from ..plans import Plan
from ..theory.roofline import BYTES_PER_VALUE

NORMS = ("native_layer_norm", "native_group_norm")
"""Autocast computes them in fp32, so what they keep is not halved."""


def cast_bytes(profile: Profile, plan: Plan) -> list[float]:
    """Cast copies of the weights: they stay for the backward, and where layers are recomputed, for the forward alone.

    zero=3 gathers weights in half precision, and has none.
    """
    if profile.precision == plan.precision:
        return _cast_as_traced(profile, plan)
    half = (
        BYTES_PER_VALUE[plan.precision]
        if plan.zero < 3 and profile.parameter_bytes > BYTES_PER_VALUE[plan.precision]
        else 0
    )
    found: list[float] = []
    every = kept = 0.0
    for x in profile.layers:
        own = float((x.parameters + x.frozen) * half)
        again = plan.recompute != "none" and x.composite
        every += own * x.repeats
        kept += 0.0 if again else own * x.repeats
        found += [every, kept + (own if again else 0.0)]
    return found


def _cast_as_traced(profile: Profile, plan: Plan) -> list[float]:
    """What a trace with casts does not tell: autocast holds the copies of recomputed layers until the forward ends."""
    found: list[float] = []
    before = 0.0
    for x in profile.layers:
        found += [before, 0.0]
        before += x.cast * x.repeats if plan.recompute != "none" and x.composite else 0.0
    return found


def wide_bytes(profile: Profile, plan: Plan, n: float) -> list[float]:
    """What the profile's amounts, scaled to half precision, lack: what norms keep, and the probabilities of a loss."""
    lacks = 1 - BYTES_PER_VALUE[plan.precision] / profile.activation_bytes
    if lacks <= 0:
        return [0.0, 0.0] * len(profile.layers)
    found: list[float] = []
    kept = 0.0
    for x in profile.layers:
        own = lacks * sum(op.output.at(n) * op.count for op in x.ops if op.name in NORMS and op.phase == "forward")
        again = plan.recompute != "none" and x.composite
        kept += 0.0 if again else own * x.repeats
        now = kept + (own if again else 0.0)
        found += [now, now + (lacks * x.local_backward.at(n) if _is_loss(x) else 0.0)]
    return found


def _is_loss(layer: Layer) -> bool:
    """Whether it is a loss that makes probabilities: those, and their gradients, are in fp32."""
    return not layer.parameters and any(op.kind == "softmax" for op in layer.ops)
