"""Scales the step of the operator model to the parts of an estimate: of the fitted model, or corrected by runs.

Compute is scaled phase by phase, and all messages by one factor: what the estimate counts as communication, exposed and
hidden, over what the operator model does. What waits in between follows from the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .data_parallel_comm import CollectiveMessage, GatherReduce, LayerCollectives
from .estimate import Estimate
from .layer_time import LayerCommTime, LayerTime
from .pipeline_cost import PipelineCost
from .stages import StageLayer
from .step import Step, Tail, TailPart

_TAIL_PARTS = ("communication", "optimizer", "overhead")
"""Parts that are drawn after the last backward where the operator model has nothing of the kind."""

Factors = Mapping[str, float]


def scaled_step(step: Step, estimate: Estimate) -> Step:
    """The same step with the seconds of an estimate of the same plan."""
    parts, hidden = step.parts()
    factors = scale_factors(parts, hidden, estimate)
    missing = tuple(TailPart(k, k, seconds) for k, seconds in _missing(parts, hidden, estimate).items() if seconds > 0)
    tails = tuple((*_scaled_tail(tail, factors), *missing) for tail in step.tails)
    return replace(
        step,
        layers=[_layer(x, factors) for x in step.layers],
        layer_comm=[_waits(x, factors["communication"]) for x in step.layer_comm],
        collectives=_collectives(step.collectives, factors["communication"]),
        sharded_units=factors["communication"] * step.sharded_units,
        tails=tails,
    ).with_pipeline(None if step.pipeline is None else _pipeline(step.pipeline, factors))


def _missing(parts: Mapping[str, float], hidden: float, estimate: Estimate) -> dict[str, float]:
    """Seconds after the last backward that the operator model has nothing of.

    More overhead than it knows is time between steps, or waiting for slow nodes: nothing that it draws takes longer.
    """
    wanted = {k: estimate.parts.get(k, 0.0) for k in _TAIL_PARTS}
    if parts.get("communication", 0.0) + hidden:
        wanted["communication"] = 0.0
    if parts.get("optimizer"):
        wanted["optimizer"] = 0.0
    wanted["overhead"] -= parts.get("overhead", 0.0)
    return wanted


def scale_factors(parts: Mapping[str, float], hidden: float, estimate: Estimate) -> Factors:
    """Seconds of an estimate over those of the operator model, by part; 1 where the operator model has none."""
    wanted = dict(estimate.parts)
    own = dict(parts)
    # corrections do not change the seconds of hidden messages: those are corrected like exposed ones, or the bubble
    seen = next((k for k in ("communication", "bubble") if own.get(k)), "") if estimate.raw_seconds else ""
    if seen:
        own["communication"], wanted["communication"] = own[seen], wanted.get(seen, 0.0)
    else:
        own["communication"] = own.get("communication", 0.0) + hidden
        wanted["communication"] = wanted.get("communication", 0.0) + estimate.hidden_seconds
    if not own.get("recompute"):  # it is part of the backward then
        wanted["backward"] = wanted.get("backward", 0.0) + wanted.get("recompute", 0.0)
    names = ("forward", "backward", "recompute", *_TAIL_PARTS)
    factors = {k: wanted.get(k, 0.0) / own[k] if own.get(k) else 1.0 for k in names}
    return factors | {"overhead": min(1.0, factors["overhead"])}


def _layer(x: LayerTime, f: Factors) -> LayerTime:
    recompute = f["recompute"] * x.recompute
    return LayerTime(
        x.layer, f["forward"] * x.forward, f["backward"] * (x.backward - x.recompute) + recompute, recompute
    )


def _waits(x: LayerCommTime, factor: float) -> LayerCommTime:
    return LayerCommTime(factor * x.forward, factor * x.backward, factor * x.hidden)


def _collectives(sent: LayerCollectives, factor: float) -> LayerCollectives:
    messages: list[GatherReduce] = [(_message(g, factor), _message(r, factor)) for g, r in sent.messages]
    return LayerCollectives.of(messages)


def _message(message: CollectiveMessage | None, factor: float) -> CollectiveMessage | None:
    return None if message is None else replace(message, seconds=factor * message.seconds)


def _scaled_tail(tail: Tail, f: Factors) -> Tail:
    return tuple(
        replace(
            p,
            seconds=f[p.part] * p.seconds,
            messages=tuple(replace(m, seconds=f[p.part] * m.seconds) for m in p.messages),
        )
        for p in tail
    )


def _pipeline(cost: PipelineCost, f: Factors) -> PipelineCost:
    """The stages with scaled seconds; a message between stages is communication."""
    scaled = cost.with_stages([tuple(_stage_layer(x, f) for x in stage) for stage in cost.stages])
    return replace(scaled, transfer=tuple(f["communication"] * t for t in cost.transfer))


def _stage_layer(x: StageLayer, f: Factors) -> StageLayer:
    recompute = f["recompute"] * x.recompute
    return replace(
        x,
        forward=f["forward"] * x.forward,
        backward=f["backward"] * (x.backward - x.recompute) + recompute,
        weight=f["backward"] * x.weight,
        recompute=recompute,
        comm_forward=f["communication"] * x.comm_forward,
        comm_backward=f["communication"] * x.comm_backward,
        hidden=f["communication"] * x.hidden,
    )
