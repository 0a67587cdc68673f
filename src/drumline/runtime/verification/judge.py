"""Says how far a plan's run may be from one device's: the bounds by type, what is compared, and what passes.

A type with few digits loses some of them on one device too. So its bound is stated, and where one device itself is
further from float64 than half of it, the plan may be twice as far from one device as one device is from float64: two
runs whose rounding is equally large and falls otherwise are no further apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...plans import Plan
from .compare import largest_error
from .witness import Witness

BOUNDS = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2, "tf32": 2e-2}
"""The largest relative error that passes, by the type that was computed in; tf32 has the digits of float16."""

SHARES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.03, "tf32": 0.03}
"""The share of the largest tensor below which a tensor counts as zero. bfloat16 has three digits: a conv's bias before
a BatchNorm, whose true gradient is zero, comes out at some 1e-4 of the largest."""

ROUNDINGS = 2.0
"""How many times the rounding of one device a plan's run may be off from it."""

MOST = 0.5
"""No bound is above this, however little is left of a model's digits: half of a gradient is not missed by rounding."""

COMPRESSED = {"fp16": 1e-2, "powersgd": 0.25}
"""The largest relative error of any step's loss that passes where gradients are compressed, which is no exact plan."""

WITHOUT_HALO = 0.25
"""The same where tiles have no halo: how far off a loss is depends on the share of pixels that lie at a cut."""

COMPUTES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The type that a precision is judged in; a CPU has no tf32."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    witness: Witness


def errors_of(mine: Outcome, theirs: Outcome, computed: str, plan: Plan) -> tuple[dict[str, float], float]:
    """The errors that are judged, by part, and the largest of any step's loss."""
    exact, share = computed == "float64", limits_of(computed, plan)[1]
    off = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine.losses, theirs.losses, strict=True)]
    off = [x if x == x else math.inf for x in off]  # max() would pass over what is no number
    parts = {
        "losses": max(off) if exact else off[0],
        "gradients": largest_error(mine.witness.gradients[0], theirs.witness.gradients[0], share),
    }
    if exact:
        parts["last gradients"] = largest_error(mine.witness.gradients[-1], theirs.witness.gradients[-1])
        final = settled(mine.parameters, theirs.parameters, theirs.witness.largest)
        parts["parameters"] = largest_error(final, theirs.parameters)
    return parts, max(off)


def limits_of(computed: str, plan: Plan) -> tuple[float, float]:
    """The bound and the share for a type; gradients that travel compressed are not better than half precision."""
    if computed != "float64" and not plan.halo:
        return WITHOUT_HALO, SHARES[computed]
    kinds = [computed] if computed == "float64" or plan.compress == "none" else [computed, "float16"]
    return max(BOUNDS[k] for k in kinds), max(SHARES[k] for k in kinds)


def bounds_of(computed: str, plan: Plan, rounding: Mapping[str, float]) -> dict[str, float]:
    """What passes, by part; `rounding` is how far one device in this type is from one device in float64."""
    bound = limits_of(computed, plan)[0]
    if computed == "float64":
        return dict.fromkeys(("losses", "gradients", "last gradients", "parameters"), bound)
    own = {part: rounding.get(part, 0.0) for part in ("losses", "gradients")}
    return {part: max(bound, min(ROUNDINGS * e, MOST) if math.isfinite(e) else 0.0) for part, e in own.items()}


def worst_of(parts: Mapping[str, float], bounds: Mapping[str, float]) -> str:
    """The part that is nearest to its bound, or furthest beyond it; what is no number is beyond all."""
    return max(parts, key=lambda part: parts[part] / bounds[part] if parts[part] == parts[part] else math.inf)


def settled(
    final: dict[str, torch.Tensor], updated: dict[str, torch.Tensor], largest: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The plan's parameters, without the numbers whose true gradient is zero (a key's bias in attention).

    Adam divides the rounding of such a gradient by itself, and steps by it: in these numbers no two runs agree. That
    their gradients are zero under the plan too, the comparison of gradients has shown.
    """
    noise = 1e-12 * max((float(g.max()) for g in largest.values() if g.numel()), default=0.0)
    return {
        k: torch.where((largest[k] > 0) & (largest[k] < noise), updated[k].cpu(), p) if k in largest else p
        for k, p in final.items()
    }
