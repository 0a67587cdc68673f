"""Batches that are loaded ahead in an order that is announced: the same as those of the stream, in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import JobError
from drumline.datasets.ahead_loader import AheadLoader
from drumline.datasets.sources import load_data
from drumline.datasets.stream import RankBatch, Stream


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that say which process has loaded them; number 33 cannot be loaded."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if i == 33:
            raise ValueError("a broken sample")
        return torch.tensor([float(i)]), torch.tensor(os.getpid())


@pytest.fixture
def loader() -> Iterator[AheadLoader]:
    job = dl.Job(
        model=lambda: nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=Data,
        batch_size=4,
        workers=2,
    )
    ahead = AheadLoader(Stream(job, load_data(job)))
    yield ahead
    ahead.close()


def by_process(batch: RankBatch) -> bool:
    """Whether a worker process has loaded it."""
    return int(batch.micros[0].target[0]) != os.getpid()


def test_announced_steps_are_loaded_by_worker_processes(loader: AheadLoader) -> None:
    assert loader.depth == 2
    asked = [(0, (3, 5)), (3, (5, 6)), (1, (5, 6)), (6, (7,)), (7, ()), (2, ())]  # 1 was given back, 5 was taken over
    loaded = []
    for step, coming in asked:
        batch = loader.batch(step, coming)
        plain = loader._stream.batch(step)
        assert batch.step == step and torch.equal(batch.micros[0].input, plain.micros[0].input)
        loaded.append(by_process(batch))
    assert loaded == [False, True, False, True, True, False]


def test_an_error_names_the_sample(loader: AheadLoader) -> None:
    broken = next(s for s in range(10) if 33 in loader._stream.samples(s))
    loader.batch((broken + 1) % 10, (broken,))
    with pytest.raises(JobError, match="sample 33 of the dataset"):
        loader.batch(broken)
