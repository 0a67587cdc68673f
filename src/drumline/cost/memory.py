"""Peak memory of one rank, in parts that add up: what is held all the time, and the worst moment of the step."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.profile import Affine, Layer, Profile
from ..plan import Plan
from .work import WIDTH


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors alive on one rank at the worst moment."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communication


def peak_memory(profile: Profile, plan: Plan, n: float) -> Memory:
    """The worst moment of a step whose micro-batches have n samples on this rank."""
    held = _Held(profile, plan)
    inputs = profile.input.at(n) * plan.micro
    scale = WIDTH[plan.precision] / profile.activation_bytes
    moments = [
        Memory(held.parameters, gradients, held.optimizer, inputs + scale * live, communication)
        for live, gradients, communication in _moments(profile, plan, n, held)
    ]
    # the optimizer works tensor by tensor, with temporaries as large as the largest; nothing else is alive then
    largest = max((x.largest for x in profile.layers), default=0) * profile.parameter_bytes / plan.shards
    moments.append(Memory(held.parameters, held.gradients, held.optimizer, inputs + 2 * largest, 0.0))
    return max(moments, key=lambda m: m.total)


class _Held:
    """What a rank holds all the time."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        width = profile.parameter_bytes
        s = plan.shards
        self.parameters = profile.parameters * width / s + profile.buffers
        self.optimizer = profile.trained * profile.state_per_parameter / s
        self.gradients = profile.trained * width / s
        """All gradients of the rank, when they are all there."""
        self.always = plan.dp > 1 or plan.micro > 1
        """Replicas keep their gradients in the buckets that are sent; micro-batches add to what is there."""
        if plan.zero < 3 and width > WIDTH[plan.precision]:
            # autocast keeps a cast copy of every weight that the backward will need
            self.parameters += profile.parameters * WIDTH[plan.precision]


def _moments(profile: Profile, plan: Plan, n: float, held: _Held) -> list[tuple[float, float, float]]:
    """(activations, gradients, communication) during the forward and the backward of every layer."""
    width = profile.parameter_bytes
    copy = min(width, WIDTH[plan.precision])
    layers = profile.layers
    root = sum(x.parameters + x.frozen for x in layers if not x.unit) * copy if plan.zero == 3 else 0.0
    moments = []
    kept = 0.0
    after = profile.trained * width
    for x in layers:
        unit = (x.parameters + x.frozen) if x.unit and plan.zero == 3 else 0
        after -= x.parameters * x.repeats * width  # gradients that are there already; its own are among `live`
        # a unit is gathered into one buffer and copied out of it; its gradients are copied into one to be sent
        gathered = root + 2 * unit * copy if plan.dp > 1 else 0.0
        reduced = root + unit * (2 * copy + width) if plan.dp > 1 else 0.0
        if plan.recompute == "full":
            before, kept = kept, kept + x.repeats * _kept(x).at(n)
            own = x.saved.at(n)
            forward, backward = before + own + x.output.at(n), kept + own + x.local_backward.at(n)
        else:
            forward, backward = x.live_forward.at(n), x.live_backward.at(n)
        moments.append((forward, held.gradients if held.always else 0.0, gathered))
        moments.append((backward, held.gradients if held.always else after / plan.shards, reduced))
    return moments


def _kept(layer: Layer) -> Affine:
    """What stays of a layer between its forward and its backward under full recomputation."""
    return layer.output if layer.composite else layer.saved
