"""Functions that the tests of the engine run on ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import odd_models
import small_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from drumline.core.errors import GaveUp
from drumline.runtime.engine import Engine, initialize
from drumline.runtime.state.weights import seeded_model

DOUBLE = torch.float64


class Flat(nn.Module):
    """Nothing but leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Doubled(nn.Linear):
    """A forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class OwnLayers(nn.Module):
    """One layer that can be cut among larger ones that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), *(Doubled(6, 6) for _ in range(5)), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def said_in_training(plan: str, model: type[nn.Module]) -> list[str]:
    """The messages of a run of two steps."""
    from drumline.runtime.training.train import train

    messages: list[dict[str, Any]] = []
    train(initialize(small_jobs.make("mlp", model=model), plan), messages.append, steps=2, evaluate=False)
    return [e["message"] for e in messages if "message" in e]


class Lamb(torch.optim.Optimizer):
    """The step of a tensor is scaled by its norm: not element-wise."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-12)))


class Muon(Lamb):
    """The step of a matrix is made orthogonal: not element-wise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    u, _, v = torch.linalg.svd(p.grad.view(p.shape[0], -1), full_matrices=False)
                    p.sub_(group["lr"] * (u @ v).view_as(p))


class Masks(nn.Module):
    """Remembers the dropout masks that it drew."""

    drawn: list[torch.Tensor] = []  # noqa: RUF012  # shared on purpose: the model is built more than once

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = small_jobs.Residual(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(1, 64, dtype=x.dtype), 0.5, self.training)
        Masks.drawn.append(mask)
        return self.head(self.body(x) * mask[:, :6])


OPTIMIZERS = {"lamb": Lamb, "muon": Muon, "adam": small_jobs.adam}


def refuse(name: str, plan: str, changes: Mapping[str, Any] | None = None) -> None:
    """Create an engine that must be refused."""
    initialize(small_jobs.make(name, **(changes or {})), plan)


def with_optimizer(optimizer: str, plan: str) -> float:
    """One step with an optimizer by its name."""
    engine = initialize(small_jobs.make("mlp", optimizer=OPTIMIZERS[optimizer]), plan)
    return engine.step(next(engine.data(1)))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """A mean, a (sum, weight) and a plain number."""
    right = (output.argmax(-1) == target).double()
    return {"accuracy": right.mean(), "ones": (right.sum(), right.numel()), "rate": float(right.mean())}


def evaluate(name: str, plan: str, samples: int, steps: int = 2) -> dict[str, float]:
    """Train a little, evaluate, train on: evaluation changes nothing."""
    kind = {"mlp": "vector", "cnn": "image"}[name]
    job = small_jobs.make(name, evaluate=accuracy, validation=lambda: small_jobs.Samples(kind, samples))
    engine = initialize(job, plan, dtype=DOUBLE)
    losses = [engine.step(b) for b in engine.data(steps)]
    result = engine.evaluate()
    assert engine.module.training
    losses += [engine.step(b) for b in engine.data(steps)]
    again = initialize(job, plan, dtype=DOUBLE)
    assert [again.step(b) for b in again.data(2 * steps)] == losses
    assert result != engine.evaluate()
    given = engine.evaluate(small_jobs.Samples(kind, 3))
    return {**result, **{f"given {k}": v for k, v in given.items()}}


def evaluate_batch_statistics(plan: str, samples: int) -> dict[str, float]:
    """Evaluate a norm that keeps no running statistics: it uses those of the batch, over all ranks."""
    job = small_jobs.make("mlp", model=odd_models.Norm1d, batch_size=6)
    engine = initialize(job, plan, dtype=DOUBLE)
    engine.step(next(engine.data(1)))
    return engine.evaluate(small_jobs.Samples("vector", samples))


def evaluate_half(plan: str) -> tuple[float, float]:
    """The loss over all samples after two steps in bf16, and that of the next step."""
    engine = initialize(small_jobs.make("cnn"), plan)
    for batch in engine.data(2):
        engine.step(batch)
    return engine.evaluate()["loss"], engine.step(next(engine.data(1)))


def evaluate_nothing(plan: str) -> dict[str, float]:
    """A metric over samples of weight 0."""
    job = small_jobs.make("mlp", evaluate=lambda output, target: {"none": (output.sum() * 0, 0)})
    return initialize(job, plan).evaluate()


def own_loop(name: str, plan: str, sizes: list[int], kind: str = "vector") -> list[float]:
    """Train on own batches: `sizes[rank]` samples of this rank, cut from one list of all."""
    engine = initialize(small_jobs.make(name), plan, dtype=DOUBLE)
    start = sum(sizes[: engine.rank])
    losses = []
    for _ in range(3):
        samples = [small_jobs.Samples(kind)[start + i] for i in range(sizes[engine.rank])]
        losses.append(engine.step(torch.utils.data.default_collate(samples)))
    return losses


def weights_after_initialize(name: str) -> bool:
    """Sharded weights, put together, against the serial model's; also where units are small and rows do not divide."""
    expected = dict(seeded_model(small_jobs.make(name)).named_parameters())
    buffers = dict(seeded_model(small_jobs.make(name)).named_buffers())
    with mock.patch("drumline.tracing.layers.LEAST_UNIT", 40):
        engine = initialize(small_jobs.make(name), f"dp={dist.get_world_size()},zero=3")
    result = dict(engine.model.named_parameters())
    assert list(result) == list(expected)
    assert all(isinstance(p, DTensor) for p in result.values())
    assert sum(p.to_local().numel() for p in result.values()) < sum(p.numel() for p in expected.values())
    assert {k: p.requires_grad for k, p in result.items()} == {k: p.requires_grad for k, p in expected.items()}
    for k, b in engine.model.named_buffers():
        assert torch.equal(b, buffers[k])
    return all(torch.equal(p.full_tensor(), expected[k]) for k, p in result.items())


def where_models_are_built(plan: str) -> Counter[str]:
    """The devices on which this rank builds the job's model."""
    built: Counter[str] = Counter()

    def model() -> nn.Module:
        made = small_jobs.MLP()
        p = next(made.parameters())
        built["without values" if isinstance(p, FakeTensor) else str(p.device)] += 1
        return made

    initialize(small_jobs.make("mlp", model=model), plan)
    return built


def dropout_masks(plan: str) -> list[list[float]]:
    """The masks of one step, micro-batch by micro-batch."""
    engine = initialize(small_jobs.make("mlp", model=Masks), plan)
    Masks.drawn = []
    engine.step(next(engine.data(1)))
    return [m.flatten().tolist() for m in Masks.drawn]


def gradients_with_dropout(plan: str) -> dict[str, torch.Tensor]:
    """The gradients of the first step of a model with dropout."""
    engine = initialize(small_jobs.make("dropout"), plan, dtype=DOUBLE)
    result: dict[str, torch.Tensor] = {}
    engine.gradients_ready = lambda: result.update(  # type: ignore[method-assign]  # this is what it is for
        {k: g.clone() for k, g in engine.whole_gradients().items()}
    )
    engine.step(next(engine.data(1)))
    return result


def clocked(plan: str) -> tuple[set[str], int]:
    """The phases that are timed, and the number of steps."""
    engine = initialize(small_jobs.make("mlp"), plan)
    for batch in engine.data(3):
        engine.step(batch)
    assert all(seconds >= 0 for seconds in engine.clock.values())
    return set(engine.clock), engine.steps


def ignoring(plan: str, weighted: bool) -> list[float]:
    """A mean over targets that are not ignored, with a separate weight: a rank may have none."""

    def mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

    job = small_jobs.make("masked", loss=mean, sample_weight=lambda x, target: (target != -100).sum())
    engine: Engine = initialize(job if weighted else small_jobs.make("masked"), plan, dtype=DOUBLE)
    return [engine.step(b) for b in engine.data(4)]


def batch_without_weight() -> None:
    """Every target is ignored."""
    job = small_jobs.make("masked")
    engine = initialize(job, f"dp={dist.get_world_size()}", dtype=DOUBLE)
    engine.step((torch.full((2, 5), engine.rank), torch.full((2, 5), -100)))


def infinite_loss() -> str:
    """The loss is NaN on one rank; all ranks stop, with unchanged weights."""
    job = small_jobs.make("mlp", loss=lambda y, t: y.sum() * (float("inf") if dist.get_rank() else 1.0))
    engine = initialize(job, f"dp={dist.get_world_size()}")
    before = {k: p.detach().clone() for k, p in engine.model.named_parameters()}
    try:
        engine.step(next(engine.data(1)))
    except GaveUp as e:
        assert all(torch.equal(p, before[k]) for k, p in engine.model.named_parameters())
        return str(e)
    return "went on"
