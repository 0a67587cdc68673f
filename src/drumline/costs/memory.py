"""Peak memory of one rank, in parts that add up: model states, and activations at the worst moment of the step.

Autocast keeps more than activations of half the width: cast copies of weights, and values that it leaves in fp32.
`cast_bytes` and `wide_bytes` count them, two numbers for every layer: during its forward, and during its backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ..models.profile import Affine, Layer, Profile
from ..models.recompute_choice import kept_bytes
from ..plans import Plan
from ..plans.engine_constants import REDUCE_BUCKETS_IN_FLIGHT, ROUNDED_AT_ONCE
from ..theory.roofline import STORED_BYTES
from .data_parallel_comm import gathered_sizes
from .tuning import FUSED_OPS

BUCKETS_ALIVE = REDUCE_BUCKETS_IN_FLIGHT + 1
"""zero=2: gradient buckets that exist at once; one is filled while the others are reduced."""

FP32_NORMS = ("native_layer_norm", "native_group_norm")
"""Norms that autocast computes in fp32, so that what they save is not halved."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes of tensors alive on one rank at the worst moment."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All parts together."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.communication + self.workspace

    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of model states on the device of one rank."""

    parameters: float
    """With buffers."""
    gradients: float
    """All gradients of the rank, once they are complete."""
    optimizer: float

    @classmethod
    def of(cls, profile: Profile, plan: Plan, parameters: float, trained: float, buffers: float) -> ModelStates:
        """Of a rank with `parameters` numbers, of which `trained` are trained, before sharding."""
        width, s = profile.parameter_bytes, plan.shards
        whole = trained * width
        kept = parameters * width / (s if plan.zero == 3 else 1)
        gradients = whole / (s if plan.zero >= 2 else 1)
        if plan.offload == "all":
            kept = gradients = 0.0
        if plan.compress == "powersgd" and plan.dp > 1:
            gradients += whole  # the compression error is added to the next step's gradients
        optimizer = trained * profile.state_per_parameter / s if plan.offload == "none" else 0.0
        if plan.ep > 1 and s > 1:  # an expert is on s / ep of the ranks that share one copy, and they shard it
            routed = sum(x.experts.parameters * x.repeats for x in profile.layers if x.experts)
            more = routed * (min(plan.ep, s) - 1) / s
            gradients += more * width if plan.zero >= 2 else 0.0
            optimizer += more * profile.state_per_parameter if plan.offload == "none" else 0.0
        return cls(kept + buffers, gradients, optimizer)


def peak_memory(profile: Profile, plan: Plan, n: float, *, device: str = "cpu", updates: bool = True) -> PeakMemory:
    """The worst moment of a step without a pipeline, with micro-batches of n samples on this rank.

    `updates` is false where another process has the optimizer.
    """
    moments = memory_moments(profile, plan, n, device=device)
    return max(moments if updates else moments[:-1], key=lambda m: m.total)


def memory_moments(profile: Profile, plan: Plan, n: float, *, device: str = "cpu") -> list[PeakMemory]:
    """Memory during the forward and the backward of every layer of the profile, two by two, and during the update.

    Of a layer that repeats, it is that of its last repeat.
    """
    states = ModelStates.of(profile, plan, profile.parameters, profile.trained, profile.buffers)
    inputs = profile.input.at(n) * plan.micro
    scale = STORED_BYTES[plan.precision] / profile.activation_bytes
    wide = wide_bytes(profile, plan, n)
    moments = [
        PeakMemory(states.parameters + cast, gradients, states.optimizer, inputs + scale * live + more, communication)
        for (live, gradients, communication), cast, more in zip(
            _moments(profile, plan, n, states, device), cast_bytes(profile, plan), wide, strict=True
        )
    ]
    # the optimizer works piece by piece, with temporaries as large as the largest; nothing else is alive then. A fused
    # or offloaded one needs no temporaries
    without = plan.offload != "none" or (device == "cuda" and profile.optimizer_ops <= FUSED_OPS)
    temporary = 0.0 if without else 2 * _largest_piece(profile, plan) * profile.parameter_bytes
    if plan.precision == "bf16-pure":
        temporary = _rounding_bytes(profile, plan)
    moments.append(PeakMemory(states.parameters, states.gradients, states.optimizer, inputs + temporary, 0.0))
    return moments


def _rounding_bytes(profile: Profile, plan: Plan) -> float:
    """The float32 copies that the update of bf16 weights works on: weights, gradients, states, and what rounds one of
    them (its copy, the random numbers, a mask, the result)."""
    at_once = max(_largest_piece(profile, plan), min(float(ROUNDED_AT_ONCE), profile.trained / plan.shards))
    values = 2 + profile.state_per_parameter / profile.parameter_bytes
    return at_once * (4 * values + 11)


def _moments(
    profile: Profile, plan: Plan, n: float, states: ModelStates, device: str
) -> list[tuple[float, float, float]]:
    """(activations, gradients, communication) during the forward and the backward of every layer."""
    # micro-batches accumulate into existing gradients, and whole gradients stay in the buckets that are reduced
    always = plan.micro > 1 or (plan.zero <= 1 and (plan.dp > 1 or plan.splits_model))
    in_flight = _in_flight(profile, plan)
    moments = []
    kept = 0.0
    after = profile.trained * profile.parameter_bytes
    gathered_around = _gathered_bytes(profile, plan)
    for x in profile.layers:
        # gradients of the layers behind this one; its own are among `live`
        after -= x.parameters * x.repeats * profile.parameter_bytes
        gathered, reduced = gathered_around(x)
        if plan.recompute != "none":
            chosen = _selected(x, plan, device, profile.activation_bytes).at(n)
            before, kept = kept, kept + x.repeats * (_kept(x).at(n) + chosen)
            own = max(0.0, x.saved.at(n) - chosen)  # recomputed, in addition to what was kept
            forward = before + chosen + own + x.output.at(n)
            backward = kept + (own if x.composite else 0.0) + x.local_backward.at(n)  # a simple layer has kept it all
        else:
            forward, backward = x.live_forward.at(n), x.live_backward.at(n)
        backward -= _chunked_gradient(x, profile, plan)
        there = states.gradients if always or plan.offload == "all" else after / plan.shards
        moments.append((forward, states.gradients if always else 0.0, gathered))
        moments.append((backward, there, reduced + in_flight))
    return moments


def _in_flight(profile: Profile, plan: Plan) -> float:
    """zero=2: bytes of gradients on their way to the ranks that keep them."""
    if plan.zero != 2 or plan.dp == 1:
        return 0.0
    largest = max((x.largest for x in profile.layers), default=0) * profile.parameter_bytes
    return min(profile.trained * profile.parameter_bytes, BUCKETS_ALIVE * max(float(plan.bucket), largest))


def _gathered_bytes(profile: Profile, plan: Plan) -> Callable[[Layer], tuple[float, float]]:
    """Bytes of parameters and gradients that zero=3 has on the device during a layer's forward and backward."""
    if plan.zero < 3:
        return lambda _: (0.0, 0.0)
    width = profile.parameter_bytes
    copy = min(width, STORED_BYTES[plan.precision])
    root = sum(x.repeats * gathered_sizes(x, profile, plan)[0] for x in profile.layers if not x.shard_unit) * copy

    def around(x: Layer) -> tuple[float, float]:
        together, part = gathered_sizes(x, profile, plan)
        numbers = (together if x.shard_unit else 0) + part
        if plan.shards == 1:
            # a parameter is copied to the device and cast, one by one; gradients are copied twice on their way
            moved = (part or x.largest) * ((width if plan.offload == "all" else 0) + (copy if copy < width else 0))
            return root + numbers * copy + moved, root + 2 * numbers * width
        # a unit is gathered into one buffer and copied out of it; its gradients are copied into one to be sent
        return root + 2 * numbers * copy, root + numbers * (2 * copy + width)

    return around


def _chunked_gradient(layer: Layer, profile: Profile, plan: Plan) -> float:
    """The excess of `live` under chunk: the gradient of the largest parameter comes part by part."""
    _, part = gathered_sizes(layer, profile, plan)
    rest = (layer.largest - part) * profile.activation_bytes if part else 0.0
    return rest if min(layer.live_backward.fixed, layer.local_backward.fixed) >= rest else 0.0


def _largest_piece(profile: Profile, plan: Plan) -> float:
    """Numbers of the largest piece updated at once: zero=3 shards every parameter, a flat shard cuts only some."""
    sizes = [float(x.largest) for x in profile.layers]
    if plan.chunk > 1:
        sizes = [size / plan.chunk if 2 * size >= max(sizes) else size for size in sizes]
    largest = max(sizes, default=0.0)
    return largest / plan.shards if plan.zero == 3 else min(largest, profile.trained / plan.shards)


def _kept(layer: Layer) -> Affine:
    """Bytes of a layer that stay between its forward and its backward under full recomputation."""
    return layer.output if layer.composite else layer.saved


def _selected(layer: Layer, plan: Plan, device: str, width: int) -> Affine:
    """Bytes that selective recomputation keeps in addition."""
    return kept_bytes(layer, device, width) if plan.recompute == "selective" and layer.composite else Affine()


def cast_bytes(profile: Profile, plan: Plan) -> list[float]:
    """Cast copies of the weights: they stay for the backward; of recomputed layers, for the forward alone.

    zero=3 gathers weights in half precision, and has none.
    """
    if profile.precision == plan.precision:
        return _cast_as_traced(profile, plan)
    half = (
        STORED_BYTES[plan.precision] if plan.zero < 3 and profile.parameter_bytes > STORED_BYTES[plan.precision] else 0
    )
    sizes: list[float] = []
    every = kept = 0.0
    for x in profile.layers:
        own = float((x.parameters + x.frozen) * half)
        recomputed = plan.recompute != "none" and x.composite
        every += own * x.repeats
        kept += 0.0 if recomputed else own * x.repeats
        sizes += [every, kept + (own if recomputed else 0.0)]
    return sizes


def _cast_as_traced(profile: Profile, plan: Plan) -> list[float]:
    """Bytes that a trace with casts lacks: autocast keeps copies of recomputed layers until the forward ends."""
    sizes: list[float] = []
    before = 0.0
    for x in profile.layers:
        sizes += [before, 0.0]
        before += x.cast * x.repeats if plan.recompute != "none" and x.composite else 0.0
    return sizes


def wide_bytes(profile: Profile, plan: Plan, n: float) -> list[float]:
    """Bytes missing when amounts are scaled to half precision: those that norms save, and a loss's probabilities."""
    lacks = 1 - STORED_BYTES[plan.precision] / profile.activation_bytes
    if lacks <= 0:
        return [0.0, 0.0] * len(profile.layers)
    sizes: list[float] = []
    kept = 0.0
    for x in profile.layers:
        own = lacks * sum(op.output.at(n) * op.count for op in x.ops if op.name in FP32_NORMS and op.phase == "forward")
        recomputed = plan.recompute != "none" and x.composite
        kept += 0.0 if recomputed else own * x.repeats
        now = kept + (own if recomputed else 0.0)
        sizes += [now, now + (lacks * x.local_backward.at(n) if _is_loss(x) else 0.0)]
    return sizes


def _is_loss(layer: Layer) -> bool:
    """Whether it is a loss over probabilities: those, and their gradients, are in fp32."""
    return not layer.parameters and any(op.kind == "softmax" for op in layer.ops)
