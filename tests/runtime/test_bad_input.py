"""Edge cases of jobs, under every level of sharding: correct, or refused by name, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import small_jobs
import torch
from world import World

from drumline.core.errors import JobError
from drumline.runtime.engine import initialize

Worlds = Callable[[int], World]
ZEROS = (0, 1, 2, 3)


class Broken(small_jobs.Samples):
    """Two samples of it cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i in (3, 11):
            raise OSError("the disk is gone")
        return super().__getitem__(i)


def few_samples(plan: str) -> list[float]:
    """On every rank: two samples for three ranks, and batches of seven."""
    job = small_jobs.make("mlp", data=lambda: small_jobs.Samples("vector", 2))
    engine = initialize(job, plan, dtype=torch.float64)
    return [engine.step(batch) for batch in engine.data(3)]


def broken_sample(plan: str) -> str:
    """On every rank: train until a sample raises somewhere; its rank names it, the others report the end."""
    engine = initialize(small_jobs.make("mlp", data=lambda: Broken("vector")), plan)
    for batch in engine.data(3):
        engine.step(batch)
    return "trained"


def no_parameters(plan: str) -> None:
    """A model that has nothing to train, because all of it is frozen."""
    initialize(small_jobs.make("mlp", model=lambda: small_jobs.MLP().requires_grad_(False)), plan)


@pytest.mark.parametrize("zero", ZEROS)
def test_fewer_samples_than_ranks(world: Worlds, zero: int) -> None:
    changes = {"data": lambda: small_jobs.Samples("vector", 2)}
    expected = parity.serial("mlp", steps=3, changes=changes)["losses"]
    for losses in world(3).run(few_samples, f"dp=3,zero={zero}"):
        assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("zero", ZEROS)
def test_failing_sample_is_named(world: Worlds, zero: int) -> None:
    with pytest.raises(JobError, match=r"sample (3|11) of the dataset raised OSError: the disk is gone"):
        world(2).run(broken_sample, f"dp=2,zero={zero}")


@pytest.mark.parametrize("zero", ZEROS)
def test_frozen_model(world: Worlds, zero: int) -> None:
    with pytest.raises(JobError, match="has no parameter to train"):
        world(2).run(no_parameters, f"dp=2,zero={zero}")
