"""Proof that a plan computes what one device would: same seed, same batches, the plan against the reference.

In float64 the two must agree to 1e-10 on losses, gradients and parameters over all steps; in the plan's own precision
within the bounds of judge.py on the losses and on the first step's gradients. The error of a tensor is
max|a-b| / max(max|b|, s x the largest max|.| of all tensors), because some true gradients are zero and their rounding
is noise; s is 1e-3, and 0.1 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ...core.job import Job
from ...partition.capture import captured_within
from ...plans import Plan, check
from ...reports.division import Division
from ..compiling import inside_compiled
from ..engine import Engine, initialize
from ..experts import inside_experts
from .chance import Certain, without_chance
from .compare import Finding, compare_gradients, compare_outputs, gather, gather_split, largest_error
from .judge import COMPRESSED, COMPUTES, WITHOUT_HALO, Outcome, bounds_of, errors_of, limits_of, settled, worst_of
from .reference import run_reference
from .witness import Exact, Witness


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and what came out."""

    passed: bool
    plan: str
    ranks: int
    steps: int
    errors: dict[str, float]
    """Largest relative error by the type that was computed in."""
    bounds: dict[str, float]
    first_divergence: str | None
    """The first module whose inputs agree and whose outputs do not."""
    phase: str = ""
    """Where it diverged: `forward`, `backward` or `update`."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Errors of losses, gradients and parameters, by type."""
    later_losses: float = 0.0
    """The largest error of a later step's loss in the plan's precision: shown, not judged."""
    reference: str = ""
    """Which reference was used."""
    notes: tuple[str, ...] = ()
    division: Division | None = None
    """What a plan that splits the model could not split, and where its stages begin."""


def verify(job: Job, plan: Plan, *, steps: int = 10) -> Verification | None:
    """Run on every rank of the plan; the first rank gets the result."""
    check(plan)
    parts: dict[str, dict[str, float]] = {}
    errors: dict[str, float] = {}
    bounds: dict[str, float] = {}
    finding: Finding | None = None
    notes: set[str] = set()
    engine: Engine | None = None
    truth: Outcome | None = None
    later = unjudged = 0.0
    for exact in (True, False):
        # In float64 the arithmetic of the plan is checked, not its precision, or what compression or tiles lose.
        tried = replace(plan, precision="fp32", compress="none", halo=True) if exact else plan
        engine = engine_of(job, tried, exact=exact)
        name = computed_in(engine)
        found = _compare(engine, steps, truth, notes)
        if found is not None:
            parts[name], later, truth = found.parts, found.later, truth or found.theirs
            if not exact and not plan.halo:
                unjudged = parts[name].pop("gradients")
            worst = worst_of(parts[name], found.bounds)
            errors[name], bounds[name] = parts[name][worst], found.bounds[worst]
            if finding is None and not errors[name] <= bounds[name]:
                finding = found.first
    if engine is None or engine.rank > 0:
        return None
    passed = all(errors[name] <= bounds[name] for name in errors)
    if plan.compress != "none":
        passed = passed and later <= COMPRESSED[plan.compress]
        notes.add(
            f"compress={plan.compress} is approximate: losses off by {later:.1e}, at most {COMPRESSED[plan.compress]:g}"
        )
    if not plan.halo:
        passed = passed and later <= WITHOUT_HALO
        notes.add(
            f"halo=false is approximate: losses off by {later:.1e}, at most {WITHOUT_HALO:g}; the first gradients by "
            f"{unjudged:.1e}, which is not judged"
        )
    return Verification(
        passed=passed,
        plan=str(plan),
        ranks=plan.ranks,
        steps=steps,
        errors=errors,
        bounds=bounds,
        first_divergence=None if passed else (finding.module if finding else "(not located)"),
        phase="" if passed or finding is None else finding.phase,
        parts=parts,
        later_losses=later,
        reference=f"one device, the same {plan.micro} micro-batch{'es' if plan.micro > 1 else ''} of each batch",
        notes=tuple(sorted(notes)),
        division=engine.split.division if engine.split else None,
    )


def engine_of(job: Job, plan: Plan, *, exact: bool) -> Engine:
    """The engine of a plan; `exact`: in float64, and what is captured of the model has nothing else in it."""
    with captured_within(Exact) if exact else nullcontext():
        return initialize(job, plan, dtype=torch.float64 if exact else None)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A run of the plan beside one device's, in one type."""

    parts: dict[str, float]
    bounds: dict[str, float]
    later: float
    """The largest error of any step's loss."""
    first: Finding | None
    theirs: Outcome


def _compare(engine: Engine, steps: int, truth: Outcome | None, notes: set[str]) -> _Compared | None:
    """Run plan and reference in one type; the first rank gets what came out. `truth`: one device in float64."""
    mine = run_plan(engine, steps, notes)
    present = torch.tensor([float(m.samples > 0) for m in engine.stream.batch(0).micros])
    outputs, output_gradients = (
        gather_split(engine, seen, mine.witness.splits, len(present)) if engine.split else gather(engine, seen, present)
        for seen in (mine.witness.outputs, mine.witness.output_gradients)
    )
    if engine.rank > 0:
        dist.barrier()
        return None
    theirs = run_one_device(engine, steps)
    computed = computed_in(engine)
    parts, later = errors_of(mine, theirs, computed, engine.plan)
    rounding = errors_of(theirs, truth, computed, engine.plan)[0] if truth is not None else {}
    bounds, share = bounds_of(computed, engine.plan, rounding), limits_of(computed, engine.plan)[1]
    notes |= _raised(computed, engine.plan, rounding, bounds)
    bound = max(bounds.values())
    # a gradient seen by a rank is that of its own loss, which counts `ranks` times (they are averaged)
    finding = compare_outputs(outputs, theirs.witness.outputs, bound, share)
    finding = finding or compare_gradients(
        output_gradients,
        mine.witness.gradients[0],
        theirs.witness,
        scale=_scale(engine),
        bound=bound,
        clipped=engine.job.clip is not None,
        share=share,
    )
    if finding is None and parts.get("parameters", 0.0) > bound:
        final = settled(mine.parameters, theirs.parameters, theirs.witness.largest)
        worst = max(final, key=lambda k: largest_error({k: final[k]}, {k: theirs.parameters[k]}))
        finding = Finding(worst.rpartition(".")[0], "update", parts["parameters"])
    dist.barrier()
    return _Compared(parts, bounds, later, finding, theirs)


def _raised(computed: str, plan: Plan, rounding: Mapping[str, float], bounds: Mapping[str, float]) -> set[str]:
    """What is said where one device's own rounding sets a bound."""
    plain = limits_of(computed, plan)[0]
    return {
        f"in {computed} one device's own {part} are {rounding[part]:.1e} off float64, so the plan's may be "
        f"{bounds[part]:.1e} off one device's, not {plain:g}"
        for part in rounding
        if bounds[part] > plain
    }


def computed_in(engine: Engine) -> str:
    """The type that an engine computes in."""
    if engine.dtype is torch.float64:
        return "float64"
    if engine.plan.precision == "tf32" and engine.device.type == "cuda":
        return "tf32"
    return COMPUTES[engine.plan.precision]


def _scale(engine: Engine) -> float:
    """How the gradient of an output in the plan's run relates to the reference's, which is that of the sum."""
    return float(engine.stream.batch(0).samples) / engine.strategy.divides


def run_plan(engine: Engine, steps: int, notes: set[str], *, locate: bool = True) -> Outcome:
    """Train under the plan, on every rank. `locate`: record what every module does in the first step."""
    witness = Witness()
    if locate and engine.split:
        witness.watch_split(engine.split)
    elif locate:
        blind = inside_compiled(engine.model) if engine.plan.compile else set()
        witness.watch(engine.model, blind=blind | inside_experts(engine.model))
    model = engine.split.template if engine.split else engine.model
    with without_chance(model) as certain, Exact() if engine.dtype is torch.float64 else nullcontext():
        losses = _train(engine, steps, witness, certain)
    notes |= certain.notes
    return Outcome(losses, {k: p.cpu().clone() for k, p in engine.whole_parameters().items()}, witness)


def _settles(engine: Engine) -> bool:
    """Whether what is drawn in a step is settled: PowerSGD begins with such numbers, and would send nothing then."""
    return engine.plan.compress != "powersgd"


def _train(engine: Engine, steps: int, witness: Witness, certain: Certain) -> list[float]:
    """The steps; the witness gets the gradients of the first and of the last."""
    micro = [0]
    plain, attempt = engine.loss_of, engine.gradients_of

    def attempted(batch: Any) -> Any:
        micro[0] = 0
        if engine.steps == 0:
            witness.forget()  # an overflow of fp16 runs the batch again
        return attempt(batch)

    def counted(part: Any) -> Any:
        witness.micro(micro[0])
        micro[0] += 1
        return plain(part)

    def ready() -> None:
        if engine.steps in (0, steps - 1):
            witness.gradients.append({k: g.cpu().clone() for k, g in engine.whole_gradients().items()})

    engine.gradients_of = attempted  # type: ignore[method-assign]  # observed, not changed
    engine.loss_of = counted  # type: ignore[method-assign,assignment]  # observed, not changed
    engine.gradients_ready = ready  # type: ignore[method-assign]  # this is what it is for
    losses = []
    for batch in engine.data(steps):
        certain.settles = _settles(engine)
        losses.append(engine.step(batch))
        certain.settles = False
        witness.stop()
    return losses


def run_one_device(engine: Engine, steps: int, *, exact: bool = False) -> Outcome:
    """Train the reference of an engine's plan, in the type that the engine computes in; `exact`: in float64."""
    exact = exact or engine.dtype is torch.float64
    witness = Witness()
    certain: list[Certain] = []
    contexts = ExitStack()

    def prepare(model: torch.nn.Module) -> None:
        certain.append(contexts.enter_context(without_chance(model)))
        if exact:
            contexts.enter_context(Exact())
        witness.watch(model)

    def before_micro(step: int, i: int) -> None:
        certain[0].settles = _settles(engine)
        witness.micro(i) if step == 0 else witness.stop()

    def before_update(step: int, model: torch.nn.Module) -> None:
        certain[0].settles = False
        for k, p in model.named_parameters():
            if p.grad is not None:
                g = p.grad.detach().abs().cpu()
                witness.largest[k] = torch.maximum(g, witness.largest.get(k, g))
        if step in (0, steps - 1):
            witness.gradients.append(
                {k: p.grad.detach().cpu().clone() for k, p in model.named_parameters() if p.grad is not None}
            )

    scale = engine.scaler.scale / engine.job.batch_size if engine.scaler and not exact else 1.0
    with contexts:
        losses, model = run_reference(
            engine.job,
            micro=engine.plan.micro,
            steps=steps,
            device=engine.device,
            scale=scale,
            dtype=torch.float64 if exact else engine.dtype,
            precision="fp32" if exact else engine.plan.precision,
            prepare=prepare,
            before_micro=before_micro,
            before_update=before_update,
        )
    return Outcome(losses, {k: p.detach() for k, p in model.named_parameters()}, witness)
