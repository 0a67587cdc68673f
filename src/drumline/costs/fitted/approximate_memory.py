"""Approximate memory of many plans of a transformer at once, from the amounts per layer of the operator model.

It ignores the order of allocations inside a layer and is off by a few percent: enough to select plans for an exact
count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...models.profile import Profile
from ...models.recompute_choice import kept_bytes
from ...plans import Plan
from ..memory import BUCKETS_ALIVE
from ..pipeline_memory import LayerActivations, layer_activations
from ..plan_columns import RECOMPUTE, SCHEDULES, Array, PlanColumns
from ..rank_model import RankModel
from .inputs import LayoutColumns, ModelColumns
from .memory import in_flight
from .stages import stage_sizes

_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")
_HALF, _SINGLE = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class _Line:
    """An amount that grows with the samples n of a micro-batch: `fixed + each * n`."""

    fixed: float
    each: float

    @classmethod
    def through(cls, one: float, two: float) -> _Line:
        """From the amounts for one and two samples."""
        return cls(2.0 * one - two, two - one)


def approximate_bytes(
    profile: Profile,
    model: ModelColumns,
    plans: PlanColumns,
    layouts: LayoutColumns,
    base: Plan,
    rank_model: Callable[[Plan], RankModel],
) -> Array:
    """Bytes of the fullest rank of every plan. `rank_model` gives one rank's part under tp and cp."""
    sizes = np.empty(len(plans.tp))
    keys = (plans.tp * 64 + plans.cp) * len(RECOMPUTE) + plans.recompute
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key)
        tp, cp, recompute = (int(column[rows[0]]) for column in (plans.tp, plans.cp, plans.recompute))
        plan = replace(base, tp=tp, cp=cp, recompute=RECOMPUTE[recompute])
        sizes[rows] = _group_bytes(profile, model, plans.take(rows), layouts.take(rows), plan, rank_model(plan))
    return sizes


def _group_bytes(
    profile: Profile, model: ModelColumns, plans: PlanColumns, layouts: LayoutColumns, plan: Plan, local: RankModel
) -> Array:
    """Bytes of plans with the same tp, cp and recomputation."""
    amounts = _amounts(local.profile, plan)
    n = layouts.micro_batch_size

    def at(layer: str, what: str) -> Array:
        line = amounts[layer, what]
        return line.fixed + line.each * n

    sizes = stage_sizes(model.take(np.zeros(len(n), dtype=np.intp)), layouts)
    parts = {x.name.partition(".")[0]: x for x in local.profile.layers}
    block, ends = float(parts["blocks"].parameters), (parts["embedding"], parts["head"])
    deferred = np.where(plans.schedule == _ZERO_BUBBLE, at("blocks", "deferred"), 0.0)
    # 16-bit copies of weights stay until the backward, except those that zero=3 gathers and frees
    copies = np.where(plans.zero == 3, amounts["blocks", "saved"].fixed, 0.0)
    kept = at("blocks", "saved") - copies + deferred
    single = plans.pp == 1
    tables = [float(x.parameters) for x in ends]
    last = float(ends[1].parameters + ends[1].tied)  # on one rank embedding and head share a tied table

    def stage(layers: Array, weights: Array, flight: Array, saved: Array, working: Array) -> Array:
        weights = layers * block + weights
        return _states(profile, plans, weights) + flight * (layers * kept + saved) + working + at("blocks", "output")

    one = np.ones_like(n)
    none = np.zeros_like(n)
    working = np.maximum(at("blocks", "working"), at("head", "working"))
    both = at("embedding", "saved") + at("head", "saved")
    choices = np.stack(
        [
            stage(
                sizes.first,
                one * (tables[0] + np.where(single, tables[1], 0.0)),
                in_flight(layouts, 0),
                np.where(single, both, at("embedding", "saved")),
                np.where(single, working, at("blocks", "working")),
            ),
            np.where(plans.pp > 2, stage(sizes.inner, none, in_flight(layouts, 1), none, at("blocks", "working")), 0.0),
            np.where(single, 0.0, stage(sizes.last, one * last, one, at("head", "saved"), working)),
        ]
    )
    largest = max(x.largest for x in local.profile.layers)
    sent = np.where(
        (plans.zero == 2) & (plans.dp > 1), BUCKETS_ALIVE * max(float(Plan().bucket), _SINGLE * largest), 0.0
    )
    # zero=3 keeps two units in 16 bits and the gradients of one, plus embedding and head
    units = 2.0 * _HALF * block + _SINGLE * block + _HALF * sum(tables)
    gathered = np.where((plans.zero == 3) & (plans.dp > 1), units, 0.0)
    return np.asarray(choices.max(axis=0) + sent + gathered + profile.input.at(1.0) * n * plans.micro, dtype=np.float64)


def _states(profile: Profile, plans: PlanColumns, weights: Array) -> Array:
    """Parameters, gradients and optimizer state."""
    width, state = float(profile.parameter_bytes), profile.state_per_parameter
    over = np.where(plans.zero > 0, plans.shard, 1.0)
    parts = (width, np.where(plans.zero == 3, over, 1.0)), (width, np.where(plans.zero >= 2, over, 1.0)), (state, over)
    return np.asarray(sum(size * weights / by for size, by in parts), dtype=np.float64)


def _amounts(profile: Profile, plan: Plan) -> dict[tuple[str, str], _Line]:
    """Memory of each kind of layer, by (layer name, part)."""
    one, two = (layer_activations(profile, plan, n) for n in (1.0, 2.0))
    amounts = {}
    for x, a, b in zip(profile.layers, one, two, strict=True):
        name = x.name.partition(".")[0]
        for what in LayerActivations.__slots__:
            amounts[name, what] = _Line.through(getattr(a, what), getattr(b, what))
        if plan.recompute == "selective" and x.composite:
            more = kept_bytes(x, "cuda", profile.activation_bytes)
            saved, working = amounts[name, "saved"], amounts[name, "working"]
            amounts[name, "saved"] = _Line(saved.fixed + more.fixed, saved.each + more.per_sample)
            amounts[name, "working"] = _Line(working.fixed - more.fixed, working.each - more.per_sample)
    return amounts
