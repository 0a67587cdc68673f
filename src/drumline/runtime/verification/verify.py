"""Verifies that a plan computes what one device would: same seed, same batches, the plan against the reference.

In float64 the two must agree to 1e-10 on losses, gradients and parameters over all steps; in the plan's own precision
within the bounds of tolerances.py on the losses and on the first step's gradients. The error of a tensor is
max|a-b| / max(max|b|, s x the largest max|.| of all tensors), because some true gradients are zero and their rounding
is noise; s is 1e-3, and 0.1 in bfloat16. Plans whose replicas step by themselves have another reference
(verify_replicas.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ...core.job import Job
from ...partition.capture_conditions import captured_within
from ...plans import Plan, check
from ...reports.split_summary import SplitSummary
from ..core.compiling import compiles_whole, inside_compiled
from ..engine import Engine, initialize
from ..strategies.experts import inside_experts
from .activations import ActivationRecorder
from .comparison import Divergence, compare_gradients, compare_outputs, gather, largest_error
from .explanation import explain
from .modes import Float64Mode, NoRandomness, without_randomness
from .one_device import reference_text, replaces_draws, run_one_device
from .tolerances import (
    APPROXIMATE_LOSS,
    COMPRESSED,
    COMPUTE_DTYPES,
    WITHOUT_HALO,
    VerificationRun,
    bounds_of,
    discount_small_gradients,
    errors_of,
    limits_of,
    rounded,
    worst_of,
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a comparison between a plan and one device."""

    passed: bool
    plan: str
    ranks: int
    steps: int
    errors: dict[str, float]
    """Largest relative error by compute dtype."""
    bounds: dict[str, float]
    first_divergence: str | None
    """The first module whose inputs agree and whose outputs differ."""
    phase: str = ""
    """Phase of the divergence: `forward`, `backward` or `update`."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Errors of losses, gradients and parameters, by dtype."""
    later_losses: float = 0.0
    """The largest error of a later step's loss in the plan's precision: shown, not checked."""
    reference: str = ""
    """Description of the reference."""
    notes: tuple[str, ...] = ()
    explanation: str = ""
    """For a divergence: what in the job depends on how a batch is cut, and the fix, if that was found."""
    division: SplitSummary | None = None
    """For a split model: what the plan could not split, and where its stages begin."""

    def _repr_html_(self) -> str:
        from ...reports.notebook import summary

        verdict = "passed" if self.passed else f"diverges in {self.first_divergence} ({self.phase})"
        rows = [[k, f"{v:.1e}", f"{self.bounds[k]:g}"] for k, v in self.errors.items()]
        lead = f"{self.plan}: {verdict}; {self.steps} steps, compared with {self.reference}"
        return summary(lead, ("type", "largest relative error", "bound"), rows)


def verify(job: Job, plan: Plan, *, steps: int = 10) -> Verification | None:
    """Verify a plan; runs on every rank, and the first rank gets the result."""
    check(plan)
    if plan.steps_alone:
        from .verify_replicas import verify_replicas  # it builds on this module

        return verify_replicas(job, plan, steps=steps)
    parts: dict[str, dict[str, float]] = {}
    errors: dict[str, float] = {}
    bounds: dict[str, float] = {}
    divergence: Divergence | None = None
    notes: set[str] = set()
    engine: Engine | None = None
    truth: VerificationRun | None = None
    later = unchecked = 0.0
    for exact in (True, False):
        # float64 checks the arithmetic of the plan, not its precision, compression or missing halos
        checked = replace(plan, precision="fp32", compress="none", halo=True) if exact else plan
        engine = build_engine(job, checked, exact=exact)
        name = compute_dtype(engine)
        comparison = _compare(engine, steps, truth, parts.get("float64", {}), notes)
        if comparison is not None:
            parts[name], later, truth = comparison.parts, comparison.later, truth or comparison.reference
            if not exact and not plan.halo:
                unchecked = parts[name].pop("gradients")
            worst = worst_of(parts[name], comparison.bounds)
            errors[name], bounds[name] = parts[name][worst], comparison.bounds[worst]
            if divergence is None and not errors[name] <= bounds[name]:
                divergence = comparison.divergence
    if engine is None or engine.rank > 0:
        return None
    passed = all(errors[name] <= bounds[name] for name in errors)
    if plan.compress != "none":
        passed = passed and later <= COMPRESSED[plan.compress]
        notes.add(
            f"compress={plan.compress} is approximate: loss error {later:.1e}, at most {COMPRESSED[plan.compress]:g}"
        )
    if plan.precision in APPROXIMATE_LOSS:
        most = APPROXIMATE_LOSS[plan.precision]
        passed = passed and later <= most
        notes.add(f"precision={plan.precision} is approximate: loss error {later:.1e}, at most {most:g}")
    if not plan.halo:
        passed = passed and later <= WITHOUT_HALO
        notes.add(
            f"halo=false is approximate: loss error {later:.1e}, at most {WITHOUT_HALO:g}; first gradients "
            f"{unchecked:.1e} (not checked)"
        )
    return Verification(
        passed=passed,
        plan=str(plan),
        ranks=plan.ranks,
        steps=steps,
        errors=errors,
        bounds=bounds,
        first_divergence=None if passed else (divergence.module if divergence else "(not located)"),
        phase="" if passed or divergence is None else divergence.phase,
        parts=parts,
        later_losses=later,
        reference=reference_text(plan),
        notes=tuple(sorted(notes)),
        explanation="" if passed else explain(job),
        division=engine.strategy.summary,
    )


def build_engine(job: Job, plan: Plan, *, exact: bool) -> Engine:
    """The engine of a plan; `exact`: in float64, including everything that is captured of the model."""
    with captured_within(Float64Mode) if exact else nullcontext():
        return initialize(job, plan, dtype=torch.float64 if exact else None)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A run of the plan compared with one device's, in one dtype."""

    parts: dict[str, float]
    bounds: dict[str, float]
    later: float
    """The largest error of any step's loss."""
    divergence: Divergence | None
    reference: VerificationRun


def _compare(
    engine: Engine, steps: int, truth: VerificationRun | None, exact: Mapping[str, float], notes: set[str]
) -> _Comparison | None:
    """Run plan and reference in one dtype; the first rank gets the result.

    `truth` is one device in float64, and `exact` the errors of the plan in float64, if it has run in that.
    """
    mine = run_plan(engine, steps, notes)
    present = torch.tensor([float(m.samples > 0) for m in engine.stream.batch(0).micros])
    outputs, output_gradients = (
        gather(engine, own, mine.activations.splits, present)
        for own in (mine.activations.outputs, mine.activations.output_gradients)
    )
    if engine.rank > 0:
        dist.barrier()
        return None
    theirs = run_one_device(engine, steps)
    computed = compute_dtype(engine)
    parts, later = errors_of(mine, theirs, computed, engine.plan)
    own = errors_of(theirs, truth, computed, engine.plan)[0] if truth is not None else {}
    rounding = {part: max(error, rounded(exact[part], computed)) for part, error in own.items()}
    bounds, share = bounds_of(computed, engine.plan, rounding), limits_of(computed, engine.plan)[1]
    notes |= _raised_bounds(computed, engine.plan, rounding, bounds)
    bound = max(bounds.values())
    # gradients recorded on a rank are those of its own loss, which counts `ranks` times (they are averaged)
    divergence = compare_outputs(outputs, theirs.activations.outputs, bound, share)
    divergence = divergence or compare_gradients(
        output_gradients,
        mine.activations.gradients[0],
        theirs.activations,
        scale=_scale(engine),
        bound=bound,
        clipped=engine.job.clip is not None,
        share=share,
    )
    if divergence is None and parts.get("parameters", 0.0) > bound:
        final = discount_small_gradients(mine.parameters, theirs.parameters, theirs.activations.largest)
        worst = max(final, key=lambda k: largest_error({k: final[k]}, {k: theirs.parameters[k]}))
        divergence = Divergence(worst.rpartition(".")[0], "update", parts["parameters"])
    dist.barrier()
    return _Comparison(parts, bounds, later, divergence, theirs)


def _raised_bounds(computed: str, plan: Plan, rounding: Mapping[str, float], bounds: Mapping[str, float]) -> set[str]:
    """Notes on bounds that are set by one device's own rounding."""
    plain = limits_of(computed, plan)[0]
    return {
        f"in {computed} the {part} of one device are rounded by {rounding[part]:.1e}, so the plan's may differ "
        f"from one device's by {bounds[part]:.1e} instead of {plain:g}"
        for part in rounding
        if bounds[part] > plain
    }


def compute_dtype(engine: Engine) -> str:
    """The dtype that an engine computes in."""
    if engine.dtype is torch.float64:
        return "float64"
    if engine.plan.precision == "tf32" and engine.device.type == "cuda":
        return "tf32"
    return COMPUTE_DTYPES[engine.plan.precision]


def _scale(engine: Engine) -> float:
    """The ratio of an output's gradient in the reference, which is that of the sum, to the one in the plan's run."""
    return float(engine.stream.batch(0).samples) / engine.strategy.gradient_divisor


def run_plan(engine: Engine, steps: int, notes: set[str], *, locate: bool = True) -> VerificationRun:
    """Train under the plan, on every rank. `locate`: record the outputs of every module in the first step."""
    recorder = ActivationRecorder()
    if locate and engine.in_flight is None:  # with batches in flight, ranks are at different ones
        plan = engine.plan
        hidden = inside_compiled(engine.model, whole=compiles_whole(plan)) if plan.compile else set()
        recorder.watch(engine.strategy, skip=hidden | inside_experts(engine.model))
    with (
        without_randomness(engine.template, draws=replaces_draws(engine)) as randomness,
        Float64Mode(randomness) if engine.dtype is torch.float64 else nullcontext(),
    ):
        losses = _train(engine, steps, recorder, randomness)
    notes |= randomness.notes
    return VerificationRun(losses, {k: p.cpu().clone() for k, p in engine.whole_parameters().items()}, recorder)


def _train(engine: Engine, steps: int, recorder: ActivationRecorder, randomness: NoRandomness) -> list[float]:
    """Run the steps; the recorder gets the gradients of the first and the last."""
    attempt = engine.gradients_of

    def attempted(batch: Any) -> Any:
        if engine.steps == 0:
            recorder.clear()  # an fp16 overflow runs the batch again
        return attempt(batch)

    updates = itertools.count()

    def ready() -> None:
        if next(updates) in (0, steps - 1):
            recorder.gradients.append({k: g.cpu().clone() for k, g in engine.whole_gradients().items()})

    engine.gradients_of = attempted  # type: ignore[method-assign]  # observed, not changed
    engine.gradients_ready = ready  # type: ignore[method-assign]  # this is what it is for
    losses = []
    for batch in engine.data(steps):
        randomness.in_step = True
        engine.step(batch)
        randomness.in_step = False
        recorder.stop()
        losses += [done.loss for done in engine.completed_steps()]
    randomness.in_step = True
    engine.drain()
    return losses + [done.loss for done in engine.completed_steps()]
