"""The layers of a step with their seconds, and how much of the messages around them is hidden behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..clusters import Cluster
from ..models.profile import Layer, Profile
from ..plans import Plan
from .traffic import Around, Message, reduced_often
from .work import Pricer, Told


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer's part of one micro-batch, and the messages around it."""

    layer: Layer
    forward: float
    backward: float
    """With recomputation, when there is any."""
    again: float
    """The recomputation in it."""
    gather: Message | None = None
    """Before its forward, and again before its backward."""
    reduce: Message | None = None
    """After its backward."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The messages around the layers, and what is asked of them again and again."""

    around: list[Around]
    gather: list[float]
    """Seconds, by layer."""
    reduce: list[float]

    @classmethod
    def of(cls, around: list[Around]) -> Sent:
        """With the seconds of what is there."""
        return cls(around, [g.seconds if g else 0.0 for g, _ in around], [r.seconds if r else 0.0 for _, r in around])


def largest_share(batch_size: int, plan: Plan) -> int:
    """Samples of the largest micro-batch on the busiest rank."""
    return math.ceil(math.ceil(batch_size / plan.micro) / plan.dp)


def waiting(plan: Plan, cluster: Cluster) -> float:
    """The factor on what a rank computes: others of its host are idle, or it waits for the slowest."""
    straggle = cluster.with_active_ranks(plan.ranks).straggler_slowdown if plan.ranks > 1 else 1.0
    return cluster.compute_factor(plan.ranks) * straggle


def computed(profile: Profile, pricer: Pricer, plan: Plan, n: float, cluster: Cluster) -> list[LayerTime]:
    """The layers in the order in which they run, without messages, for n samples."""
    wait = waiting(plan, cluster)
    if cluster.device.kind == "cuda":
        return _told_ahead(list(profile.each()), pricer, plan, n, wait)
    times: list[LayerTime] = []
    for layer in profile.each():
        forward = wait * pricer.layer_seconds(layer, "forward", n)
        again = forward if plan.recompute == "full" and layer.composite else 0.0
        if plan.recompute == "selective" and layer.composite:
            again = wait * pricer.again_seconds(layer, n)
        backward = wait * pricer.layer_seconds(layer, "backward", n) + again
        times.append(LayerTime(layer, forward, backward, again))
    return times


class _Clocks:
    """A GPU and the host that tells it what to do: the host may be ahead, the GPU waits for it where it is not."""

    def __init__(self, wait: float) -> None:
        self._wait, self._host, self._device = wait, 0.0, 0.0

    def run(self, told: Told) -> float:
        """One more layer; by how much later the device is done."""
        before = self._device
        self._host += self._wait * told.host
        self._device = max(self._device + self._wait * told.busy, self._host)
        return self._device - before


def _told_ahead(layers: list[Layer], pricer: Pricer, plan: Plan, n: float, wait: float) -> list[LayerTime]:
    """The layers forward, then backward, by both clocks: what the host gains in one layer it has in the next."""
    clocks = _Clocks(wait)
    forward = [clocks.run(pricer.told(layer, "forward", n, recompute=plan.recompute)) for layer in layers]
    times = []
    for layer, before in zip(reversed(layers), reversed(forward), strict=True):
        again = 0.0
        if plan.recompute != "none" and layer.composite:
            again = clocks.run(_repeated(layer, pricer, plan, n))
        backward = clocks.run(pricer.told(layer, "backward", n)) + again
        times.append(LayerTime(layer, before, backward, again))
    return times[::-1]


def _repeated(layer: Layer, pricer: Pricer, plan: Plan, n: float) -> Told:
    """What a plan computes again of a layer, before its backward."""
    return pricer.told(layer, "again" if plan.recompute == "selective" else "forward", n, recompute=plan.recompute)


def host_seconds(profile: Profile, pricer: Pricer, plan: Plan, n: float) -> float:
    """What the host of a GPU takes to tell it of one micro-batch."""
    total = 0.0
    for layer in profile.each():
        told = [pricer.told(layer, "forward", n, recompute=plan.recompute), pricer.told(layer, "backward", n)]
        if plan.recompute != "none" and layer.composite:
            told.append(_repeated(layer, pricer, plan, n))
        total += sum(t.host for t in told)
    return total


def communication(times: list[LayerTime], sent: Sent, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(exposed, hidden) seconds: messages run behind compute that remains, at the share `overlap` of their speed."""
    total = sum(sent.reduce)
    if not total:
        return 0.0, 0.0
    if plan.zero == 3:
        return _sharded_communication(times, sent, plan, cluster)
    # the last bucket to fill, that of the first layers, has nothing left to hide behind
    full = [i for i, seconds in enumerate(sent.reduce) if seconds]
    window = sum(t.backward for t in times[: full[-1]])
    hidden = min(max(0.0, total - sent.reduce[full[0]]), cluster.overlap * window)
    often = plan.micro if reduced_often(plan) else 1
    return often * (total - hidden), often * hidden


def _sharded_communication(times: list[LayerTime], sent: Sent, plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """(exposed, hidden): a layer's parameters are asked for one layer ahead, so that layer's compute hides them.

    A GPU is told what to do ahead of time; a CPU asks for parameters when it needs them, except in the backward. The
    group of the whole model, which comes with the first layer, stays gathered between forward and backward.
    """
    gather, reduce = sent.gather, sent.reduce
    forward, backward = asked_ahead(plan, cluster)
    behind = cluster.overlap if forward else 0.0
    last = len(times) - 1
    exposed = gather[0] + (gather[last] if last else 0.0) + reduce[0]
    exposed += sum(max(0.0, gather[i] - behind * times[i - 1].forward) for i in range(1, last + 1))
    for i in range(last, -1, -1):
        next_gather, this_gather = (gather[i - 1] if i > 1 else 0.0), (gather[i] if 0 < i < last else 0.0)
        on_the_way = (next_gather if backward else 0.0) + (reduce[i + 1] if i < last else 0.0)
        busy = times[i].backward + (0.0 if backward else this_gather)
        exposed += max(0.0, on_the_way - cluster.overlap * busy) + (0.0 if backward else this_gather)
    total = 2 * sum(gather) - gather[0] + sum(reduce)
    units = sum(1 for message, _ in sent.around if message)
    return plan.micro * (min(exposed, total) + units * cluster.sharded_unit_s), plan.micro * max(0.0, total - exposed)


def asked_ahead(plan: Plan, cluster: Cluster) -> tuple[bool, bool]:
    """Whether parameters are asked for one layer ahead, in the forward and in the backward.

    One rank alone asks for them when it needs them: there is nothing to gather, only to copy from its host.
    """
    return plan.shards > 1 and cluster.device.kind == "cuda", plan.shards > 1
