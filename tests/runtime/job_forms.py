"""Jobs in the various forms users write them, and the functions ranks run on them, imported by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import drumline as dl
from drumline.core.errors import JobError
from drumline.plans import Plan
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.training.train import train

SAMPLES, BATCH, STEPS = 17, 6, 5


class Stream(IterableDataset[Any]):
    """A stream of samples, shuffled in each pass by torch's own generator."""

    def __init__(self, n: int = SAMPLES, shift: int = 0) -> None:
        self.samples, self.shift = small_jobs.Samples("vector", n), shift
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """As samplers have it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples)).tolist()
        for i in order:
            yield self.samples[(i + self.shift + self.epoch) % len(self.samples)]


class ByParity(Sampler[list[int]]):
    """A batch sampler of the user's own: first the even samples, then the odd ones, in batches of unequal size."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Even epochs begin with even samples."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        halves = [list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2))]
        for half in halves if self.epoch % 2 == 0 else halves[::-1]:
            yield half[:5]
            yield half[5:]


class HalfStep(Sampler[int]):
    """A sampler whose generator is its own: it gives another order each time."""

    def __init__(self) -> None:
        import random

        self.random = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


def pad(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A collate function."""
    return torch.stack([x for x, _ in samples]) * 2.0, torch.tensor([y for _, y in samples])


def data_of(kind: str) -> Any:
    """Make the data in one of its forms."""
    samples: Dataset[Any] = small_jobs.Samples("vector", SAMPLES)
    seeded = torch.Generator().manual_seed(7)
    forms: dict[str, Callable[[], Any]] = {
        "loader": lambda: DataLoader(samples, batch_size=BATCH, shuffle=True),
        "seeded": lambda: DataLoader(samples, batch_size=BATCH, shuffle=True, generator=seeded, drop_last=True),
        "in order": lambda: DataLoader(samples, batch_size=BATCH, collate_fn=pad),
        "batch sampler": lambda: DataLoader(samples, batch_sampler=ByParity()),
        "workers": lambda: DataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=2),
        "stream": Stream,
        "stream loader": lambda: DataLoader(Stream(), batch_size=BATCH, drop_last=True),
        "stream workers": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2),
        "of this rank": lambda: Stream(shift=torch.distributed.get_rank()),
        "sharded": lambda: torch.utils.data.Subset(samples, range(torch.distributed.get_rank(), SAMPLES, 2)),
        "distributed sampler": lambda: DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples, 2, 0)),
        "other batch": lambda: DataLoader(samples, batch_size=4),
        "no batches": lambda: DataLoader(samples, batch_size=None),
        "another order": lambda: DataLoader(samples, batch_size=BATCH, sampler=HalfStep()),
    }
    return forms[kind]()


def with_data(kind: str, **changes: Any) -> dl.Job:
    """Build the MLP on data of some form."""
    return small_jobs.make("mlp", data=lambda: data_of(kind), batch_size=BATCH, **changes)


class Returns(nn.Module):
    """A model as Hugging Face writes them: named inputs, labels among them, and the loss in the output."""

    def __init__(self, form: str = "mapping") -> None:
        super().__init__()
        self.net, self.form = small_jobs.MLP(), form

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(features)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits, labels)
        return {"mapping": {"loss": loss, "logits": logits}, "tuple": (loss, logits), "loss": loss}[self.form]


class Named(Dataset[Any]):
    """Samples as mappings."""

    def __init__(self, labels: str = "labels") -> None:
        self.samples, self.labels = small_jobs.Samples("vector", SAMPLES), labels

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = self.samples[i]
        return {"features": x, self.labels: y}


def returning(form: str = "mapping", **changes: Any) -> dl.Job:
    """A job without a loss."""
    values: dict[str, Any] = {"model": lambda: Returns(form), "optimizer": small_jobs.adam, "data": Named}
    return dl.Job(**{**values, "batch_size": BATCH, "seed": 3, **changes})


def decay_some(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weight decay on weights alone, and a smaller rate for the head."""
    groups = [
        {"params": [p for n, p in named_parameters if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named_parameters if n.startswith("head") and not n.endswith("bias")], "lr": 1e-3},
        {"params": [p for n, p in named_parameters if not n.startswith("head") and not n.endswith("bias")]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Halve the learning rate as soon as the loss stops falling fast."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """A metric."""
    return {"accuracy": (output.argmax(1) == target).double().mean()}


def engine_of(job: dl.Job, plan: str) -> Engine:
    """An engine in float64."""
    return initialize(job, Plan.parse(plan), dtype=torch.float64)


def losses(job: Any, plan: str, steps: int = STEPS) -> list[float]:
    """The losses of a job under a plan."""
    engine = engine_of(job(), plan)
    return [engine.step(batch) for batch in engine.data(steps)]


def losses_of_data(kind: str, plan: str, steps: int = STEPS) -> list[float]:
    """The losses on data of some form."""
    return losses(lambda: with_data(kind), plan, steps)


def resumed_losses(kind: str, plan: str, folder: str) -> list[float]:
    """Save after two steps; a new engine resumes."""
    engine = engine_of(with_data(kind), plan)
    first = [engine.step(batch) for batch in engine.data(2)]
    engine.save(folder)
    engine.finish_saves()
    again = engine_of(with_data(kind), plan)
    again.load(folder)
    return first + [again.step(batch) for batch in again.data(STEPS - 2)]


def losses_without_loss(form: str, plan: str) -> list[float]:
    """The losses that the model returns."""
    return losses(lambda: returning(form), plan)


def trained(
    job: dl.Job, plan: str, steps: int = STEPS, *, saves: Any = None
) -> tuple[Engine, list[str], dict[str, Any]]:
    """Run `train` on this rank; returns the engine, the messages of rank 0 and the result."""
    engine, messages = engine_of(job, plan), []

    def emit(event: dict[str, Any]) -> None:
        if "message" in event:
            messages.append(event["message"])

    return engine, messages, train(engine, emit, steps=steps, evaluate=True, saves=saves)


def weights(engine: Engine, *, ema: bool = False) -> dict[str, torch.Tensor]:
    """The whole weights on the CPU."""
    return {k: v.cpu().clone() for k, v in engine.whole_parameters(ema=ema).items()}


def named_weights(plan: str) -> dict[str, torch.Tensor]:
    """The weights after some steps of an optimizer by name."""
    engine = engine_of(small_jobs.make("mlp", optimizer=decay_some), plan)
    for batch in engine.data(3):
        engine.step(batch)
    return weights(engine)


def averaged(plan: str, folder: str) -> Any:
    """Return averaged weights, their evaluation, that of the newest weights, the averaged weights after a resume, a loss."""
    job = small_jobs.make("mlp", ema=0.5)
    engine = engine_of(job, plan)
    for batch in engine.data(3):
        engine.step(batch)
    before = weights(engine)
    results = weights(engine, ema=True), engine.evaluate(), engine.evaluate(ema=False)
    after = weights(engine)
    assert all(torch.equal(before[k], after[k]) for k in before)
    engine.save(folder)
    engine.finish_saves()
    again = engine_of(job, plan)
    again.load(folder)
    (loss,) = [engine.step(batch) for batch in engine.data(1)]
    return *results, weights(again, ema=True), loss


def averaged_replicas(plan: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The averaged weights of replicas that step by themselves, and the average of their mean in each step."""
    engine = engine_of(small_jobs.make("mlp", ema=0.5, clip=None), plan)
    expected = {p.name: p.value.detach().clone() for p in engine.pieces}
    for batch in engine.data(3):
        engine.step(batch)
        for p in engine.pieces:
            mean = p.value.detach().clone()
            torch.distributed.all_reduce(mean)
            expected[p.name] = 0.5 * expected[p.name] + 0.5 * mean / engine.ranks
    return weights(engine, ema=True), expected


def plateau_run(plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The rates of a plateau schedule, and the weights at the end."""
    job = small_jobs.make("mlp", schedule=plateau, evaluate_every=2, clip=None)
    engine, _, _ = trained(job, plan, 6)
    return [group["lr"] for group in engine.optimizer.param_groups], weights(engine)


def serial(job: dl.Job, steps: int, *, after: Callable[[int, nn.Module, Any, Any], None] | None = None) -> nn.Module:
    """Train in a plain loop on one device in float64, which shares only the order of the samples with the engine."""
    from drumline.datasets import Stream as Batches
    from drumline.datasets import load_data

    torch.manual_seed(job.seed)
    model = job.model().double()
    pairs = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = job.optimizer_on(pairs)
    schedule = job.schedule(optimizer) if job.schedule else None
    stream = Batches(job, load_data(job))
    for step in range(steps):
        (micro,) = stream.batch(step).micros
        job.loss(model(micro.input.double()), micro.target).backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step, model, schedule, optimizer)
    return model


def mean_loss(model: nn.Module, kind: str = "vector") -> float:
    """The loss over the dataset, in evaluation mode."""
    samples = small_jobs.Samples(kind)
    x = torch.stack([samples[i][0] for i in range(len(samples))]).double()
    y = torch.tensor([samples[i][1] for i in range(len(samples))])
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(x), y))


def same_batch(plan: str, own: bool) -> list[str]:
    """A loop of the user's own that gives every rank the same batch, or each its own; returns the warnings."""
    import warnings

    engine = engine_of(small_jobs.make("mlp"), plan)
    samples = small_jobs.Samples("vector")
    first = engine.rank * 4 if own else 0
    batch = (
        torch.stack([samples[first + i][0] for i in range(4)]),
        torch.tensor([samples[first + i][1] for i in range(4)]),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(batch)
    return [str(w.message) for w in caught]


class Recording(dl.Callback):
    """Records its calls and stops after a step."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, stop_after: int = 10**9) -> None:
        self.stop_after = stop_after
        Recording.calls.clear()

    def after_step(self, engine: Engine, step: int, loss: float) -> bool:
        """Only the last rank wants to stop."""
        Recording.calls.append(("step", step))
        return step + 1 >= self.stop_after and engine.rank == engine.ranks - 1

    def after_evaluation(self, engine: Engine, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics have the loss and the job's own."""
        assert set(metrics) == {"loss", "accuracy"}
        Recording.calls.append(("evaluation", step))


def with_callback(plan: str, stop_after: int) -> tuple[list[tuple[str, int]], int]:
    """Train with a callback; returns its recorded calls and the number of steps."""
    job = small_jobs.make("mlp", callbacks=lambda: [Recording(stop_after)], evaluate=accuracy, evaluate_every=2)
    engine, _, _ = trained(job, plan, 6)
    return list(Recording.calls), engine.steps


def early_stop(plan: str) -> tuple[int, list[str]]:
    """A patience of one evaluation, and a metric that never improves."""
    job = small_jobs.make("mlp", callbacks=lambda: [dl.EarlyStop(patience=1, min_delta=10.0)], evaluate_every=1)
    engine, messages, _ = trained(job, plan, 6)
    return engine.steps, messages


CLIP_NORM = 0.01


def clip_by_hand(zero: int, clip: str, micro: int = 1) -> list[float]:
    """DeepSpeed's loop: `by hand` calls `clip_grad_norm_` between backward and step, `config` has gradient_clipping."""
    torch.manual_seed(0)
    model = small_jobs.MLP()
    config = {
        "train_batch_size": 8 * micro,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": zero},
        **({"gradient_clipping": CLIP_NORM} if clip == "config" else {}),
    }
    engine, *_ = dl.initialize(model=model, config=config)
    samples = small_jobs.Samples("vector")
    losses = []
    for _ in range(3):
        picked = [samples[engine.global_rank * 4 + i] for i in range(4)]
        loss = F.cross_entropy(engine(torch.stack([x for x, _ in picked])), torch.tensor([y for _, y in picked]))
        engine.backward(loss)
        if clip == "by hand":
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), CLIP_NORM)
        engine.step()
        losses.append(engine.mean_loss)
    return losses


def use_sent_gradients() -> list[str]:
    """Use a parameter's `grad` between backward and step under zero=2; returns the refused uses."""
    torch.manual_seed(0)
    model = small_jobs.MLP()
    engine, *_ = dl.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_batch_size": 8, "zero_optimization": {"stage": 2}},
    )
    x, y = small_jobs.Samples("vector")[engine.global_rank]
    engine.backward(F.cross_entropy(engine(torch.stack([x] * 4)), torch.tensor([y] * 4)))
    p = next(engine.module.parameters())
    assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype and p.grad.device == p.device
    refused = []
    uses = {
        "norm": lambda: p.grad.norm(),
        "foreach": lambda: torch._foreach_mul_([p.grad], 2.0),
        "data": lambda: p.grad.data,
        "in place": lambda: p.grad.mul_(2),
        "float": lambda: float(p.grad.sum()),
    }
    for name, use in uses.items():
        try:
            use()
        except JobError:
            refused.append(name)
    engine.step()
    assert p.grad is None
    return refused


NET, ORIGINAL = small_jobs.MLP(), small_jobs.MLP()
"""Models made once, at the top of a script."""


def given_twice() -> nn.Module:
    """Returns the same model whenever it is called."""
    return NET


def wrapped_twice() -> nn.Module:
    """A new head on a backbone that is made once."""
    return nn.Sequential(NET.blocks, nn.Linear(6, 3))


def copied() -> nn.Module:
    """A copy each time."""
    return copy.deepcopy(ORIGINAL)


class Normalised(torch.optim.Optimizer):
    """An update that depends on the norm of the whole parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own
        """A step of length one."""
        for group in self.param_groups:
            for p in group["params"]:
                p -= p.grad / p.grad.norm()


def refused_optimizer() -> None:
    """Refused where a plan shards it."""
    engine_of(small_jobs.make("mlp", optimizer=lambda named: Normalised([p for _, p in named])), "dp=2,zero=1")
