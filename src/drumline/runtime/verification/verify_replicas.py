"""Verifies plans whose replicas step by themselves: against all replicas in one process, mixed as the algorithm says.

Such a plan does not compute what one device would, so one device is no reference for it. In float64, losses of all
steps and the final parameters and buffers must agree with the simulation to 1e-10; in the plan's own precision, the
first loss and the first gradients of the first replica to the bounds of tolerances.py. How far the losses are from one
device's is noted; only plans that are exact must equal it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from ...core.job import Job
from ...plans import Plan
from ..core.independent_strategy import rank_hosts
from ..engine import Engine
from ..guards.replicas import replica_mismatches
from .comparison import error, largest_error
from .modes import Float64Mode, NoRandomness, without_randomness
from .one_device import run_one_device
from .replica_reference import ReplicaReference
from .tolerances import BOUNDS, SHARES, discount_small_gradients, worst_of
from .verify import Verification, build_engine, compute_dtype

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaRun:
    """Results of replicas: of the engine's ranks, or of the simulation."""

    losses: list[float]
    """Mean over all samples of each step's batch."""
    final: Tensors
    """Parameters and floating-point buffers after the last average."""
    gradients: Tensors
    """The first gradients of the first replica."""


def verify_replicas(job: Job, plan: Plan, *, steps: int) -> Verification | None:
    """Verify a plan; runs on every rank, and the first rank gets the result."""
    parts: dict[str, dict[str, float]] = {}
    notes: set[str] = set()
    worst_tensor, distance, rank = "", 0.0, 0
    for exact in (True, False):
        engine = build_engine(job, replace(plan, precision="fp32") if exact else plan, exact=exact)
        rank = engine.rank
        notes |= set(engine.strategy.remarks)
        mine = _run_ranks(engine, steps, notes)
        differing = replica_mismatches(engine) if engine.ranks > 1 else []
        if rank == 0:
            theirs, largest = _simulate(engine, steps)
            errors = _errors(mine, theirs, largest, compute_dtype(engine), exact=exact)
            if exact:
                errors["replicas"] = float("inf") if differing else 0.0
                distance = _loss_error(mine.losses, run_one_device(engine, steps, exact=True).losses)
                errors |= {"one device": distance} if plan.exact else {}
                worst_tensor = _worst_tensor(mine, theirs)
            parts[compute_dtype(engine)] = errors
        dist.barrier()
    if rank > 0:
        return None
    notes.add(_distance_note(plan, distance, steps))
    return _result(plan, steps, parts, notes, worst_tensor)


def _result(
    plan: Plan, steps: int, parts: dict[str, dict[str, float]], notes: set[str], worst_tensor: str
) -> Verification:
    worst = {name: worst_of(row, dict.fromkeys(row, BOUNDS[name])) for name, row in parts.items()}
    errors = {name: parts[name][worst[name]] for name in parts}
    bounds = {name: BOUNDS[name] for name in parts}
    failed = next((name for name in errors if not errors[name] <= bounds[name]), None)
    return Verification(
        passed=failed is None,
        plan=str(plan),
        ranks=plan.ranks,
        steps=steps,
        errors=errors,
        bounds=bounds,
        first_divergence=None if failed is None else worst_tensor,
        phase="" if failed is None else worst[failed],
        parts=parts,
        reference=f"{plan.dp} replicas in one process, averaged as sync={plan.sync} is defined",
        notes=tuple(sorted(notes)),
    )


def _distance_note(plan: Plan, distance: float, steps: int) -> str:
    if plan.exact:
        return f"one replica is one device: their losses differ by {distance:.1e}"
    checked = "it is approximate, and this is not checked"
    return (
        f"the loss of sync={plan.sync} differs from one device's by at most {distance:.1e} in {steps} steps; {checked}"
    )


# -- the plan's run


def _run_ranks(engine: Engine, steps: int, notes: set[str]) -> ReplicaRun:
    """Train under the plan, on every rank, and average in the end."""
    gradients: Tensors = {}
    engine.gradients_ready = lambda: gradients.update(  # type: ignore[method-assign]  # this is what it is for
        {} if gradients else {k: g.cpu().clone() for k, g in engine.whole_gradients().items()}
    )
    sums = []
    with without_randomness(engine.template) as randomness, _precision(engine, randomness):
        for batch in engine.data(steps):
            with _drawing(randomness):
                loss = engine.step(batch)
            sums.append([loss * engine.loss_weight, engine.loss_weight])
    engine.average_replicas()
    notes |= randomness.notes
    table = torch.tensor(sums, dtype=torch.float64, device=engine.device)
    if engine.ranks > 1:
        dist.all_reduce(table, group=engine.group)
    trained = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    buffers = {name: b for name, b in engine.model.named_buffers() if b.is_floating_point()}
    final = {name: t.detach().cpu().clone() for name, t in {**trained, **buffers}.items()}
    return ReplicaRun([total / weight for total, weight in table.tolist()], final, gradients)


def _precision(engine: Engine, randomness: NoRandomness) -> Float64Mode | nullcontext[None]:
    return Float64Mode(randomness) if engine.dtype is torch.float64 else nullcontext()


@contextmanager
def _drawing(randomness: NoRandomness) -> Iterator[None]:
    """Around a step: random draws are replaced; those of the data are not."""
    randomness.in_step = True
    try:
        yield
    finally:
        randomness.in_step = False


# -- the simulation


def _simulate(engine: Engine, steps: int) -> tuple[ReplicaRun, Tensors]:
    """The same training in one process, and the largest gradient of each element."""
    hosts = rank_hosts(engine.ranks) if engine.plan.across else (tuple(range(engine.ranks)),)
    reference = ReplicaReference(
        engine.job, engine.plan, hosts, device=engine.device, dtype=engine.dtype, precision=engine.plan.precision
    )
    with ExitStack() as contexts:
        models = nn.ModuleList(replica.model for replica in reference.replicas)
        randomness = contexts.enter_context(without_randomness(models))
        contexts.enter_context(_precision(engine, randomness))
        losses = reference.run(steps, lambda: _drawing(randomness))
    run = ReplicaRun(losses, reference.parameters, reference.replicas[0].first_gradients)
    return run, reference.largest


# -- errors


def _errors(mine: ReplicaRun, theirs: ReplicaRun, largest: Tensors, computed: str, *, exact: bool) -> dict[str, float]:
    """The errors that are checked, by part."""
    if not exact:
        first = _loss_error(mine.losses[:1], theirs.losses[:1])
        return {"losses": first, "gradients": largest_error(mine.gradients, theirs.gradients, SHARES[computed])}
    final = discount_small_gradients(mine.final, theirs.final, largest)
    return {
        "losses": _loss_error(mine.losses, theirs.losses),
        "gradients": largest_error(mine.gradients, theirs.gradients),
        "parameters": largest_error(final, theirs.final),
    }


def _loss_error(mine: list[float], theirs: list[float]) -> float:
    """The largest relative difference of any step's loss; NaN is infinite."""
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine, theirs, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def _worst_tensor(mine: ReplicaRun, theirs: ReplicaRun) -> str:
    """The parameter or buffer that differs most."""
    return max(theirs.final, key=lambda name: error(mine.final[name], theirs.final[name]))
