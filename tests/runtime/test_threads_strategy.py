"""backend=threads: replicas as threads of one process equal one device, and a failing replica fails the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import small_jobs
import torch
from torch import nn
from world import World

from drumline.core.errors import JobError, PlanError
from drumline.runtime.engine import initialize

Worlds = Callable[[int], World]


class Fails(nn.Module):
    """One replica raises before its norm, where the others wait for it."""

    def __init__(self, which: float) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) == self.which:
            raise ValueError("this replica fails")
        return self.head(self.norm(self.first(x)))


class Summed(nn.Module):
    """Its output is one number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).mean(0)


class Chancy(nn.Module):
    """Computes a part in float32 explicitly, with functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.first(x), 0.5)
        return self.head(h.float().tanh().to(x.dtype))


def failing(which: float) -> None:
    engine = initialize(small_jobs.make("mlp", model=lambda: Fails(which)), "dp=3,backend=threads")
    rows = torch.arange(7.0)[:, None].expand(7, 6).contiguous()
    engine.step((rows, torch.zeros(7, dtype=torch.long)))


def summing() -> None:
    engine = initialize(small_jobs.make("mlp", model=Summed), "dp=2,backend=threads")
    engine.step(next(engine.data(1)))


def few(samples: int, replicas: int) -> list[float]:
    """Losses on batches that have fewer samples than there are threads."""
    engine = initialize(small_jobs.make("cnn"), f"dp={replicas},backend=threads", dtype=torch.float64)
    batch = torch.utils.data.default_collate([small_jobs.Samples("image")[i] for i in range(samples)])
    return [engine.step(batch) for _ in range(3)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("job", ["mlp", "cnn", "named", "gpt", "masked"])
def test_threads_equal_one_device(world: Worlds, job: str, replicas: int) -> None:
    """The cnn's norms meet; the output of `named` is a dict."""
    parity.check(world(1).run(parity.run_verify, job, f"dp={replicas},backend=threads")[0])


@pytest.mark.parametrize("choice", ["micro=3", "precision=bf16", "chunk=3"])
def test_threads_with_other_keys(world: Worlds, choice: str) -> None:
    parity.check(world(1).run(parity.run_verify, "gpt", f"dp=3,backend=threads,{choice}")[0])


def test_function_modes_reach_the_threads(world: Worlds) -> None:
    """`verify` removes randomness and float32 from a model by modes, which are per thread."""
    result = world(1).run(parity.run_verify, "mlp", "dp=3,backend=threads", 3, {"model": Chancy})[0]
    parity.check(result)


def test_running_statistics(world: Worlds) -> None:
    expected = parity.serial("cnn")
    [result] = world(1).run(parity.run_losses, "cnn", "dp=3,backend=threads")
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for name, value in expected["buffers"].items():
        torch.testing.assert_close(result["buffers"][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_fewer_samples_than_threads(world: Worlds) -> None:
    [expected] = world(1).run(few, 2, 1)
    assert world(1).run(few, 2, 4) == [pytest.approx(expected, rel=1e-10)]


@pytest.mark.parametrize("which", [0.0, 3.0, 5.0])
def test_failing_replica(world: Worlds, which: float) -> None:
    """The first, the second or the third of three: the others wait in the norm, and must not wait forever."""
    with pytest.raises(ValueError, match="this replica fails"):
        world(1).run(failing, which)


def test_only_a_replica_with_that_slice_fails(world: Worlds) -> None:
    """Slices of 7 samples begin at 0, 3 and 5: other samples fail in no replica."""
    assert world(1).run(failing, 1.0) == [None]


def test_output_without_samples(world: Worlds) -> None:
    with pytest.raises(JobError, match=r"output of shape \(3,\) does not count samples along its first dim"):
        world(1).run(summing)


def test_threads_are_one_process(world: Worlds) -> None:
    with pytest.raises(PlanError, match="backend=threads is one process"):
        world(2).run(small_step, "dp=2,backend=threads")


def small_step(plan: str) -> Any:
    engine = initialize(small_jobs.make("mlp"), plan)
    return engine.step(next(engine.data(1)))
