"""Memory of many plans of a transformer at once: the amounts that `Steps` counts by layer, multiplied out.

It leaves out what depends on the moment inside of a layer, so it is off by some percent: it says which plans are worth
counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...models.profile import Profile
from ...models.selective import kept_bytes
from ...plans import Plan
from ..local import Local
from ..memory import IN_FLIGHT
from ..stage_memory import Held, kept_by_cells
from .inputs import SCHEDULES, Array, Layouts, Models
from .memory import in_flight
from .plans import RECOMPUTE, Rows
from .stages import stages

_SPLIT = SCHEDULES.index("zero-bubble")
_HALF, _SINGLE = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class _Line:
    """An amount that grows with the samples n of a micro-batch: `fixed + each * n`."""

    fixed: float
    each: float

    @classmethod
    def through(cls, one: float, two: float) -> _Line:
        """From the amounts of one and of two samples."""
        return cls(2.0 * one - two, two - one)


def quick_bytes(
    profile: Profile, model: Models, rows: Rows, layouts: Layouts, base: Plan, local: Callable[[Plan], Local]
) -> Array:
    """Bytes of the fullest rank of every row. `local` gives one rank's part of a model that tp and cp divide."""
    found = np.empty(len(rows.tp))
    keys = (rows.tp * 64 + rows.cp) * len(RECOMPUTE) + rows.recompute
    for key in np.unique(keys):
        mine = np.flatnonzero(keys == key)
        tp, cp, again = (int(column[mine[0]]) for column in (rows.tp, rows.cp, rows.recompute))
        plan = replace(base, tp=tp, cp=cp, recompute=RECOMPUTE[again])
        found[mine] = _alike(profile, model, rows.take(mine), layouts.take(mine), plan, local(plan))
    return found


def _alike(profile: Profile, model: Models, rows: Rows, layouts: Layouts, plan: Plan, local: Local) -> Array:
    """Rows that divide and recompute layers in the same way."""
    amounts = _amounts(local.profile, plan)
    n = layouts.slice

    def at(layer: str, what: str) -> Array:
        line = amounts[layer, what]
        return line.fixed + line.each * n

    held = stages(model.take(np.zeros(len(n), dtype=np.intp)), layouts)
    parts = {x.name.partition(".")[0]: x for x in local.profile.layers}
    block, ends = float(parts["blocks"].parameters), (parts["embedding"], parts["head"])
    deferred = np.where(rows.order == _SPLIT, at("blocks", "deferred"), 0.0)
    # copies of weights in 16 bits stay until the backward, but for those that zero=3 gathers and lets go of
    copies = np.where(rows.zero == 3, amounts["blocks", "saved"].fixed, 0.0)
    kept = at("blocks", "saved") - copies + deferred
    alone = rows.pp == 1
    tables = [float(x.parameters) for x in ends]
    last = float(ends[1].parameters + ends[1].tied)  # on one rank both ends share a tied table

    def stage(layers: Array, weights: Array, flight: Array, saved: Array, working: Array) -> Array:
        weights = layers * block + weights
        return _states(profile, rows, weights) + flight * (layers * kept + saved) + working + at("blocks", "output")

    one = np.ones_like(n)
    none = np.zeros_like(n)
    working = np.maximum(at("blocks", "working"), at("head", "working"))
    both = at("embedding", "saved") + at("head", "saved")
    choices = np.stack(
        [
            stage(
                held.first,
                one * (tables[0] + np.where(alone, tables[1], 0.0)),
                in_flight(layouts, 0),
                np.where(alone, both, at("embedding", "saved")),
                np.where(alone, working, at("blocks", "working")),
            ),
            np.where(rows.pp > 2, stage(held.inner, none, in_flight(layouts, 1), none, at("blocks", "working")), 0.0),
            np.where(alone, 0.0, stage(held.last, one * last, one, at("head", "saved"), working)),
        ]
    )
    largest = max(x.largest for x in local.profile.layers)
    sent = np.where((rows.zero == 2) & (rows.dp > 1), IN_FLIGHT * max(float(Plan().bucket), _SINGLE * largest), 0.0)
    # zero=3 has a unit in 16 bits twice, and its gradients, beside the ends
    units = 2.0 * _HALF * block + _SINGLE * block + _HALF * sum(tables)
    gathered = np.where((rows.zero == 3) & (rows.dp > 1), units, 0.0)
    return np.asarray(choices.max(axis=0) + sent + gathered + profile.input.at(1.0) * n * rows.micro, dtype=np.float64)


def _states(profile: Profile, rows: Rows, weights: Array) -> Array:
    """Parameters, gradients and optimizer state."""
    width, state = float(profile.parameter_bytes), profile.state_per_parameter
    over = np.where(rows.zero > 0, rows.shard, 1.0)
    parts = (width, np.where(rows.zero == 3, over, 1.0)), (width, np.where(rows.zero >= 2, over, 1.0)), (state, over)
    return np.asarray(sum(size * weights / by for size, by in parts), dtype=np.float64)


def _amounts(profile: Profile, plan: Plan) -> dict[tuple[str, str], _Line]:
    """What each kind of layer holds, by (name, what)."""
    one, two = (kept_by_cells(profile, plan, n) for n in (1.0, 2.0))
    found = {}
    for x, a, b in zip(profile.layers, one, two, strict=True):
        name = x.name.partition(".")[0]
        for what in Held.__slots__:
            found[name, what] = _Line.through(getattr(a, what), getattr(b, what))
        if plan.recompute == "selective" and x.composite:
            more = kept_bytes(x, "cuda", profile.activation_bytes)
            saved, working = found[name, "saved"], found[name, "working"]
            found[name, "saved"] = _Line(saved.fixed + more.fixed, saved.each + more.per_sample)
            found[name, "working"] = _Line(working.fixed - more.fixed, working.each - more.per_sample)
    return found
