"""Memory of a rank under ZeRO-1, 2 and 3, counted in live storages, against theory; and optimizers of many
kinds on flat shards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import parity
import pytest
import small_jobs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from world import World

from drumline.runtime.engine import Engine, initialize

Worlds = Callable[[int], World]
RANKS = 4
ROWS, WIDTH = 1501, 64
"""An embedding that dwarfs the rest, and divides by nothing."""


class Lopsided(nn.Module):
    """A large embedding, a layer of odd size, small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.odd, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 333), nn.Linear(333, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.odd(self.words((x[:, 0].abs() * 100).long() % ROWS))))


def live() -> dict[int, int]:
    """Bytes of every storage that some tensor keeps alive."""
    gc.collect()
    result: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            tensor = thing.to_local() if isinstance(thing, DTensor) else thing
            if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter):
                result[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    result.pop(0, None)
    return result


def holds(plan: str) -> dict[str, float]:
    """Bytes that this rank holds when the gradients of a second step are ready, by what for."""
    samples = small_jobs.Samples("vector")
    before = live()
    engine = initialize(small_jobs.make("mlp", model=Lopsided, data=lambda: samples), plan)
    seen: dict[str, dict[int, int]] = {}
    engine.gradients_ready = lambda: seen.update(ready=live())  # type: ignore[method-assign]  # this is what it is for
    for batch in engine.data(2):
        engine.step(batch)
    ready = {k: n for k, n in seen["ready"].items() if k not in before}
    parameters = _storages(engine.model.parameters())
    state = _storages(t for values in engine.optimizer.state.values() for t in values.values())
    return {
        "whole": 4.0 * sum(torch.Size(kind.shape).numel() for kind in engine.parameter_specs.values()),
        "optimizer": float(sum(n for k, n in ready.items() if k in state)),
        "parameters": float(sum(n for k, n in ready.items() if k in parameters)),
        "gradients": float(sum(n for k, n in ready.items() if k not in state and k not in parameters)),
    }


def _storages(tensors: Iterable[Any]) -> set[int]:
    results = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in results}


@pytest.mark.parametrize(
    ("plan", "parameters", "gradients"),
    [
        ("zero=1", 1.0, 1.0),
        ("zero=2", 1.0, 0.25),
        ("zero=3", 0.25, 0.25),
    ],
)
def test_memory_shares_match_theory(world: Worlds, plan: str, parameters: float, gradients: float) -> None:
    """To 5%, on every rank: also the one that a large embedding would have fallen to."""
    for result in world(RANKS).run(holds, f"dp={RANKS},{plan}"):
        shares = {k: v / result["whole"] for k, v in result.items()}
        assert shares["optimizer"] == pytest.approx(2 * 0.25, rel=0.05)  # AdamW has two numbers for each
        assert shares["parameters"] == pytest.approx(parameters, rel=0.05)
        assert shares["gradients"] == pytest.approx(gradients, rel=0.05)


def test_replicas_have_everything(world: Worlds) -> None:
    """Checks the count itself."""
    for result in world(2).run(holds, "dp=2"):
        shares = {k: v / result["whole"] for k, v in result.items()}
        assert shares["optimizer"] == pytest.approx(2.0, rel=0.05)
        assert shares["parameters"] == pytest.approx(1.0, rel=0.05)
        assert shares["gradients"] == pytest.approx(1.0, rel=0.05)


# -- optimizers


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only, by their dims."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """It has a state before its first step."""
    return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)


OPTIMIZERS = {"grouped": grouped, "adagrad": adagrad, "momentum": small_jobs.sgd}


@pytest.mark.parametrize("plan", ["dp=3", "dp=3,zero=1", "dp=3,zero=2,micro=2", "dp=3,zero=3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_equal_one_device(world: Worlds, optimizer: str, plan: str) -> None:
    changes = {"optimizer": OPTIMIZERS[optimizer]}
    parity.check(world(3).run(parity.run_verify, "mlp", plan, 4, changes)[0])


class Sometimes(nn.Module):
    """A layer that is used by the samples of one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.head = nn.Linear(6, 6), small_jobs.Residual(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if bool((x[:, 0] > 50).any()):
            y = self.rare(y)
        return self.head(y)


def sometimes(plan: str, rows: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps in which the layer is used by the first rank alone; with one rank, its samples are the first of all."""
    engine: Engine = initialize(small_jobs.make("mlp", model=Sometimes, clip=None), plan, dtype=torch.float64)
    start = sum(rows[: engine.rank])
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(sum(rows), 6, generator=g), torch.randint(3, (sum(rows),), generator=g)
    x[: rows[0], 0] += 100.0
    part = slice(start, start + rows[engine.rank])
    losses = [engine.step((x[part], y[part])) for _ in range(3)]
    return losses, engine.whole_parameters()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_parameter_unused_on_one_rank(world: Worlds, plan: str) -> None:
    """Every rank ends with the same weights, and the layer is trained from what one rank saw of it."""
    one, two = world(2).run(sometimes, plan, [3, 4])
    assert one[0] == two[0]
    for name, value in one[1].items():
        assert torch.equal(value, two[1][name]), name
    expected = world(2).run(sometimes, "dp=2", [3, 4])[0]
    assert one[0] == pytest.approx(expected[0], rel=1e-10)
    for name, value in expected[1].items():
        torch.testing.assert_close(one[1][name], value, rtol=1e-9, atol=1e-12, msg=name)
