"""Applies the corrections fitted to earlier runs (`Cluster.corrections`) to an estimate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace

from ..clusters.corrections import LEAST, MOST, CorrectionFactor, Corrections
from ..models.profile import Profile
from ..plans import Plan
from .estimate import Estimate

ONE, REPLICAS, SHARDED, FULLY_SHARDED = "one", "replicas", "sharded", "fully sharded"
"""Kinds of plans. An error for one kind is often the same for every model."""

CORRECTED_AS = {"recompute": "backward", "bubble": "backward", "overhead": "communication", "waiting": "communication"}
"""Parts that are corrected like another part, so that runs without them count as well."""


def plan_kind(plan: Plan) -> str:
    """The kind of a plan, as far as its cost is concerned: `replicas`, `split by pp, tp`, `one with compile`."""
    tags = {
        "compile": plan.compile,
        "graph": plan.graph,
        plan.compress: plan.compress != "none",
        "threads": plan.backend == "threads",
        "offload": plan.offload != "none",
        "experts": plan.ep > 1,
    }
    used = ", ".join(name for name, is_used in tags.items() if is_used)
    return _base(plan) + (f" with {used}" if used else "")


def _base(plan: Plan) -> str:
    if plan.sync != "allreduce":
        return f"{plan.sync_mode} workers" if plan.has_coordinator else f"{plan.sync_mode} steps"
    if plan.splits_model:
        axes = {"cp": plan.cp, "pp": plan.pp, "tile": plan.tile[0] * plan.tile[1], "tp": plan.tp}
        return f"split by {', '.join(name for name, n in axes.items() if n > 1)}"
    if plan.ranks == 1:
        return ONE
    return {0: REPLICAS, 3: FULLY_SHARDED}.get(plan.zero, SHARDED)


def model_digest(profile: Profile) -> str:
    """A digest of a model and its optimizer: the same for any batch size, and after a profile was written and read."""
    words = [f"{profile.optimizer} {profile.parameter_bytes}"]
    for x in profile.layers:
        work = x.flops()
        words.append(f"{x.name} {x.kind} {x.parameters} {x.repeats} {work.fixed:.6g} {work.per_sample:.6g}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def bounded(value: float) -> float:
    """A factor, clipped to the range of corrections."""
    return min(MOST, max(LEAST, value))


class Corrector:
    """The corrections of a machine for one model in one precision."""

    def __init__(self, corrections: Corrections, profile: Profile, precision: str) -> None:
        model = model_digest(profile) if corrections else ""
        self._by_plan: dict[tuple[str, int], list[CorrectionFactor]] = {}
        self._factors = [f for f in corrections.factor if f.precision == precision and f.job in ("", model)]

    def __call__(self, e: Estimate, plan: Plan) -> Estimate:
        """Multiply every part of an estimate; the uncorrected time stays in `raw_seconds`."""
        factors = self._matching(plan_kind(plan), plan.ranks)
        if not factors:
            return e
        parts = {name: seconds * _product(factors, name) for name, seconds in e.parts.items()}
        runs = max(f.runs for f in factors)
        own = max((f.runs for f in factors if f.job), default=0)
        return replace(
            e, parts=parts, step_seconds=sum(parts.values()), raw_seconds=e.step_seconds, runs=runs, own_runs=own
        )

    def _matching(self, kind: str, ranks: int) -> list[CorrectionFactor]:
        if (kind, ranks) not in self._by_plan:
            self._by_plan[kind, ranks] = [f for f in self._factors if (f.kind, f.ranks) in (("", 0), (kind, ranks))]
        return self._by_plan[kind, ranks]


def _product(factors: Iterable[CorrectionFactor], part: str) -> float:
    return bounded(math.prod(f.value for f in factors if f.part == CORRECTED_AS.get(part, part)))
