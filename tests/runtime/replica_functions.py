"""Functions that test_local_sgd.py and test_gossip.py run on ranks whose replicas step by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import small_jobs
import torch
import torch.distributed as dist
from torch import nn

import drumline as dl
from drumline.core.errors import GaveUp
from drumline.plans import Plan
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.guards.guard import Guards
from drumline.runtime.strategies.local_sgd import LocalSgd
from drumline.runtime.training.checkpoint_policy import CheckpointPolicy
from drumline.runtime.training.train import train
from drumline.runtime.verification.verify import Verification, verify

DOUBLE = torch.float64
TWO_HOSTS = ((0, 2), (1, 3))
Tensors = dict[str, torch.Tensor]


def heavy_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay: the update is linear in the gradient."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)


OPTIMIZERS = {"sgd": heavy_sgd, "adam": small_jobs.adam}


def even_job(optimizer: str = "sgd", **changes: Any) -> dl.Job:
    """Batches of 8 of 16 samples: every replica has equally many."""
    given = {"data": lambda: small_jobs.Samples("vector", 16), "batch_size": 8, "clip": None}
    return small_jobs.make("mlp", optimizer=OPTIMIZERS[optimizer], **{**given, **changes})


@contextmanager
def pretended(hosts: tuple[tuple[int, ...], ...] | None) -> Iterator[None]:
    """Ranks on one machine are those of several hosts."""
    if hosts is None:
        yield
        return
    with mock.patch("drumline.runtime.core.independent_strategy.hosts_along", lambda *_: hosts):
        yield


def verified(
    name: str, plan: str, steps: int = 10, hosts: Any = None, changes: Mapping[str, Any] | None = None
) -> Verification | None:
    """Verify a plan against the simulation."""
    with pretended(hosts):
        return verify(small_jobs.make(name, **(changes or {})), Plan.parse(plan), steps=steps)


def verified_without_averages(plan: str) -> Verification | None:
    """Verify ranks that never average."""
    with mock.patch.object(LocalSgd, "_exchange", lambda *_: None):
        return verified("mlp", plan, 5)


def weights(engine: Engine) -> Tensors:
    return {k: p.detach().clone() for k, p in engine.model.named_parameters()}


def trained(plan: str, optimizer: str, steps: int = 10) -> Tensors:
    """The weights after some steps of even slices, averaged in the end."""
    engine = initialize(even_job(optimizer), plan, dtype=DOUBLE)
    for batch in engine.data(steps):
        engine.step(batch)
    engine.average_replicas()
    return weights(engine)


def runs_ahead(plan: str, folder: str, slow: tuple[int, int], ahead: tuple[int, int], patience: float) -> bool:
    """Rank slow[0] does not begin step slow[1] before rank ahead[0] has finished step ahead[1]; whether it has, in time.

    A plan whose ranks meet in between waits for the slow rank, which gives up after `patience` seconds and goes on.
    """
    engine = initialize(even_job(), plan)
    mark = Path(folder) / plan
    waited = True
    for batch in engine.data(8):
        if (engine.rank, engine.position + 1) == slow:
            end = time.monotonic() + patience
            while not mark.exists() and time.monotonic() < end:
                time.sleep(0.005)
            waited = mark.exists()
        engine.step(batch)
        if (engine.rank, engine.position) == ahead:
            mark.touch()
    return waited


def messages(plan: str, steps: int, hosts: Any = None) -> list[list[str]]:
    """The names of the messages of each step, as they were recorded."""
    with pretended(hosts):
        engine = initialize(even_job(), plan)
    for batch in engine.data(steps):
        engine.step(batch)
    spans = [engine.record.spans(number) for number in engine.record.steps]
    return [[s.name for s in step if s.lane == "communication"] for step in spans]


# -- checkpoints


def state(engine: Engine) -> Tensors:
    """Everything that a resumed run must have, bit for bit."""
    tensors = {f"model/{k}": v for k, v in weights(engine).items()}
    tensors |= {f"buffer/{k}": b.clone() for k, b in engine.model.named_buffers()}
    for name, p in engine.model.named_parameters():
        for key, value in engine.optimizer.state.get(p, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).clone()
    return tensors | {k: v.clone() for k, v in engine.strategy.saved_tensors().items()}


def differences(a: Tensors, b: Tensors) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    return sorted(set(a) ^ set(b)) + [k for k in a if k in b and not torch.equal(a[k], b[k])]


def resumed(plan: str, name: str, folder: str, at: int, steps: int) -> tuple[list[str], bool]:
    """Save a run at step `at`; what differs between its end and that of a run resumed there, and whether losses agree."""
    job = small_jobs.make(name)
    straight = initialize(job, plan)
    losses = [straight.step(b) for b in straight.data(at)]
    straight.save(folder)
    straight.finish_saves()
    losses += [straight.step(b) for b in straight.data(steps - at)]
    again = initialize(job, plan)
    again.load(folder)
    more = [again.step(b) for b in again.data(steps - at)]
    straight.average_replicas()
    again.average_replicas()
    return differences(state(straight), state(again)), losses[at:] == more


def loaded_elsewhere(plan: str, other: str, folder: str, at: int) -> list[str]:
    """Save under one plan, load under another; the weights that differ."""
    engine = initialize(small_jobs.make("cnn"), plan)
    for batch in engine.data(at):
        engine.step(batch)
    engine.save(folder)
    engine.finish_saves()
    there = initialize(small_jobs.make("cnn"), other)
    there.load(folder)
    there.step(next(iter(there.data(1))))
    there.load(folder)
    buffers = {k: b for k, b in there.model.named_buffers() if b.is_floating_point()}
    expected = {**weights(engine), **{k: b for k, b in engine.model.named_buffers() if b.is_floating_point()}}
    return differences(expected, {**there.whole_parameters(), **buffers})


def evaluated(plan: str, steps: int) -> tuple[dict[str, float], dict[str, float], bool, bool]:
    """Evaluations of replicas that differ: by the engine, and of the mean weights; whether replicas are unchanged."""
    engine = initialize(small_jobs.make("cnn"), plan, dtype=DOUBLE)
    for batch in engine.data(steps):
        engine.step(batch)
    before = state(engine)
    result = engine.evaluate()
    same = not differences(before, state(engine))
    differ = not engine.strategy.replicas_equal
    buffers = [b for b in engine.model.buffers() if b.is_floating_point()]
    with torch.no_grad():
        for t in [*engine.model.parameters(), *buffers]:
            dist.all_reduce(t)
            t.div_(engine.ranks)
    engine.strategy.replicas_equal = True
    return result, engine.evaluate(), same, differ


# -- guards


class OneBadBatch(small_jobs.Samples):
    """The samples of one replica in one batch are not finite."""

    def __init__(self, samples: list[int]) -> None:
        super().__init__("vector", 64)
        self.x[samples] = float("nan")


def guarded(plan: str, policy: str, bad_step: int, rank: int, steps: int) -> dict[str, Any]:
    """Train with a bad batch on one rank; what happened where."""
    job = even_job(batch_size=4, data=lambda: small_jobs.Samples("vector", 64))
    engine = initialize(job, plan, guards=Guards(nonfinite=policy))
    numbers = engine.stream.samples(bad_step)
    half = len(numbers) // engine.ranks
    engine.stream.dataset = OneBadBatch(numbers[rank * half : (rank + 1) * half])
    error, notes = "", []
    try:
        for batch in engine.data(steps):
            engine.step(batch)
            notes.append(engine.note)
        engine.average_replicas()
    except GaveUp as e:
        error = f"{type(e).__name__}: {e}"
    finite = all(bool(p.isfinite().all()) for p in engine.model.parameters())
    return {
        "error": error,
        "position": engine.position,
        "steps": engine.steps,
        "skipped": engine.skipped,
        "notes": notes,
        "finite": finite,
        "rate": engine.optimizer.param_groups[0]["lr"],
    }


def training_stopped(plan: str, folder: str, bad_step: int, steps: int) -> tuple[list[int], str, list[str]]:
    """A training that a guard stops: the steps that were reported, the error, and the checkpoints."""
    job = even_job(batch_size=4, data=lambda: small_jobs.Samples("vector", 64))
    engine = initialize(job, plan)
    engine.stream.dataset = OneBadBatch(engine.stream.samples(bad_step)[-2:])
    events: list[dict[str, Any]] = []
    error = ""
    try:
        train(engine, events.append, steps=steps, evaluate=False, saves=CheckpointPolicy(folder, every=100))
    except GaveUp as e:
        error = str(e)
    engine.finish_saves()
    return [e["step"] for e in events if "step" in e], error, sorted(p.name for p in Path(folder).glob("step-*"))


def voted(plan: str, corrupt: bool) -> str:
    """Compare replicas after averages; a frozen weight of rank 1 is corrupted before one of them."""
    engine = initialize(small_jobs.make("partial", batch_size=8), plan, guards=Guards(vote=1))
    try:
        for batch in engine.data(8):
            if corrupt and engine.position == 5 and engine.rank == 1:
                with torch.no_grad():
                    engine.model.frozen.weight[0, 0] += 1.0  # type: ignore[union-attr, index]
            engine.step(batch)
    except GaveUp as e:
        return str(e)
    return ""


# -- training


def events_of_training(plan: str, name: str, steps: int, hosts: Any = None, **changes: Any) -> list[dict[str, Any]]:
    """Collect the reports of the first rank in a training; nothing on the others."""
    events: list[dict[str, Any]] = []
    with pretended(hosts):
        engine = initialize(small_jobs.make(name, **changes), plan)
    train(engine, events.append, steps=steps, evaluate=False)
    assert engine.strategy.replicas_equal
    return events


def report_times(plan: str, steps: int) -> list[tuple[int, int]]:
    """(step, engine's position) when each step is reported on the first rank."""
    seen: list[tuple[int, int]] = []
    engine = initialize(even_job(), plan)
    train(
        engine,
        lambda event: seen.append((event["step"], engine.position)) if "step" in event else None,
        steps=steps,
        evaluate=False,
    )
    return seen


class Unseeded(nn.Module):
    """Every rank draws other weights, and has another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.arange(6) != dist.get_rank())
        with torch.no_grad():
            self.head.weight.add_(dist.get_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.mask)


def first_weights(plan: str) -> tuple[float, list[bool]]:
    """A number of the initial weights, and the mask, of a model that each rank builds differently."""
    model = initialize(even_job(model=Unseeded), plan).model
    return float(model.head.weight.detach().sum()), model.mask.tolist()  # type: ignore[union-attr, operator]


class Constant(nn.Module):
    """A norm, and a table of constants that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(1000))
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) + self.table[:6])


def buffers(plan: str, steps: int) -> tuple[bool, list[str]]:
    """Check that a constant buffer keeps its bits; also returns the names of buffers that change."""
    engine = initialize(even_job(model=Constant, batch_size=8), plan)
    before = engine.model.table.clone()  # type: ignore[operator]  # a buffer
    for batch in engine.data(steps):
        engine.step(batch)
    return torch.equal(before, engine.model.table), sorted(engine.buffer_snapshot.changing())  # type: ignore[arg-type]


def norm_of_one_sample(plan: str) -> None:
    """Batches of one sample for each rank."""
    engine = initialize(even_job(model=Constant, batch_size=3), plan)
    engine.step(next(iter(engine.data(1))))


class Halves(nn.Module):
    """Weights in bfloat16 and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 3).bfloat16()
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low((x * self.turn).real.bfloat16()).float()


def averaged_types(plan: str) -> bool:
    """Check that half-precision and complex weights are the mean of all replicas, rounded once."""
    engine = initialize(even_job(model=Halves), plan)
    with mock.patch.object(type(engine.strategy), "_exchange", lambda *_: None):
        engine.step(next(iter(engine.data(1))))
    expected = {}
    for name, p in weights(engine).items():
        wide = p.to(torch.complex64) if p.is_complex() else p.float()
        parts = [torch.empty_like(torch.view_as_real(wide) if p.is_complex() else wide) for _ in range(engine.ranks)]
        dist.all_gather(parts, torch.view_as_real(wide) if p.is_complex() else wide)
        mean = torch.stack(parts).sum(0) / engine.ranks
        expected[name] = (torch.view_as_complex(mean) if p.is_complex() else mean).to(p.dtype)
    engine.average_replicas()
    return not differences(expected, weights(engine))


class WaitingLoss:
    """Cross-entropy. Rank slow[0] waits in step slow[1] until rank ahead[0] computes step ahead[1], or in vain."""

    def __init__(self, mark: Path, slow: tuple[int, int], ahead: tuple[int, int], patience: float) -> None:
        self._mark, self._slow, self._ahead, self._patience = mark, slow, ahead, patience
        self._calls, self.in_vain = 0, False

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        here = dist.get_rank(), self._calls
        if here == self._ahead:
            self._mark.touch()
        if here == self._slow:
            end = time.monotonic() + self._patience
            while not self._mark.exists() and time.monotonic() < end:
                time.sleep(0.005)
            self.in_vain = not self._mark.exists()
        return nn.functional.cross_entropy(output, target)


def training_runs_ahead(plan: str, folder: str, slow: tuple[int, int], ahead: tuple[int, int], patience: float) -> bool:
    """As `runs_ahead`, in a whole training that saves, logs, and looks for requests to stop."""
    loss = WaitingLoss(Path(folder) / "mark", slow, ahead, patience)
    engine = initialize(even_job(loss=loss), plan)
    saves = CheckpointPolicy(str(Path(folder) / "checkpoints"), every=1)
    train(engine, lambda event: None, steps=12, evaluate=False, saves=saves)
    return not loss.in_vain
