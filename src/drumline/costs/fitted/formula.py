"""The formula behind each part of a fitted estimate, in words with numbers."""

from __future__ import annotations

from ...core.units import format_bytes, format_count, format_rate, format_seconds
from ...models.profile import Profile
from ...plans import Plan
from ..estimate import Estimate
from ..model import TimeTerm
from ..straggling import waiting_words
from .inputs import LayoutColumns, ModelColumns
from .stages import stage_sizes
from .step import StepTimes


def time_terms(
    profile: Profile,
    plan: Plan,
    e: Estimate,
    *,
    model: ModelColumns,
    layout: LayoutColumns,
    times: StepTimes,
    bandwidth: float,
) -> list[TimeTerm]:
    """Terms of the parts of a step, then of its exposed communication by axis."""
    sizes = stage_sizes(model, layout)
    layers = int(sizes.inner[0] if plan.pp > 2 else sizes.first[0])
    weights = float(sizes.weights_per_rank[0])
    n, m = int(layout.micro_batch_size[0]), plan.micro
    updated = weights / (plan.shards if plan.zero else 1)
    sent = e.parts["communication"]

    def compute(phase: str) -> str:
        flops = profile.flops(phase).at(profile.batch_size) / plan.ranks
        return (
            f"{m} x {layers} layers of a stage, matmuls + attention + elementwise kernels on n = {n} samples: "
            f"{format_count(flops, 'FLOP')} per rank at {format_count(flops / e.parts[phase], 'FLOP/s')}"
        )

    text = {
        "recompute": f"{m} micro-batches x the forward of what was not kept (recompute={plan.recompute})",
        "bubble": f"the other {plan.pp - 1} stages once, as far as {plan.schedule} with {plan.virtual} stages per rank "
        "waits for them",
        "communication": f"exposed communication: {format_seconds(sent)} of {format_seconds(sent + e.hidden_seconds)}",
        "optimizer": f"{format_count(updated)} parameters, at a memory bandwidth of {format_rate(bandwidth)}",
        "overhead": "time between two steps, and waiting for the slowest node",
        "waiting": waiting_words(plan),
    }
    terms = [
        TimeTerm(k, compute(k) if k in ("forward", "backward") else text.get(k, ""), v) for k, v in e.parts.items() if v
    ]
    return [*terms, *_exposed(plan, model, n, layers, weights, times)]


def _exposed(plan: Plan, model: ModelColumns, n: int, layers: int, weights: float, times: StepTimes) -> list[TimeTerm]:
    """Communication that the step waits for, by axis; the terms add up to `communication`."""
    m = plan.micro
    activations = 2.0 * n * float(model.sequence[0]) / plan.cp * float(model.hidden[0])
    half_rings = 12 if plan.recompute == "full" else 8
    text = {
        "tp": f"{m} x {layers} layers x {half_rings} halves of an all-reduce of {format_bytes(activations)} over "
        f"{plan.tp} ranks",
        "cp": f"{m} x {layers} layers x keys and values around {plan.cp} ranks, less what attention hides",
        "pp": f"{m} x {2 * plan.virtual} messages of {format_bytes(activations / plan.tp)} between neighbours",
        "dp": f"{format_count(weights)} gradients per rank x 4 bytes over {plan.dp} replicas"
        f"{', parameters gathered' if plan.zero else ''}, less what is hidden",
    }
    return [TimeTerm(k, words, v) for k, words in text.items() if (v := float(getattr(times, k)[0]))]
