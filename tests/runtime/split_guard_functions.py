"""Functions that test_guard_split.py runs on ranks: they corrupt a number of a split model and report what happened."""

from __future__ import annotations

from typing import Any

import guard_functions
import small_jobs
import torch
from torch import nn

from drumline.core.errors import GaveUp
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.guards.guard import Guards
from drumline.runtime.guards.replicas import replica_mismatches, why_no_replicas


class Wide(nn.Module):
    """A few layers that tensor parallelism can split and a pipeline can cut, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = small_jobs.Residual(6), nn.BatchNorm1d(6)
        self.second, self.head = small_jobs.Residual(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(x))))


class ImageModel(nn.Module):
    """Convolutions with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(self.norm(self.stem(x)).relu()).mean((2, 3)))


def job_of(name: str) -> Any:
    """One of the small jobs, or an image model."""
    return small_jobs.make("cnn", model=ImageModel) if name == "pictures" else small_jobs.make(name)


def engine_of(plan: str, **changes: Any) -> Engine:
    """A small job on vectors."""
    values = {
        "model": Wide,
        "batch_size": 8,
        "optimizer": small_jobs.sgd,
        "data": lambda: small_jobs.Samples("vector", 24),
    }
    return initialize(small_jobs.make("mlp", **{**values, **changes}), plan, guards=Guards(nonfinite="skip"))


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that a bad step must not change."""
    return guard_functions.snapshot(engine)


def corrupted(plan: str, what: str, name: str, rank: int) -> dict[str, Any]:
    """Two good steps, then one that one rank makes bad: which rank is named, and whether the step has left traces."""
    engine = engine_of(plan)
    if what == "input":
        dataset = small_jobs.Samples("vector", 24)
        dataset.x[engine.stream.samples(2)[0], 3] = float("nan")
        engine.stream.dataset = dataset
    batches = engine.data(4)
    for _ in range(2):
        engine.step(next(batches))
    parameters = dict(engine.model.named_parameters())
    hook = None
    before = snapshot(engine)
    if engine.rank == rank and what == "gradient":
        hook = parameters[name].register_hook(lambda g: torch.full_like(g, float("nan")))
    if engine.rank == rank and what in ("weight", "large"):
        with torch.no_grad():
            kept = parameters[name].clone()
            parameters[name].view(-1)[0] = float("nan") if what == "weight" else 3e38
    engine.step(next(batches))
    if hook is not None:
        hook.remove()
    if engine.rank == rank and what in ("weight", "large"):
        with torch.no_grad():
            parameters[name].copy_(kept)
    [report] = engine.guard.skipped or [None]
    assert report is not None, "nothing was caught"
    same = guard_functions.same(before, snapshot(engine))
    clean = engine.update.gradients() == []
    loss = engine.step(next(batches)) if what != "input" else 0.0
    return {
        "what": report.what,
        "where": report.where,
        "ranks": report.ranks,
        "names": report.names,
        "samples": report.samples,
        "same": same,
        "clean": clean,
        "steps": engine.steps,
        "loss": loss,
        "bad": engine.stream.samples(2)[0],
    }


def flipped(plan: str, rank: int, name: str, job: str = "gpt") -> tuple[str, int]:
    """Flip one bit of one number on one rank before the second step, with a comparison in every step."""
    engine = initialize(job_of(job), plan, guards=Guards(vote=1))
    try:
        for batch in engine.data(3):
            if batch.step == 1 and engine.rank == rank:
                tensor = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}[name]
                tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)
            engine.step(batch)
    except GaveUp as e:
        return e.where, engine.steps
    return "", engine.steps


def clean(plan: str, job: str) -> tuple[int, str]:
    """A run without faults, with a comparison in every step."""
    engine = initialize(job_of(job), plan, guards=Guards(vote=1))
    for batch in engine.data(3):
        engine.step(batch)
    assert replica_mismatches(engine) == []
    return engine.steps, why_no_replicas(engine)


def names(plan: str, job: str = "gpt") -> dict[str, tuple[int, ...]]:
    """The shapes of this rank's parameters."""
    return {n: tuple(p.shape) for n, p in initialize(job_of(job), plan).model.named_parameters()}
