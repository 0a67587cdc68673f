"""Functions that the tests of pipelines with batches in flight run on ranks, and the direct simulation next to them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import small_jobs
import torch
import torch.nn.functional as F
from torch import nn

from drumline.core.errors import GaveUp, PlanError
from drumline.plans import Plan
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.guards.guard import Guards
from drumline.runtime.parallel.model_parallel import ModelParallel
from drumline.runtime.strategies.weight_versions import WeightVersions
from drumline.runtime.training.checkpoint_policy import STOP, CheckpointPolicy
from drumline.runtime.training.train import train
from drumline.runtime.verification.delayed_reference import run_delayed_reference
from drumline.runtime.verification.verify import verify

DOUBLE = torch.float64


class UntiedGPT(small_jobs.GPT):
    """A GPT whose head has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)


def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, weight), with another weight for every batch."""
    weights = 0.5 + target.to(output.dtype)
    return (F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum()


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"clip": None},
    "sgd": {"clip": None, "optimizer": small_jobs.sgd},
    "decay": {"clip": None, "schedule": small_jobs.decay},
    "untied": {"clip": None, "model": UntiedGPT},
    "weighted": {"clip": None, "loss": weighted_loss, "optimizer": small_jobs.sgd},
    "as it is": {},
    "clipped sgd": {"optimizer": small_jobs.sgd},
}
"""Jobs travel by name, with changes by name."""


def job_of(name: str, changes: str) -> Any:
    return small_jobs.make(name, **CHANGES[changes])


def trained(name: str, changes: str, plan: str, steps: int, drains: Collection[int] = ()) -> dict[str, Any]:
    """On every rank: train in float64, emptying the pipeline before some steps."""
    engine = initialize(job_of(name, changes), plan, dtype=DOUBLE)
    returned, done = [], []
    for i, batch in enumerate(engine.data(steps)):
        if i in drains:
            engine.drain()
        returned.append(engine.step(batch))
        assert engine.skipped == 0
    before = engine.steps
    engine.drain()
    done = list(engine.completed_steps())
    stages = engine.strategy.placement.stages_of if isinstance(engine.strategy, ModelParallel) else {}
    return {
        "returned": returned,
        "steps": (before, engine.steps, engine.position),
        "numbers": [x.step for x in done],
        "losses": [x.loss for x in done],
        "norms": [x.grad_norm for x in done],
        "staleness": [x.staleness for x in done],
        "weights": {k: p.clone() for k, p in engine.whole_parameters().items()},
        "buffers": {k: b.clone() for k, b in engine.model.named_buffers()},
        "rate": engine.optimizer.param_groups[0]["lr"],
        "stages": {name: at[0] for name, at in stages.items()},
        "versions": engine.in_flight.stages.versions.most if engine.in_flight else 1,
    }


def simulated(
    name: str, changes: str, plan: str, steps: int, stages: Mapping[str, int], drains: Collection[int] = ()
) -> dict[str, Any]:
    """The same by the direct simulation, which gets the delays as numbers."""
    p = Plan.parse(plan)
    delay = {n: p.pp - 1 - s if p.schedule == "pipedream" else min(1, p.pp - 1) for n, s in stages.items()}
    norms: list[float] = []

    def before_update(step: int, model: nn.Module) -> None:
        norms.append(float(nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None])))

    losses, model = run_delayed_reference(
        job_of(name, changes),
        delay=delay,
        drains=drains,
        micro=p.micro,
        steps=steps,
        device=torch.device("cpu"),
        dtype=DOUBLE,
        precision="fp32",
        prepare=lambda model: None,
        before_micro=lambda step, i: None,
        before_update=before_update,
    )
    return {
        "losses": losses,
        "norms": norms,
        "weights": {k: x.detach() for k, x in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def resumed(folder: str, name: str, changes: str, plan: str, at: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """On every rank: the weights of a run that saves on its way, and of one that continues from there."""
    whole = initialize(job_of(name, changes), plan, dtype=DOUBLE)
    for i, batch in enumerate(whole.data(steps)):
        if i == at:
            whole.save(folder)
            assert (whole.steps, whole.position, whole.steps_in_flight) == (at, at, 0)
        whole.step(batch)
    whole.finish_saves()
    other = initialize(job_of(name, changes), plan, dtype=DOUBLE)
    assert other.load(folder).step == at
    for batch in other.data(steps - at):
        other.step(batch)
    return [{k: p.clone() for k, p in engine.whole_parameters().items()} for engine in (whole, other)]


class BadSamples(small_jobs.Samples):
    """One sample has a non-finite number."""

    def __init__(self) -> None:
        super().__init__("vector", 40)
        self.x[17, 2] = float("nan")


def stopped(plan: str, folder: str) -> tuple[str, list[int], int, bool]:
    """On every rank: train with a bad sample; the error, the steps that were reported, what is saved, and whether a
    second engine on the same ranks works."""
    job = small_jobs.make("mlp", clip=None, data=BadSamples, batch_size=5, seed=1)
    steps: list[int] = []
    policy = CheckpointPolicy(folder, every=2)

    def emit(event: dict[str, Any]) -> None:
        if "step" in event:
            steps.append(event["step"])

    engine = initialize(job, plan)
    try:
        train(engine, emit, steps=12, evaluate=False, saves=policy)
    except GaveUp as e:
        engine.finish_saves()
        for use in (engine.evaluate, lambda: engine.save(folder), lambda: engine.step(engine.stream.batch(0))):
            try:
                use()
            except GaveUp as again:
                assert str(again) == str(e)
            else:
                raise AssertionError("an engine whose stages disagree was used")
        engine.load(folder)
        assert math.isfinite(engine.evaluate(small_jobs.Samples("vector"))["loss"])
        again = trained("mlp", "plain", plan, 4)
        saved = max(int(path.name[5:]) for path in Path(folder).glob("step-*"))
        return f"{type(e).__name__}: {e}", steps, saved, all(x == x for x in again["losses"])
    return "", steps, 0, False


def first_bad_step(batch_size: int, seed: int) -> int:
    """The step whose batch has the bad sample."""
    from drumline.datasets.stream import Stream

    job = small_jobs.make("mlp", data=BadSamples, batch_size=batch_size, seed=seed)
    stream = Stream(job, job.data())
    return next(step for step in range(20) if 17 in stream.samples(step))


def asked_to_stop(plan: str, folder: str) -> tuple[int, int, bool]:
    """On every rank: a run that finds a STOP file: its steps, the saved one, and whether it was preempted."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, STOP).touch()
    engine = initialize(job_of("mlp", "plain"), plan)
    result = train(engine, lambda event: None, steps=40, evaluate=True, saves=CheckpointPolicy(folder))
    saved = max(int(path.name[5:]) for path in Path(folder).glob("step-*"))
    return engine.steps, saved, result["preempted"]


def refused(name: str, changes: str, plan: str, guards: Mapping[str, Any]) -> str:
    """On every rank: the error of a plan that does not run."""
    try:
        initialize(job_of(name, changes), plan, guards=Guards(**guards))
    except PlanError as e:
        return str(e)
    return ""


def verified(name: str, changes: str, plan: str, broken: str = "") -> Any:
    """On every rank: verify; broken: updates change weights that are in use, or backwards show the newest weights."""
    ways = {
        "in place": ("_copy", lambda self, weights: weights),
        "newest": ("_older_weights", lambda self, version: self._strategy.weights()),
    }
    with mock.patch.object(WeightVersions, *ways[broken]) if broken else nullcontext():
        return verify(job_of(name, changes), Plan.parse(plan), steps=6)


def in_between(plan: str) -> dict[str, Any]:
    """On every rank: evaluation in the middle of a run, and batches of the caller's own loader."""
    engine = initialize(job_of("mlp", "plain"), plan, dtype=DOUBLE)
    for batch in engine.data(3):
        engine.step(batch)
    flying = engine.steps_in_flight
    metrics = engine.evaluate()
    drained = engine.steps_in_flight, engine.steps
    dataset = engine.stream.dataset
    for k in range(3):
        rows = [dataset[(5 * k + i) % len(dataset)] for i in range(5)]
        engine.step((torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])))
    last = engine.completed_count
    weights = engine.whole_parameters()
    numbers = [done.step for done in engine.completed_steps()]
    return {"flying": flying, "drained": drained, "metrics": metrics, "kept": last, "numbers": numbers, "w": weights}


def many_steps(plan: str, steps: int) -> tuple[int, int]:
    """On every rank: most sends that were not confirmed after a step, and most forwards in flight."""
    engine: Engine = initialize(job_of("mlp", "plain"), plan)
    assert engine.in_flight is not None
    stream = engine.in_flight.stages._stream
    most = 0
    for batch in engine.data(steps):
        engine.step(batch)
        most = max(most, stream._messages.unconfirmed)
    engine.drain()
    assert stream._messages.unconfirmed == 0
    return most, stream._peak
