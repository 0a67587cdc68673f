"""Functions that test_guard.py runs on ranks: they corrupt one number and report what happened."""

from __future__ import annotations

from typing import Any

import small_jobs
import torch
import torch.distributed as dist
from torch import nn

import drumline as dl
from drumline.core.errors import GaveUp
from drumline.datasets.stream import split_range
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.guards.guard import Guards
from drumline.runtime.guards.replicas import replica_mismatches, why_no_replicas

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


class Trap(nn.Module):
    """The identity; while armed, its gradient is non-finite."""

    armed = 0
    """Number of backwards to corrupt."""
    value = float("nan")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _CorruptGradient.apply(x)


class _CorruptGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        if Trap.armed <= 0:
            return gradient
        Trap.armed -= 1
        return torch.full_like(gradient, Trap.value)


class Trapped(nn.Module):
    """Two blocks with a trap between them, optionally with a BatchNorm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = small_jobs.Residual(6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.trap = Trap()
        self.second = small_jobs.Residual(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.trap(self.norm(self.first(x)))))


class BadSamples(small_jobs.Samples):
    """One sample has a non-finite number."""

    def __init__(self, sample: int, value: float) -> None:
        super().__init__("vector", 30)
        self.x[sample, 3] = value


class Loss:
    """Cross-entropy that is non-finite on one rank for the next `armed` calls."""

    def __init__(self, rank: int, value: float) -> None:
        self.rank, self.value, self.armed = rank, value, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if dist.get_rank() != self.rank or self.armed <= 0:
            return loss
        self.armed -= 1
        return loss * self.value


def job(norm: bool = False, **changes: Any) -> dl.Job:
    """A small job with a trap and a schedule. Every rank has samples in every step.

    SGD: before a BatchNorm the gradient of a bias is zero, and Adam would step by its rounding noise.
    """
    return small_jobs.make(
        "mlp",
        **{
            "model": lambda: Trapped(norm),
            "schedule": small_jobs.decay,
            "batch_size": 10,
            "optimizer": small_jobs.sgd,
            "data": lambda: small_jobs.Samples("vector", 30),
            **changes,
        },
    )


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that a bad step must not change."""
    state = {k: v.clone() for k, v in engine.whole_parameters().items()}
    state.update({k: b.clone() for k, b in engine.model.named_buffers()})
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(7.0), b[k].nan_to_num(7.0)) for k in a)


def caught(plan: str, what: str, value: str, rank: int, norm: bool = False) -> dict[str, Any]:
    """Two good steps, then a bad one: the error, and whether anything changed."""
    Trap.armed, Trap.value = 0, BAD[value]
    loss = Loss(rank, BAD[value])
    engine = initialize(job(norm, loss=loss), plan)
    if what == "input":
        engine.stream.dataset = BadSamples(_sample_of(engine, 2, rank), BAD[value])
    batches = engine.data(3)
    for _ in range(2):
        engine.step(next(batches))
    times = 1 if what.endswith("once") else 1000
    if what.startswith("loss"):
        loss.armed = times
    if what.startswith("gradient") and engine.rank == rank:
        Trap.armed = times
    if what == "weight" and engine.rank == rank:
        _corrupt_weight(engine, BAD[value])
    before = snapshot(engine)
    try:
        engine.step(next(batches))
    except GaveUp as e:
        return {
            "what": e.what,
            "where": e.where,
            "fix": e.fix,
            "same": same(before, snapshot(engine)),
            "steps": engine.steps,
            "samples": engine.stream.samples(2),
            "clean": engine.update.gradients() == [],
        }
    return {"what": "nothing was caught"}


def half(plan: str, what: str) -> dict[str, Any]:
    """fp16: a gradient of one rank overflows once, or a loss is non-finite."""
    Trap.armed, Trap.value = 0, float("inf")
    loss = Loss(1, float("nan"))
    engine = initialize(job(True, loss=loss), plan)
    try:
        for batch in engine.data(3):
            Trap.armed = int(what == "gradient" and batch.step == 1 and engine.rank == 1)
            loss.armed = 1000 * int(what == "loss" and batch.step == 1)
            engine.step(batch)
    except GaveUp as e:
        return {"where": e.where, "steps": engine.steps}
    assert engine.scaler is not None
    finite = all(bool(t.isfinite().all()) for t in snapshot(engine).values())
    return {"steps": engine.steps, "skipped": engine.skipped, "overflows": engine.scaler.overflows, "finite": finite}


def _sample_of(engine: Engine, step: int, rank: int) -> int:
    """The first sample of a rank's slice."""
    samples = engine.stream.samples(step)
    part = split_range(len(samples), engine.plan.micro)[0]
    return samples[split_range(len(part), engine.ranks)[rank][0]]


def _corrupt_weight(engine: Engine, value: float) -> None:
    name = "second.up.weight"
    p = dict(engine.model.named_parameters())[name]
    local = p.to_local() if hasattr(p, "to_local") else p
    with torch.no_grad():
        local.view(-1)[0] = value


def skipping(plan: str, bad: tuple[int, ...], steps: int, patience: int = 5, norm: bool = True) -> dict[str, Any]:
    """A run in which some steps are bad on the last rank."""
    Trap.armed, Trap.value = 0, float("nan")
    engine = initialize(job(norm), plan, dtype=torch.float64, guards=Guards(nonfinite="skip", patience=patience))
    losses, notes, seen = [], [], []
    try:
        for batch in engine.data(steps):
            Trap.armed = 1000 if batch.step in bad and engine.rank == engine.ranks - 1 else 0
            losses.append(engine.step(batch))
            notes.append(engine.note)
            seen.append(batch.step)
    except GaveUp as e:
        return {"error": str(e), "steps": engine.steps, "skipped": engine.skipped}
    return {
        "losses": losses,
        "notes": notes,
        "seen": seen,
        "steps": engine.steps,
        "skipped": engine.skipped,
        "position": engine.position,
        "rate": engine.optimizer.param_groups[0]["lr"],
        "whole": snapshot(engine),
        "ranks": [c.ranks for c in engine.guard.skipped],
        "names": [c.names for c in engine.guard.skipped],
    }


def without(bad: tuple[int, ...], steps: int) -> dict[str, torch.Tensor]:
    """One rank that never runs the batches that the others skip."""
    Trap.armed = 0
    engine = initialize(job(True), "dp=1", dtype=torch.float64)
    for i in range(steps):
        if i not in bad:
            engine.step(engine.stream.batch(i))
    return snapshot(engine)


def flipped(plan: str, rank: int, name: str, at: int, vote: int, steps: int = 8) -> dict[str, Any]:
    """Flip one bit of one number on one rank before a step."""
    engine = initialize(small_jobs.make("cnn"), plan, guards=Guards(vote=vote))
    try:
        for batch in engine.data(steps):
            if batch.step == at and engine.rank == rank:
                tensor = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}[name]
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)
            engine.step(batch)
    except GaveUp as e:
        return {"text": str(e), "where": e.where, "steps": engine.steps}
    return {"text": "", "steps": engine.steps}


def clean(plan: str, name: str) -> tuple[int, str]:
    """A run without faults, with a comparison in every step."""
    engine = initialize(small_jobs.make(name), plan, guards=Guards(vote=1))
    for batch in engine.data(4):
        engine.step(batch)
    assert replica_mismatches(engine) == []
    return engine.steps, why_no_replicas(engine)


def mask_in_the_model(plan: str) -> str:
    """A model with -inf in a buffer and an output, like a mask, and a bad loss on rank 1."""
    loss = Loss(1, float("nan"))
    engine = initialize(small_jobs.make("mlp", model=Masked, loss=loss), plan)
    loss.armed = 1000
    try:
        engine.step(next(engine.data(1)))
    except GaveUp as e:
        return e.where
    return ""


class Masked(nn.Module):
    """Softmax over masked scores."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scores, self.head = nn.Linear(6, 6), AddMask(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scores(self.up(x)).softmax(-1))


class AddMask(nn.Module):
    """Some scores become -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -float("inf"), 0.0, 0.0, -float("inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mask
