"""What the ranks that share a layer tell each other in one micro-batch: how long they wait, and how much is hidden."""

from __future__ import annotations

from dataclasses import dataclass

from ..clusters import Cluster
from ..models.profile import Layer, Profile
from ..plans import Plan
from .axes import along, copies
from .collectives import collective_seconds
from .local import Talks
from .work import Pricer


@dataclass(frozen=True, slots=True)
class Said:
    """Seconds of a layer's messages in one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0


def said_of(
    layer: Layer, talks: Talks, plan: Plan, n: float, profile: Profile, cluster: Cluster, pricer: Pricer
) -> Said:
    """The messages of one layer for n samples; `profile` is the whole model's."""
    seconds = {"forward": 0.0, "backward": 0.0}
    ring = {"forward": 0.0, "backward": 0.0}
    last = 0.0
    for t in talks:
        size = t.size(n, plan.precision, profile)
        known = ring if t.collective == "ring" else seconds
        took = along(t.axis, t.collective, size, plan, cluster)
        known[t.phase] += took
        last = took if t.phase == "forward" and known is seconds else last
    if layer.norms and plan.dp * copies(plan) > 1:
        wait = layer.norms * max(cluster.mid_step_message_s, _statistics(plan, cluster))
        seconds = {phase: s + wait for phase, s in seconds.items()}
    hidden = 0.0
    for phase, sent in ring.items():
        behind = min(sent, cluster.overlap * _attention(layer, phase, n, pricer))
        seconds[phase] += sent - behind
        hidden += behind
    if plan.recompute == "full" and layer.composite:
        seconds["backward"] += seconds["forward"] - last  # sent again, but for what nothing in the layer needs
    return Said(seconds["forward"], seconds["backward"], hidden)


def _attention(layer: Layer, phase: str, n: float, pricer: Pricer) -> float:
    """Seconds of the attention that keys and values of a ring travel behind."""
    kinds = ("attention", "attention_backward")
    return sum(pricer.op_seconds(op, n) * op.count for op in layer.ops if op.kind in kinds and op.phase == phase)


def _statistics(plan: Plan, cluster: Cluster) -> float:
    """Of a norm whose statistics span all ranks that have other samples, or other parts of them."""
    return collective_seconds("all_reduce", plan.dp * copies(plan), 4096.0, cluster, stride=plan.tp)
