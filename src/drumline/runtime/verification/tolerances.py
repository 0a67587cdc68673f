"""Tolerances: how far a plan's run may differ from one device's, by dtype and by what is compared.

A low-precision dtype also rounds on one device. So each dtype has a fixed bound; if one device itself is further from
float64 than half of it, the plan may be twice as far from one device as one device is from float64: two runs with
equally large but different rounding differ by no more. In float32 the rounding is at least what the plan showed in
float64, where nothing but rounding passes, times the ratio of the two types' precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...plans import Plan
from .activations import ActivationRecorder
from .comparison import largest_error

BOUNDS = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2, "tf32": 2e-2, "float8": 0.25}
"""The largest relative error that passes, by compute dtype; tf32 has the mantissa of float16. In float8 a gradient that
enters a matmul has two bits of mantissa."""

SHARES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.03, "tf32": 0.03, "float8": 0.2}
"""The fraction of the largest tensor below which a tensor counts as zero. bfloat16 has three digits: the gradient of a
conv bias before a BatchNorm, which is truly zero, comes out at about 1e-4 of the largest."""

ROUNDINGS, FLOAT32_ROUNDINGS = 2.0, 4.0
"""Allowed error of a plan's run, as a multiple of one device's own rounding error. In float32 that is small, and
gradients that are truly zero (a bias before a BatchNorm) consist of it: twice the error was too little for some
convolutional nets under `tp` and `pp`, by some percent. Faults of the arithmetic show in float64."""

ZERO_GRADIENT = 1e-4
"""Weight of a parameter's difference where its gradient is exactly zero on one device. The plan's may be rounding, of
which Adam's epsilon leaves about 1e-8 of an update; a forgotten weight decay still exceeds the bound."""

MAX_BOUND = 0.5
"""Upper limit of every bound, however large the rounding: rounding does not account for half of a gradient."""

COMPRESSED = {"fp16": 1e-2, "powersgd": 0.25}
"""The largest relative error of any step's loss that passes with compressed gradients, which are approximate."""

WITHOUT_HALO = 0.25
"""The same for tiles without halos: the error depends on the share of pixels at a tile edge."""

APPROXIMATE_LOSS = {"bf16-pure": 5e-2, "fp8": 5e-2}
"""The largest relative error of any step's loss that passes with weights in bf16, or matmuls in fp8, against one device
in bf16 with weights in fp32."""

COMPUTE_DTYPES = {
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "bf16-pure": "bfloat16",
    "fp8": "float8",
}
"""The dtype whose tolerance applies to a precision; a CPU has no tf32."""


@dataclass(frozen=True, slots=True)
class VerificationRun:
    """Losses, final parameters and recorded activations of one run."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    activations: ActivationRecorder


def errors_of(
    mine: VerificationRun, theirs: VerificationRun, computed: str, plan: Plan
) -> tuple[dict[str, float], float]:
    """The errors that are checked, by part, and the largest error of any step's loss."""
    exact, share = computed == "float64", limits_of(computed, plan)[1]
    off = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine.losses, theirs.losses, strict=True)]
    off = [x if x == x else math.inf for x in off]  # max() would ignore NaN
    parts = {
        "losses": max(off) if exact else off[0],
        "gradients": largest_error(mine.activations.gradients[0], theirs.activations.gradients[0], share),
    }
    if exact:
        parts["last gradients"] = largest_error(mine.activations.gradients[-1], theirs.activations.gradients[-1])
        final = discount_small_gradients(mine.parameters, theirs.parameters, theirs.activations.largest)
        parts["parameters"] = largest_error(final, theirs.parameters)
    return parts, max(off)


def limits_of(computed: str, plan: Plan) -> tuple[float, float]:
    """The bound and the zero threshold for a dtype; compressed gradients are no better than half precision."""
    if computed != "float64" and not plan.halo:
        return WITHOUT_HALO, SHARES[computed]
    kinds = [computed] if computed == "float64" or plan.compress == "none" else [computed, "float16"]
    return max(BOUNDS[k] for k in kinds), max(SHARES[k] for k in kinds)


def bounds_of(computed: str, plan: Plan, rounding: Mapping[str, float]) -> dict[str, float]:
    """The bounds by part; `rounding` is the error of one device in this dtype relative to float64."""
    bound = limits_of(computed, plan)[0]
    if computed == "float64":
        return dict.fromkeys(("losses", "gradients", "last gradients", "parameters"), bound)
    own = {part: rounding.get(part, 0.0) for part in ("losses", "gradients")}
    times = FLOAT32_ROUNDINGS if computed == "float32" else ROUNDINGS
    return {part: max(bound, min(times * e, MAX_BOUND) if math.isfinite(e) else 0.0) for part, e in own.items()}


def rounded(exact: float, computed: str) -> float:
    """The rounding in float32 of a plan that differs by `exact` in float64; 0 for coarser types."""
    ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    return exact * ratio if computed == "float32" and exact <= BOUNDS["float64"] else 0.0


def worst_of(parts: Mapping[str, float], bounds: Mapping[str, float]) -> str:
    """The part closest to its bound, or furthest beyond it; NaN is beyond all."""
    return max(parts, key=lambda part: parts[part] / bounds[part] if parts[part] == parts[part] else math.inf)


def discount_small_gradients(
    final: dict[str, torch.Tensor], updated: dict[str, torch.Tensor], largest: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The plan's parameters, closer to those of the reference where gradients are small.

    Adam divides a gradient by its own size, and so its rounding error, which is that of the largest gradients. The
    difference of an element counts as much less as its gradient is smaller than the share of the largest gradient to
    which gradients are compared. Where a true gradient is zero (an attention key bias) no two runs agree, and it hardly
    counts. The comparison of gradients has already shown that they are small, or zero, under the plan too.
    """
    most = max((float(g.max()) for g in largest.values() if g.numel()), default=0.0)
    counted = {}
    for name, p in final.items():
        if most > 0 and name in largest:
            weight = (largest[name].double() / (SHARES["float64"] * most)).clamp(max=1.0)
            weight = torch.where(largest[name] < 1e-12 * most, 0.0, weight)
            weight = torch.where(largest[name] == 0, ZERO_GRADIENT, weight)
            reference = updated[name].cpu()
            p = reference + weight * (p - reference)
        counted[name] = p
    return counted
