"""Batches loaded ahead: the same as without workers, from any step; failures of workers raise instead of hanging."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream import Numbers, job, seen

from drumline.core.errors import GaveUp, JobError
from drumline.datasets import Loader, RankBatch, Stream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # torch's word on machines of few cores


class Random(Numbers):
    """Samples with random augmentation of every kind."""

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64), i


class Broken(Numbers):
    """Sample 2 cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 2:
            raise OSError("disk")
        return super().__getitem__(i)


class Deadly(Numbers):
    """Sample 2 kills the process that reads it."""

    def __getitem__(self, i: int) -> Any:
        if i == 2 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def equal(a: RankBatch, b: RankBatch) -> bool:
    pairs = zip(a.micros, b.micros, strict=True)
    return (a.step, a.samples) == (b.step, b.samples) and all(
        torch.equal(x.input, y.input)
        and torch.equal(torch.as_tensor(x.target), torch.as_tensor(y.target))
        and (x.samples, x.total) == (y.samples, y.total)
        for x, y in pairs
    )


@pytest.fixture
def loader() -> Iterator[Any]:
    made = []

    def make(dataset: Any, workers: int, **changes: Any) -> Loader:
        made.append(Loader(Stream(job(**changes), dataset, dp=2, index=1, micro=2), workers=workers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("start", [0, 5])
def test_the_same_batches_from_any_step(loader: Any, workers: int, start: int) -> None:
    plain, ahead = loader(Random(11), 0), loader(Random(11), workers)
    for step in range(start, start + 8):
        assert equal(ahead.batch(step), plain.batch(step))


def test_steps_out_of_order(loader: Any) -> None:
    plain, ahead = loader(Random(11), 0), loader(Random(11), 1)
    for step in (0, 1, 4, 4, 2, 3):
        assert equal(ahead.batch(step), plain.batch(step))


def test_random_numbers_depend_on_step_and_sample() -> None:
    drawn = set()
    for index in range(2):
        stream = Stream(job(batch_size=8), Random(8), dp=2, index=index)
        for step in range(3):
            before = torch.get_rng_state(), random.getstate()
            batch = stream.batch(step)
            assert equal(batch, stream.batch(step))
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]
            drawn.update(tuple(row[1:].tolist()) for row in batch.micros[0].input)
    assert len(drawn) == 2 * 3 * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(loader: Any, workers: int) -> None:
    broken = loader(Broken(4), workers, batch_size=4)
    with pytest.raises(
        JobError,
        match=r"sample 2 of the dataset raised OSError: disk\n  where: .*test_loader.py, line \d+: raise OSError",
    ) as caught:
        for step in range(4):
            broken.batch(step)
    assert caught.value.exit_code == 2


def test_a_worker_that_dies_is_an_error(loader: Any) -> None:
    ahead = loader(Deadly(4), 2, batch_size=4)
    start = time.monotonic()
    with pytest.raises(
        GaveUp,
        match=r"a data-loading worker died before step \d\n  where: DataLoader worker .*\n  rule:  all 2 workers",
    ):
        for step in range(4):
            ahead.batch(step)
    assert time.monotonic() - start < 60
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.parametrize("workers", [-1, True, 1.5, None])
def test_the_number_of_workers_is_checked(workers: Any) -> None:
    with pytest.raises(JobError, match="rule:  workers is a whole number of at least 0"):
        job(workers=workers)


def children() -> int:
    return len([c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE])


def test_workers_end_with_the_loader(loader: Any) -> None:
    before = children()
    ahead = loader(Numbers(9), 2)
    ahead.batch(0)
    assert children() == before + 2
    ahead.close()
    assert children() == before
    ahead.close()
    with Loader(ahead.stream, workers=2) as other:
        other.batch(3)
        assert children() == before + 2
    assert children() == before
    forgotten = Loader(ahead.stream, workers=1)
    forgotten.batch(0)
    del forgotten
    gc.collect()
    assert children() == before


def load_and_vanish(pipe: Any) -> None:
    """A rank with workers that is killed without notice."""
    ahead = Loader(Stream(job(), Numbers(9)), workers=2)
    ahead.batch(0)
    pipe.send([c.pid for c in psutil.Process().children()])
    time.sleep(60)


def test_workers_end_with_a_rank_that_is_killed() -> None:
    """The rank is a daemon, as all ranks are, and has workers nevertheless."""
    context = torch.multiprocessing.get_context("fork")
    here, there = context.Pipe()
    rank = context.Process(target=load_and_vanish, args=(there,), daemon=True)
    rank.start()
    assert here.poll(60)
    workers = here.recv()
    assert len(workers) == 2
    rank.kill()
    rank.join()
    end = time.monotonic() + 30
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in workers):
        assert time.monotonic() < end, "workers outlive their rank"
        time.sleep(0.02)
    for p in workers:  # a batch that was being handed over when they were killed keeps its memory: torch names it first
        for segment in Path("/dev/shm").glob(f"torch_{p}_*"):
            segment.unlink()


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 12),
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_every_sample_once_an_epoch_over_restarts(n: int, size: int, legs: list[tuple[int, int, int]]) -> None:
    """Legs of (steps, ranks, micro-batches): each starts where the previous one stopped, with other ranks."""
    step = 0
    counts: Counter[int] = Counter()
    stop = sum(leg[0] for leg in legs)
    steps_per_epoch = -(-n // size)
    for steps, dp, micro in legs:
        ranks = [Loader(Stream(job(batch_size=size), Numbers(n), dp=dp, index=r, micro=micro)) for r in range(dp)]
        for _ in range(steps):
            counts.update(i for part in seen([r.batch(step) for r in ranks]) for i in part)
            step += 1
            if step % steps_per_epoch == 0:
                assert counts == Counter(range(n))
                counts.clear()
    assert step == stop
    assert all(count == 1 for count in counts.values())
