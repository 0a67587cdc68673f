"""Verifies plans with a coordinator.

Exact plans (`server`, `stale:0`, one worker) must equal one device. The others apply older gradients, in an order that
no two runs share: the servers record which gradient was computed on which weights, and one process replays just that,
in a plain loop that shares no code with servers and workers. Hogwild's races cannot be replayed: its workers take
turns here, and must equal one device then.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...core.job import Job, call_user_code
from ...datasets.sources import load_data
from ...datasets.stream import Stream
from ...plans import Plan, check
from ...schedules import Contribution, GradientTask, WeightUpdate
from ...tracing.fake import call_model
from ..engine import Engine
from ..numerics.precision import compute_precision, float32_arithmetic, to_device
from ..state.optimizer import waits_for_metric
from ..state.weights import seeded_model
from ..verification.comparison import largest_error
from ..verification.modes import Float64Mode, NoRandomness, without_randomness
from ..verification.tolerances import BOUNDS, COMPUTE_DTYPES, SHARES
from ..verification.verify import Verification
from .first_server import RecordedUpdate
from .run import ServerWatch, is_worker, make_worker, serve
from .task_streams import TaskStreams

_FAR = 0.5
"""Difference of the last loss from one device's, as a share of it, above which a note calls it far."""


@dataclass(slots=True)
class _ServedRun:
    """The updates that the servers recorded."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Gradients of the first and the last update."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: list[RecordedUpdate] = field(default_factory=list)


def verify_coordinated(job: Job, plan: Plan, *, steps: int = 10, first_round: int = 0) -> Verification | None:
    """Verify a plan with a coordinator; runs on every process, and the first server gets the result.

    Processes that verify several plans count their rounds: a verification takes two.
    """
    check(plan)
    errors: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    notes: set[str] = set()
    bounds: dict[str, float] = {}
    diverged, first = "", False
    for round, exact in enumerate((True, False), start=first_round):
        checked = replace(plan, precision="fp32") if exact else plan
        dtype = torch.float64 if exact else None
        if is_worker(plan):
            _compute(job, checked, dtype, round)
            continue
        run, first = _serve(job, checked, dtype, steps, round)
        if first:
            name = "float64" if exact else COMPUTE_DTYPES[plan.precision]
            theirs, notes_of = _reference(job, checked, run, dtype)
            notes |= notes_of
            parts[name] = _errors(run, theirs, name)
            worst = max(parts[name], key=lambda part: _number(parts[name][part]))
            errors[name], bounds[name] = parts[name][worst], BOUNDS[name]
            if not errors[name] <= bounds[name] and not diverged:
                diverged = _where(run, theirs, name)
            if exact:
                notes |= _distance(job, checked, run, dtype, steps)
    if not first:
        return None
    passed = all(errors[name] <= bounds[name] for name in errors)
    return Verification(
        passed=passed,
        plan=str(plan),
        ranks=plan.ranks,
        steps=steps,
        errors=errors,
        bounds=bounds,
        first_divergence=None if passed else diverged or "(not located)",
        phase="" if passed else "update",
        parts=parts,
        reference=_reference_text(plan),
        notes=tuple(sorted(notes)),
    )


def _reference_text(plan: Plan) -> str:
    micro = f"{plan.micro} micro-batch{'es' if plan.micro > 1 else ''}"
    if plan.exact or plan.sync_mode == "hogwild":
        return f"one device, the same {micro} of each batch"
    return "a replay of the recorded updates in one process: each gradient on the weights it was computed on"


def _number(error: float) -> float:
    return error if error == error else math.inf


def _compute(job: Job, plan: Plan, dtype: torch.dtype | None, round: int) -> None:
    """A worker's part."""
    engine = make_worker(job, plan, dtype=dtype, round=round)
    streams = TaskStreams(engine, ahead=False)
    with without_randomness(engine.template) as randomness, Float64Mode(randomness) if dtype else nullcontext():
        while engine.next_task()["task"] is not None:
            batch = streams.batch(engine.task)
            randomness.in_step = True
            engine.step(batch)
            randomness.in_step = False
    streams.close()
    engine.leave()


def _serve(job: Job, plan: Plan, dtype: torch.dtype | None, steps: int, round: int) -> tuple[_ServedRun, bool]:
    """A server's part; and whether it is the first server."""
    run = _ServedRun()
    engines: list[Engine] = []

    def begin(engine: Engine) -> None:
        engines.append(engine)
        engine.gradients_ready = ready  # type: ignore[method-assign]  # this is what it is for

    def ready() -> None:
        if engines[0].steps in (0, steps - 1):
            run.gradients.append({k: g.clone() for k, g in engines[0].whole_gradients().items()})

    def emit(event: dict[str, Any]) -> None:
        if "loss" in event:
            run.losses.append(event["loss"])

    watch = ServerWatch(round, begin, plan.sync_mode == "hogwild", run.updates)
    serve(job, plan, emit, steps=steps, dtype=dtype, watch=watch)
    run.parameters = {k: p.detach().clone() for k, p in engines[0].whole_parameters().items()}
    return run, engines[0].rank == 0


def _reference(job: Job, plan: Plan, run: _ServedRun, dtype: torch.dtype | None) -> tuple[_ServedRun, set[str]]:
    """The reference that the run must equal."""
    most = max((c.staleness for r in run.updates for c in r.update.contributions), default=0)
    name = "float64" if dtype else COMPUTE_DTYPES[plan.precision]
    notes = {f"{name}: gradients were up to {most} update{'s' * (most > 1)} old"} if most else set()
    updates = in_order(run.updates, plan) if plan.exact or plan.sync_mode == "hogwild" else run.updates
    return replay(job, updates, plan, dtype), notes


def in_order(updates: list[RecordedUpdate], plan: Plan) -> list[RecordedUpdate]:
    """The updates of one device: whole batches, each on the weights of the one before."""
    return [
        RecordedUpdate(WeightUpdate(i, i, (Contribution(0, GradientTask(i), 0),)), ((i,) * plan.server_processes,))
        for i in range(len(updates))
    ]


def replay(job: Job, updates: list[RecordedUpdate], plan: Plan, dtype: torch.dtype | None) -> _ServedRun:
    """Run updates one after the other in this process, each gradient on the weights that it was computed on."""
    model = seeded_model(job, dtype).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = job.optimizer_on((n, p) for n, p in model.named_parameters() if p.requires_grad)
    schedule = job.schedule(optimizer) if job.schedule else None
    dataset = load_data(job)
    shares = _Shares(trained, plan.server_processes)
    versions = {0: shares.copy()}
    last_use = {v: r.update.number for r in updates for read in r.versions for v in read}
    result = _ServedRun()
    with ExitStack() as contexts:
        randomness = contexts.enter_context(without_randomness(model))
        contexts.enter_context(Float64Mode(randomness) if dtype else nullcontext())
        randomness.in_step = True
        for record in updates:
            update, loss, weight = record.update, 0.0, 0.0
            sums: list[torch.Tensor | None] = [None] * len(trained)
            for c, read in zip(update.contributions, record.versions, strict=True):
                shares.set([versions[v][server] for server, v in enumerate(read)])
                stream = Stream(job, dataset, dp=c.task.slices, index=c.task.slice, micro=plan.micro)
                part = _gradient(job, model, stream, c.task.step, plan.precision, dtype, randomness)
                loss, weight = loss + part[0], weight + part[1]
                for i, p in enumerate(trained):
                    if p.grad is not None:
                        old = sums[i]
                        sums[i] = c.weight * p.grad if old is None else old + c.weight * p.grad
                    p.grad = None
            shares.set(versions[update.number])
            for p, total in zip(trained, sums, strict=True):
                p.grad = None if total is None else total / weight
            _clip(job, trained)
            if record in (updates[0], updates[-1]):
                names = dict(model.named_parameters()).items()
                result.gradients.append({k: p.grad.clone() for k, p in names if p.grad is not None})
            optimizer.step()
            if schedule is not None and not waits_for_metric(schedule):
                schedule.step()
            optimizer.zero_grad()
            versions[update.number + 1] = shares.copy()
            for past in [v for v in versions if v <= update.number and last_use.get(v, -1) <= update.number]:
                del versions[past]
            result.losses.append(loss / weight)
    result.parameters = {k: p.detach() for k, p in model.named_parameters()}
    return result


class _Shares:
    """The weights as servers hold them: equal ranges of all elements of a dtype."""

    def __init__(self, trained: list[nn.Parameter], servers: int) -> None:
        self._trained, self._servers = trained, servers
        self._kinds = list(dict.fromkeys(p.dtype for p in trained))

    @torch.no_grad()
    def copy(self) -> list[list[torch.Tensor]]:
        """The shares of all servers, as they are now."""
        whole = [torch.cat([p.flatten() for p in self._trained if p.dtype == kind]) for kind in self._kinds]
        return [list(share) for share in zip(*(self._cut(v) for v in whole), strict=True)]

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        size = -(-vector.numel() // self._servers)
        return [vector[i * size : (i + 1) * size].clone() for i in range(self._servers)]

    @torch.no_grad()
    def set(self, shares: list[list[torch.Tensor]]) -> None:
        """Set the weights to the shares of servers, which may be of different versions."""
        for k, kind in enumerate(self._kinds):
            whole, at = torch.cat([share[k] for share in shares]), 0
            for p in self._trained:
                if p.dtype == kind:
                    p.copy_(whole[at : at + p.numel()].view(p.shape))
                    at += p.numel()


def _gradient(
    job: Job,
    model: nn.Module,
    stream: Stream,
    step: int,
    precision: str,
    dtype: torch.dtype | None,
    randomness: NoRandomness,
) -> tuple[float, float]:
    """Add the gradient of a batch's summed loss to the parameters; the sums of its loss and weight."""
    device = torch.device("cpu")
    loss_sum = weight_sum = 0.0
    with randomness.outside_step():
        batch = stream.batch(step)
    for part in batch.micros:
        value, target = to_device(part.input, device, dtype), to_device(part.target, device, dtype)
        with float32_arithmetic(precision, device), compute_precision(precision, device):
            loss = call_user_code(lambda v=value, t=target: job.loss(call_model(model, v), t), "the replay")
        if isinstance(loss, tuple | list):
            total, weight = (loss[0], float(loss[1])) if part.samples else (loss[0] * 0.0, 0.0)
        else:
            weight = float(job.sample_weight(value, target)) if job.sample_weight else float(part.samples)
            weight = weight if part.samples else 0.0
            total = torch.where(torch.tensor(weight > 0, device=loss.device), loss * weight, 0.0)
        total.backward()
        loss_sum, weight_sum = loss_sum + float(total.detach()), weight_sum + weight
    return loss_sum, weight_sum


def _clip(job: Job, trained: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in trained if p.grad is not None]
    if job.clip is not None:
        norm = torch.sqrt(torch.stack([g.abs().double().square().sum() for g in gradients]).sum())
        for g in gradients:
            g.mul_(min(1.0, job.clip / (float(norm) + 1e-6)))


def _errors(mine: _ServedRun, theirs: _ServedRun, name: str) -> dict[str, float]:
    """The errors that are checked: everything in float64, the first step otherwise."""
    off = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(mine.losses, theirs.losses, strict=True)]
    off = [_number(x) for x in off]
    exact = name == "float64"
    parts = {"losses": max(off) if exact else off[0]}
    if mine.gradients:
        parts["gradients"] = largest_error(mine.gradients[0], theirs.gradients[0], SHARES[name])
        if exact:
            parts["last gradients"] = largest_error(mine.gradients[-1], theirs.gradients[-1])
    if exact:
        parts["parameters"] = largest_error(mine.parameters, theirs.parameters)
    return parts


def _where(mine: _ServedRun, theirs: _ServedRun, name: str) -> str:
    """The module of the parameter that differs most."""
    pair = (mine.gradients[0], theirs.gradients[0]) if mine.gradients else (mine.parameters, theirs.parameters)
    worst = max(pair[1], key=lambda k: largest_error({k: pair[0][k]}, {k: pair[1][k]}, SHARES[name]))
    return worst.rpartition(".")[0]


def _distance(job: Job, plan: Plan, run: _ServedRun, dtype: torch.dtype | None, steps: int) -> set[str]:
    """For an approximate plan: how far its last loss is from one device's."""
    if plan.exact:
        return set()
    if plan.sync_mode == "hogwild":
        return {"hogwild's workers took turns here; in a training they overwrite each other"}
    alone, mine = replay(job, in_order(run.updates, plan), plan, dtype).losses[-1], run.losses[-1]
    far = "far from" if abs(mine - alone) > _FAR * abs(alone) else "next to"
    return {f"approximate: after {steps} updates the loss is {mine:.4g}, {far} {alone:.4g} of one device"}
