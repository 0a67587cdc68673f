"""Proof that a plan computes what one device would: same seed, same batches, the plan against the reference.

In float64 the two must agree to 1e-10 on losses, gradients and parameters over all steps; in the plan's own precision
within a stated bound on the losses and on the first step's gradients. The error of a tensor is
max|a-b| / max(max|b|, s x the largest max|.| of all tensors), because some true gradients are zero and their rounding
is noise; s is 1e-3, and 0.1 in bfloat16.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ...job import Job
from ...plan import Plan
from ...report.division import Division
from ..compiling import inside_compiled
from ..engine import Engine, initialize
from ..experts import inside_experts
from .chance import Certain, without_chance
from .compare import Finding, compare_gradients, compare_outputs, gather, gather_split, largest_error
from .reference import run_reference
from .witness import Exact, Witness

BOUNDS = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""The largest relative error that passes, by the type that was computed in."""

SHARES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}
"""The share of the largest tensor below which a tensor counts as zero. bfloat16 has three digits: a conv's bias before
a BatchNorm, whose true gradient is zero, comes out at some 1e-4 of the largest."""

COMPRESSED = {"fp16": 1e-2, "powersgd": 0.25}
"""The largest relative error of any step's loss that passes where gradients are compressed, which is no exact plan."""

WITHOUT_HALO = 0.25
"""The same where tiles have no halo: how far off a loss is depends on the share of pixels that lie at a cut."""

COMPUTES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The type that a precision is judged in."""


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
    dtypes = ["float64", COMPUTES[plan.precision]]
    parts: dict[str, dict[str, float]] = {}
    finding: Finding | None = None
    notes: set[str] = set()
    engine: Engine | None = None
    later = unjudged = 0.0
    for name in dtypes:
        exact = name == "float64"
        # In float64 the arithmetic of the plan is checked, not its precision, or what compression or tiles lose.
        tried = replace(plan, precision="fp32", compress="none", halo=True) if exact else plan
        engine = initialize(job, tried, dtype=torch.float64 if exact else None)
        found = _compare(engine, steps, exact, notes)
        if found is not None:
            parts[name], first, later = found
            if not exact and not plan.halo:
                unjudged = parts[name].pop("gradients")
            if finding is None and max(parts[name].values()) > limits_of(name, plan)[0]:
                finding = first
    if engine is None or engine.rank > 0:
        return None
    errors = {name: max(p.values()) for name, p in parts.items()}
    bounds = {name: limits_of(name, plan)[0] for name in dtypes}
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    witness: Witness


def _compare(
    engine: Engine, steps: int, exact: bool, notes: set[str]
) -> tuple[dict[str, float], Finding | None, float] | None:
    """Run plan and reference in one type; the first rank gets the errors, where they begin, and that of all losses."""
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
    bound, share = limits_of(computed, engine.plan)
    # a gradient seen by a rank is that of its own loss, which counts `ranks` times (they are averaged)
    finding = compare_outputs(outputs, theirs.witness.outputs, bound, share)
    finding = finding or compare_gradients(
        output_gradients, mine.witness.gradients[0], theirs.witness, scale=_scale(engine), bound=bound,
        clipped=engine.job.clip is not None, share=share,
    )  # fmt: skip
    if finding is None and exact and parts["parameters"] > bound:
        final = _settled(mine.parameters, theirs.parameters, theirs.witness.largest)
        worst = max(final, key=lambda k: largest_error({k: final[k]}, {k: theirs.parameters[k]}))
        finding = Finding(worst.rpartition(".")[0], "update", parts["parameters"])
    dist.barrier()
    return parts, finding, later


def computed_in(engine: Engine) -> str:
    """The type that an engine computes in."""
    return "float64" if engine.dtype is torch.float64 else COMPUTES[engine.plan.precision]


def errors_of(mine: Outcome, theirs: Outcome, computed: str, plan: Plan) -> tuple[dict[str, float], float]:
    """The errors that are judged, by part, and the largest of any step's loss."""
    exact, share = computed == "float64", limits_of(computed, plan)[1]
    off = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine.losses, theirs.losses, strict=True)]
    off = [x if x == x else float("inf") for x in off]  # max() would pass over what is no number
    parts = {
        "losses": max(off) if exact else off[0],
        "gradients": largest_error(mine.witness.gradients[0], theirs.witness.gradients[0], share),
    }
    if exact:
        parts["last gradients"] = largest_error(mine.witness.gradients[-1], theirs.witness.gradients[-1])
        final = _settled(mine.parameters, theirs.parameters, theirs.witness.largest)
        parts["parameters"] = largest_error(final, theirs.parameters)
    return parts, max(off)


def limits_of(computed: str, plan: Plan) -> tuple[float, float]:
    """The bound and the share for a type; gradients that travel compressed are not better than half precision."""
    if computed != "float64" and not plan.halo:
        return WITHOUT_HALO, SHARES[computed]
    kinds = [computed] if computed == "float64" or plan.compress == "none" else [computed, "float16"]
    return max(BOUNDS[k] for k in kinds), max(SHARES[k] for k in kinds)


def _settled(
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


def run_one_device(engine: Engine, steps: int) -> Outcome:
    """Train the reference of an engine's plan, in the type that the engine computes in."""
    witness = Witness()
    certain: list[Certain] = []
    contexts = ExitStack()

    def prepare(model: torch.nn.Module) -> None:
        certain.append(contexts.enter_context(without_chance(model)))
        if engine.dtype is torch.float64:
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

    scale = engine.scaler.scale / engine.job.batch_size if engine.scaler else 1.0
    with contexts:
        losses, model = run_reference(
            engine.job, micro=engine.plan.micro, steps=steps, device=engine.device, dtype=engine.dtype,
            precision=engine.plan.precision, scale=scale, prepare=prepare, before_micro=before_micro,
            before_update=before_update,
        )  # fmt: skip
    return Outcome(losses, {k: p.detach() for k, p in model.named_parameters()}, witness)
