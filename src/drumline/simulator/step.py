"""Replays one step of a plan as events: the predicted timeline, with the same rules as the closed form."""

from __future__ import annotations

from ..clusters import Cluster
from ..core.timeline import Span, Timeline
from ..costs.estimate import Estimate
from ..costs.host import as_it_runs
from ..costs.layers import LayerTime, asked_ahead
from ..costs.step import added_on_host, agreement, between_steps, layer_times, statistics_seconds
from ..costs.traffic import after_backward, after_update, reduced_often
from ..models.profile import Profile
from ..plans import Plan
from .divided import simulate_divided
from .lanes import Lanes


def simulate_step(
    profile: Profile, plan: Plan, cluster: Cluster, estimate: Estimate, *, speed: float = 1.0
) -> Timeline:
    """The predicted timeline of one step; all ranks of a data-parallel plan do the same.

    With a `speed`, of a machine that runs at that share of its measured speed; the estimate has it already.
    """
    plan, cluster = as_it_runs(plan, cluster), cluster.with_active_ranks(plan.ranks)
    if plan.splits_model:
        return simulate_divided(profile, plan, cluster, speed=speed)
    lanes = Lanes(cluster.overlap)
    times = layer_times(profile, plan, cluster)
    for micro in range(plan.micro):
        _micro_batch(
            lanes,
            times,
            reduces=reduced_often(plan) or micro == plan.micro - 1,
            ahead=asked_ahead(plan, cluster),
            label=f" m{micro}" if plan.micro > 1 else "",
        )
        if reduced_often(plan):
            lanes.join()
        if plan.zero == 3:
            lanes.compute("communication units", cluster.sharded_unit_s * sum(1 for t in times if t.gather))
        for t in times:
            lanes.compute(f"communication statistics {t.layer.name}", statistics_seconds(t, plan, cluster))
    for message in after_backward(profile, plan, cluster):
        lanes.send(message)
    lanes.join()
    lanes.compute("communication host", added_on_host(profile, plan, cluster))
    if plan.dp > 1:
        lanes.compute("communication loss", agreement(plan, cluster))
    lanes.compute("overhead", between_steps(cluster))
    lanes.compute("optimizer", estimate.parts["optimizer"] * speed)
    for message in after_update(profile, plan, cluster):
        lanes.send(message)
    lanes.join()
    spans = tuple(
        Span(rank, lane, name, start / speed, end / speed, size)
        for rank in range(plan.dp)
        for lane, name, start, end, size in lanes.spans
    )
    return Timeline("predicted", spans)


def _micro_batch(lanes: Lanes, times: list[LayerTime], *, reduces: bool, ahead: tuple[bool, bool], label: str) -> None:
    """Forward through the layers, backward from the last to the first; each with the messages that belong to it.

    Parameters are asked for one layer ahead where `ahead` says so, of the forward and of the backward.
    """
    forward_ahead, backward_ahead = ahead
    for i, t in enumerate(times):
        if not backward_ahead:
            lanes.copy(t.gather)
        elif i == 0 or not forward_ahead:
            lanes.send(t.gather)
        lanes.wait(t.gather)
        if forward_ahead and i + 1 < len(times):
            lanes.send(times[i + 1].gather)
        lanes.compute(f"forward {t.layer.name or '(model)'}{label}", t.forward)
    for i, t in reversed(list(enumerate(times))):
        # the group of the whole model, which comes with the first layer, is still there
        if i > 0 and not backward_ahead:
            lanes.copy(t.gather)
        elif i > 0 and i == len(times) - 1:
            lanes.send(t.gather)
        if i > 0:
            lanes.wait(t.gather)
        if i > 1 and backward_ahead:
            lanes.send(times[i - 1].gather)
        lanes.compute(f"backward {t.layer.name or '(model)'}{label}", t.backward)
        if reduces:
            lanes.send(t.reduce)
