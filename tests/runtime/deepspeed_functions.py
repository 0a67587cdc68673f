"""Functions that the DeepSpeed-interface tests run on ranks, and the plain loop they are compared with."""

from __future__ import annotations

from typing import Any

import parity
import small_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import drumline as dl
from drumline.datasets import split_range
from drumline.datasets.stream import Stream
from drumline.runtime.guards.guard import Guards

DOUBLE = torch.float64
BATCH = 12
"""Of 17 samples: an epoch has a batch of 12 and one of 5."""


class Lora(nn.Module):
    """A frozen linear layer with a rank-2 adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, width) * 0.5), nn.Parameter(torch.zeros(out, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(nn.Module):
    """A frozen model with trainable adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Lora(6, 8), Lora(8, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.norm.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x + self.second(torch.tanh(self.first(x)))))


MODELS = {
    "mlp": small_jobs.MLP,
    "partial": small_jobs.Partial,
    "gpt": small_jobs.GPT,
    "lora": Adapted,
    "cnn": small_jobs.CNN,
}
KINDS = {"gpt": "tokens", "cnn": "image"}


def model_of(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(DOUBLE)


def samples_of(name: str) -> small_jobs.Samples:
    return small_jobs.Samples(KINDS.get(name, "vector"))


def loss_of(name: str, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return small_jobs.tokens_loss(out, target) if name == "gpt" else F.cross_entropy(out, target)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with their own rates and weight decays, or one group of all parameters, frozen ones included."""
    if kind == "one":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flat = [p for p in model.parameters() if p.dim() < 2]
    deep = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": deep, "weight_decay": 0.3}, {"params": flat, "lr": 3e-3, "weight_decay": 0.0}], lr=1e-2
    )


def config_of(zero: int, micro: int, clip: float, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero},
        **more,
    }


def train_deepspeed(name: str, zero: int, micro: int, clip: float, optimizer: str, epochs: int = 2) -> dict[str, Any]:
    """The user's own loop, with a differently initialized model on every rank."""
    rank = dist.get_rank()
    model = model_of(name, seed=rank)
    engine, used, loader, scheduler = dl.initialize(
        model=model,
        optimizer=optimizer_of(optimizer, model),
        data=samples_of(name),
        config=config_of(zero, micro, clip),
        scheduler=dl.rates.Exponential(by=0.9),
        dtype=DOUBLE,
    )
    assert engine.module is model
    losses, boundaries, norms, rates = [], [], [], []
    for _ in range(epochs):
        for x, y in loader:
            x = x.to(DOUBLE) if x.is_floating_point() else x
            loss = loss_of(name, engine(x), y)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            losses.append(float(engine.backward(loss).detach()))
            engine.step()
            if boundaries[-1]:
                norms.append(engine.get_global_grad_norm())
                rates.append(engine.get_lr())
    with_state = {p.name for p in engine.engine.pieces if used.state.get(p.value)}
    shares = {n: p.to_local().numel() if isinstance(p, DTensor) else p.numel() for n, p in model.named_parameters()}
    return {
        "weights": engine.module_state_dict(),
        "losses": losses,
        "boundaries": boundaries,
        "norms": norms,
        "rates": rates,
        "steps": engine.global_steps,
        "length": len(loader),
        "state": with_state,
        "shares": shares,
        "sizes": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ),
        "scheduler": type(scheduler).__name__,
    }


def plain(name: str, ranks: int, micro: int, clip: float, optimizer: str, epochs: int = 2) -> dict[str, Any]:
    """One device: the mean over micro-batches and ranks of the means over their slices."""
    model = model_of(name)
    data = samples_of(name)
    used = optimizer_of(optimizer, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(used, 0.9)
    job = dl.Job(model=list, loss=max, optimizer=list, data=list, batch_size=BATCH)
    stream = Stream(job, data)
    norms: list[float] = []
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(epochs * stream.steps_per_epoch):
        samples = stream.samples(step)
        for part in split_range(len(samples), micro):
            for r in range(ranks):
                mine = split_range(len(part), ranks)[r] or range(1)
                x, y = torch.utils.data.default_collate([data[samples[part[i]]] for i in mine])
                loss = loss_of(name, model(x.to(DOUBLE) if x.is_floating_point() else x), y)
                losses[r].append(float(loss.detach()))
                (loss / (ranks * micro)).backward()
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
        norms.append(norm)
        if norm > clip > 0:
            for p in trained:
                assert p.grad is not None
                p.grad.mul_(clip / (norm + 1e-6))
        used.step()
        schedule.step()
        used.zero_grad()
    return {"weights": model.state_dict(), "losses": losses, "norms": norms}


def own_batches(zero: int) -> list[float]:
    """Without data: the loop has its own batches; optimizer and schedule come from the config."""
    model = model_of("mlp")
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    }
    engine, optimizer, loader, scheduler = dl.initialize(model=model, config=config, dtype=DOUBLE)
    assert loader is None
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert scheduler is engine.lr_scheduler
    data = small_jobs.Samples("vector")
    losses = []
    for step in range(4):
        rows = [3 * (engine.world_size * step + engine.global_rank) + i for i in range(3)]
        out = engine(torch.stack([data.x[i % 17] for i in rows]).to(DOUBLE))
        loss = F.cross_entropy(out, torch.stack([data.label[i % 17] for i in rows]))
        engine.backward(loss)
        engine.step()
        total = loss.detach() / engine.world_size
        dist.all_reduce(total)
        losses.append(float(total))
    with torch.no_grad():
        assert not engine.eval()(data.x[:2].to(DOUBLE)).requires_grad
    assert engine.train().module.training
    return losses


def both_loops(zero: int) -> tuple[list[float], list[float]]:
    """If all sizes divide, the DeepSpeed loop and `engine.step(batch)` compute the same."""
    runs = []
    for separate in (True, False):
        model = model_of("mlp")
        config = config_of(zero, 2, 0.5)
        data = small_jobs.Samples("vector", 2 * BATCH)
        engine, *_ = dl.initialize(
            model=model,
            optimizer=optimizer_of("two", model),
            data=data,
            config=config,
            loss=F.cross_entropy,
            dtype=DOUBLE,
        )
        norms = []
        for batch in engine.engine.data(3):
            if separate:
                for micro in batch.micros:
                    engine.backward(F.cross_entropy(engine(micro.input.to(DOUBLE)), micro.target))
                    engine.step()
            else:
                engine.engine.step(batch)
            norms.append(engine.get_global_grad_norm())
        runs.append(norms)
    return runs[0], runs[1]


def overflowing(zero: int) -> tuple[int, int, float, bool]:
    """fp16: a step whose gradients overflow is skipped, and the loss scale is lowered."""
    torch.manual_seed(0)
    model = small_jobs.MLP()
    before = [p.detach().clone() for p in model.parameters()]
    config = config_of(zero, 1, 0.0, fp16={"enabled": True, "initial_scale_power": 4})
    engine, *_ = dl.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    data = small_jobs.Samples("vector")
    for factor in (1e38, 1.0):
        loss = F.cross_entropy(engine(data.x[:4]).float(), data.label[:4])
        engine.backward(loss * factor)
        engine.step()
        if factor > 1:
            whole = engine.engine.whole_parameters().values()
            same = all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))
    return engine.global_steps, engine.skipped_steps, engine.loss_scale(), same


def not_finite(zero: int, policy: str) -> tuple[int, int, float, str]:
    """A NaN loss: the step is skipped or the run ends; buffers are unchanged."""
    model = model_of("cnn")
    engine, *_ = dl.initialize(
        model=model,
        optimizer=optimizer_of("one", model),
        config=config_of(zero, 2, 0.0),
        dtype=DOUBLE,
        guards=Guards(nonfinite=policy),
    )
    x = torch.randn(6, 1, 5, 4, dtype=DOUBLE)
    buffers = []
    for factor in (1.0, torch.nan, 1.0):
        before = [b.clone() for b in model.buffers()]
        for _ in range(2):
            engine.backward(engine(x).square().mean() * factor)
            engine.step()
        buffers.append(all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True)))
    return engine.global_steps, engine.skipped_steps, engine.mean_loss, str(buffers)


def scheduled(zero: int) -> list[float]:
    """The rates under a scheduler instance created on the given optimizer."""
    model = model_of("mlp")
    optimizer = optimizer_of("one", model)
    parts = [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    engine, used, _, rebound = dl.initialize(
        model=model, optimizer=optimizer, scheduler=scheduler, config=config_of(zero, 1, 0.0), dtype=DOUBLE
    )
    assert rebound.optimizer is used is not optimizer
    rates = []
    for _ in range(5):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(2, 6, dtype=DOUBLE)).square().sum())
        engine.step()
    assert optimizer.param_groups[0]["lr"] == rates[0]
    return rates


def left_open() -> list[float]:
    """The rates of a config that leaves the length of the run to the caller."""
    model = model_of("mlp")
    params = {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    engine, *_ = dl.initialize(model=model, config=config, steps=6, dtype=DOUBLE)
    rates = []
    for _ in range(9):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(2, 6, dtype=DOUBLE)).square().sum() * 1e-9)
        engine.step()
    return rates


def dropout_masks(zero: int) -> tuple[list[bytes], bool]:
    """The dropout masks of two micro-batches; and whether the user's random state is preserved."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    config = config_of(zero, 2, 0.0)
    engine, *_ = dl.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    seen = []
    model[1].register_forward_hook(lambda m, i, o: seen.append(o.detach().eq(0).numpy().tobytes()))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 4)).mean())
        engine.step()
    return seen, torch.equal(before, torch.get_rng_state())


def resumed_optimizer(plan: str) -> dict[str, torch.Tensor]:
    """An optimizer that has already stepped continues with its state."""
    model = model_of("mlp")
    optimizer = optimizer_of("two", model)
    x, y = small_jobs.Samples("vector").x.to(DOUBLE), small_jobs.Samples("vector").label
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine, *_ = dl.initialize(model=model, optimizer=optimizer, plan=plan, dtype=DOUBLE)
    for _ in range(2):
        engine.backward(F.cross_entropy(engine(x), y))
        engine.step()
    return engine.module_state_dict()


def saved_and_resumed(
    folder: str, first: int, second: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Two epochs in one run; and the second again from a checkpoint, under another zero stage."""

    def epoch(engine: Any, loader: Any) -> None:
        for x, y in loader:
            engine.backward(F.cross_entropy(engine(x.to(DOUBLE)), y))
            engine.step()

    def make(zero: int, seed: int) -> Any:
        model = model_of("mlp", seed)
        return dl.initialize(
            model=model,
            optimizer=optimizer_of("two", model),
            data=samples_of("mlp"),
            config=config_of(zero, 2, 0.5),
            scheduler=dl.rates.Cosine(steps=9, warmup=2),
            dtype=DOUBLE,
        )

    engine, _, loader, _ = make(first, 0)
    epoch(engine, loader)
    engine.engine.save(folder)
    engine.engine.finish_saves()
    epoch(engine, loader)
    again, _, other, _ = make(second, 1)
    again.engine.load(folder)
    epoch(again, other)
    assert again.global_steps == engine.global_steps == 4
    assert again.get_lr() == engine.get_lr()
    return engine.module_state_dict(), again.module_state_dict(), again.get_lr()


def wrong_order(which: str) -> None:
    """Forward, backward and step in a wrong order."""
    model = model_of("mlp")
    engine, *_ = dl.initialize(model=model, optimizer=optimizer_of("one", model), config=config_of(0, 1, 0.0))
    x = torch.zeros(2, 6, dtype=DOUBLE)
    if which == "step":
        engine.step()
    elif which == "backward":
        engine.backward(torch.zeros((), requires_grad=True))
    elif which == "forward":
        engine.backward(engine(x).sum())
        engine(x)
    elif which == "loss":
        engine.backward(engine(x))
    elif which == "number":
        engine(x)
        engine.backward(3.0)


def failed_forward(zero: int, fails: bool) -> float:
    """A forward that raises in the second micro-batch discards its batch; the next forward begins a new one."""
    model = model_of("mlp")
    engine, *_ = dl.initialize(
        model=model, optimizer=optimizer_of("one", model), config=config_of(zero, 2, 0.0), dtype=DOUBLE
    )
    if fails:
        engine.backward(engine(torch.full((2, 6), 5.0, dtype=DOUBLE)).square().sum())
        engine.step()
        try:
            engine(torch.zeros(2, 5, dtype=DOUBLE))
        except RuntimeError:
            pass
        else:
            raise AssertionError("it did not raise")
    for scale in (1.0, 2.0):
        engine.backward(engine(torch.full((2, 6), scale, dtype=DOUBLE)).square().sum())
        engine.step()
    assert engine.global_steps == 1
    return engine.get_global_grad_norm()


def refused(changes: dict[str, Any]) -> None:
    """Invalid arguments of `initialize`."""
    model = changes.pop("model", None) or model_of(changes.pop("name", "mlp"))
    changes.setdefault("config", config_of(0, 1, 0.0))
    if changes.pop("foreign", False):
        changes["optimizer"] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    if changes.pop("frozen", False):
        model.requires_grad_(False)
    if changes.pop("plateau", False):
        changes["optimizer"] = optimizer_of("one", model)
        changes["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(changes["optimizer"])
    if changes.pop("few", False):
        changes["optimizer"] = torch.optim.SGD(model.head.parameters(), lr=0.1)
    dl.initialize(model=model, **changes)


def loaded(zero: int, workers: int, drop: bool) -> tuple[int, list[list[float]]]:
    """Two epochs of a loader, ragged or not, with and without workers."""
    model = model_of("mlp")
    config = config_of(zero, 2, 0.0, dataloader_drop_last=drop)
    engine, _, loader, _ = dl.initialize(
        model=model,
        optimizer=optimizer_of("one", model),
        data=small_jobs.Samples("vector"),
        config=config,
        dtype=DOUBLE,
        workers=workers,
    )
    seen = []
    for _ in range(2):
        for x, y in loader:
            seen.append(x[:, 0].tolist())
            engine.backward(F.cross_entropy(engine(x.to(DOUBLE)), y))
            engine.step()
    return len(loader), seen


def noise(plan: str, parts: int) -> tuple[float, float, str, bool]:
    """The noise scale of a regression under a plan; weights and position are unchanged."""
    from drumline.runtime.learning_rates.gradient_noise import noise_scale

    engine = dl.initialize(regression(), plan, dtype=DOUBLE)
    before = [p.value.detach().clone() for p in engine.pieces]
    measured = noise_scale(engine, batches=20, parts=parts)
    same = all(torch.equal(a, p.value) for a, p in zip(before, engine.pieces, strict=True))
    kept = same and engine.position == engine.steps == 0 and all(p.value.grad is None for p in engine.pieces)
    return measured.scale, measured.high - measured.scale, str(measured), kept


def noise_of_parts(plan: str) -> tuple[float, bool]:
    """The noise scale of a split model; whether nothing changed."""
    from drumline.runtime.learning_rates.gradient_noise import noise_scale

    engine = dl.initialize(small_jobs.make("gpt"), plan, dtype=DOUBLE)
    before = engine.whole_parameters()
    measured = noise_scale(engine, batches=3, parts=2)
    after = engine.whole_parameters()
    kept = all(torch.equal(before[n], after[n]) for n in before) and engine.position == engine.steps == 0
    return measured.scale, kept


class Regression(torch.utils.data.Dataset[Any]):
    """y = noise: the model is at the distance `delta` from the optimum."""

    def __init__(self, n: int = 8192) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 5, generator=g, dtype=DOUBLE)
        self.y = 2.0 * torch.randn(n, generator=g, dtype=DOUBLE)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def squared(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out[:, 0], target)


def offset_model() -> nn.Module:
    layer = nn.Linear(5, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5, -0.5, 0.5, 0.3, -0.4]]))
    return layer


def regression() -> dl.Job:
    return dl.Job(model=offset_model, loss=squared, optimizer=small_jobs.sgd, data=Regression, batch_size=240)


class Borrowing(nn.Module):
    """Its last operator multiplies by a weight of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(small_jobs.Residual(8), small_jobs.Residual(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks(x), next(self.blocks[0].parameters()))


def reading_outside() -> None:
    """A weight that is read while its layer does not run, in a model that was never traced."""
    model = Borrowing()
    with parity.shard_small_layers("zero=3"):
        engine, *_ = dl.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config_of(3, 1, 0.0)
        )
    engine(torch.zeros(2, 8))
