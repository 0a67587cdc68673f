"""Sample order: every sample once an epoch, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from drumline import Job
from drumline.core.errors import JobError
from drumline.datasets import RankBatch, Stream, sources, split_range


class Numbers:
    """Sample i is (i, -i)."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i), torch.tensor(-i)


class Endless(IterableDataset[Any]):
    """Not map-style."""

    def __iter__(self) -> Iterator[Any]:
        yield 1, 2


def job(**changes: Any) -> Job:
    return Job(**{"model": list, "loss": max, "optimizer": list, "data": list, "batch_size": 4, **changes})


def streams(n: int, dp: int, micro: int, **changes: Any) -> list[Stream]:
    return [Stream(job(**changes), Numbers(n), dp=dp, index=r, micro=micro) for r in range(dp)]


def seen(batches: list[RankBatch]) -> list[list[int]]:
    """The samples of one step by micro-batch, collected from the ranks."""
    micro_batches = []
    for micros in zip(*(b.micros for b in batches), strict=True):
        assert len({m.total for m in micros}) == 1
        assert sum(m.samples for m in micros) == micros[0].total
        micro_batches.append([int(i) for m in micros for i in m.input[: m.samples]])
    return micro_batches


@given(st.integers(0, 200), st.integers(1, 20))
def test_split_range(n: int, parts: int) -> None:
    ranges = split_range(n, parts)
    assert [i for r in ranges for i in r] == list(range(n))
    assert len(ranges) == parts
    lengths = [len(r) for r in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(deadline=None)
@given(
    n=st.integers(1, 40),
    dp=st.integers(1, 6),
    micro=st.integers(1, 5),
    size=st.integers(1, 15),
    epoch=st.integers(0, 3),
)
def test_every_sample_once_an_epoch(n: int, dp: int, micro: int, size: int, epoch: int) -> None:
    ranks = streams(n, dp, micro, batch_size=size)
    steps = ranks[0].steps_per_epoch
    counts: Counter[int] = Counter()
    for step in range(epoch * steps, (epoch + 1) * steps):
        batches = [s.batch(step) for s in ranks]
        assert len({b.samples for b in batches}) == 1
        whole = [i for part in seen(batches) for i in part]
        assert len(whole) == batches[0].samples
        assert whole == ranks[0].samples(step)  # the order of one rank alone
        counts.update(whole)
    assert counts == Counter(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 30), micro=st.integers(1, 4), size=st.integers(1, 12), step=st.integers(0, 10))
def test_micro_batches_do_not_depend_on_the_ranks(n: int, micro: int, size: int, step: int) -> None:
    one = seen([s.batch(step) for s in streams(n, 1, micro, batch_size=size)])
    for dp in (2, 3, 5):
        assert seen([s.batch(step) for s in streams(n, dp, micro, batch_size=size)]) == one


@settings(deadline=None)
@given(n=st.integers(1, 20), dp=st.integers(1, 6), micro=st.integers(1, 4), step=st.integers(0, 5))
def test_a_rank_without_samples_takes_part(n: int, dp: int, micro: int, step: int) -> None:
    for stream in streams(n, dp, micro, batch_size=5):
        for m in stream.batch(step).micros:
            assert len(m.input) == max(1, m.samples)
            assert torch.equal(m.target, -m.input)


def test_the_order_changes_with_epoch_and_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        [stream] = streams(50, 1, 1, batch_size=50, seed=seed)
        return stream.samples(epoch)

    orders = [order(seed, epoch) for seed in (0, 1, -3) for epoch in (0, 1, 2)]
    assert len({tuple(o) for o in orders}) == len(orders)
    assert order(1, 2) == order(1, 2)
    assert order(0, 0) != list(range(50))


def test_steps_can_be_requested_in_any_order() -> None:
    [stream] = streams(10, 1, 1)
    forward = [stream.samples(i) for i in range(9)]
    assert [stream.samples(i) for i in reversed(range(9))] == forward[::-1]
    assert [len(s) for s in forward[:4]] == [4, 4, 2, 4]
    assert stream.steps_per_epoch == 3


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Numbers(0), "the dataset is empty\n  rule:  at least one sample"),
        (iter([1]), "the dataset is a list_iterator"),
        (None, "the dataset is a NoneType"),
        ({1, 2}, "the dataset is a set"),
    ],
)
def test_invalid_datasets_are_refused(dataset: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        Stream(job(), dataset)


class Broken(Numbers):
    """Sample 2 cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 2:
            raise OSError("disk")
        return super().__getitem__(i)


def test_a_sample_that_raises_is_named() -> None:
    with pytest.raises(
        JobError, match=r"sample 2 of the dataset raised OSError: disk\n  where: .*test_stream.py, line"
    ):
        Stream(job(), Broken(4)).batch(0)


@pytest.mark.parametrize(
    ("dataset", "changes", "words"),
    [
        ([torch.zeros(1)] * 4, {}, "a batch is a Tensor\n  rule:  a batch is "),
        ([(1, 2, 3)] * 4, {}, "a batch is a list"),
        ([(1, 2)] * 4, {"collate": lambda samples: None}, "a batch is a NoneType"),
        ([(1, 2)] * 4, {"collate": lambda samples: 1 / 0}, "collating samples raised ZeroDivisionError"),
        ([(torch.zeros(i + 1), 1) for i in range(4)], {}, "collating samples raised RuntimeError: stack expects"),
        ([(object(), 1)] * 4, {}, "collating samples raised TypeError"),
    ],
)
def test_invalid_batches_are_refused(dataset: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Stream(job(**changes), dataset).batch(0)


def test_the_jobs_collate_function_is_used() -> None:
    own = job(collate=lambda samples: (len(samples), "target"))
    [micro] = Stream(own, Numbers(4)).batch(0).micros
    assert (micro.input, micro.target, micro.samples) == (4, "target", 4)


class Augmented(Numbers):
    """Samples with random augmentation of every kind."""

    def __getitem__(self, i: int) -> Any:
        noise = torch.rand(()).item(), random.random(), np.random.rand()
        return torch.tensor([float(i), *noise], dtype=torch.float64), i


def drawn(stream: Stream, step: int) -> dict[int, list[float]]:
    """The augmented samples of a step, by number."""
    rows = [row for m in stream.batch(step).micros for row in m.input[: m.samples].tolist()]
    return {int(row[0]): row[1:] for row in rows}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("loader", [False, True])
def test_random_augmentation_depends_on_the_sample_and_not_on_the_plan(micro: int, loader: bool) -> None:
    def made(dp: int, index: int, micro: int) -> Stream:
        data: Any = Augmented(11)
        return Stream(job(), DataLoader(data, batch_size=4) if loader else data, dp=dp, index=index, micro=micro)

    one = made(1, 0, 1)
    alone = [drawn(one, step) for step in range(4)]
    for ranks in (2, 3):
        parts = [made(ranks, index, micro) for index in range(ranks)]
        for step in range(4):
            together = {k: v for part in parts for k, v in drawn(part, step).items()}
            assert together == alone[step]
    assert drawn(made(1, 0, 1), 2) == alone[2], "found again from any step"
    noise = [tuple(v) for step in alone for v in step.values()]
    assert len(set(noise)) == len(noise), "every sample of every step draws its own"


def test_data_that_draws_nothing_is_loaded_once() -> None:
    class Counted(Numbers):
        reads = 0

        def __getitem__(self, i: int) -> Any:
            Counted.reads += 1
            return super().__getitem__(i)

    stream = Stream(job(), Counted(8))
    stream.batch(0), stream.batch(1)
    assert Counted.reads == 8 and not stream.source.draws


def test_an_evaluation_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(1), random.seed(1)
    stream = Stream(job(), Augmented(8))
    before = torch.get_rng_state(), random.getstate()
    stream.cut([0, 1, 2], 0)
    assert stream.source.draws
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_what_collate_draws_does_not_depend_on_the_batches_before() -> None:
    def mixed(samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]) * torch.rand(()), torch.tensor([y for _, y in samples])

    stream, resumed = (Stream(job(collate=mixed), Augmented(8)) for _ in range(2))
    batches = [stream.batch(step).micros[0].input for step in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[2], resumed.batch(1).micros[0].input)


@pytest.mark.parametrize("key", [np.int64, torch.tensor, str])
def test_a_number_that_comes_again_in_a_batch_draws_others(key: Any) -> None:
    class Keyed(Augmented):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(int(i))

    def drawn_by(dp: int) -> list[list[float]]:
        sampler: Any = [[key(i) for i in (3, 1, 3, 3)]]
        data: Any = Keyed(8)
        parts = [
            Stream(job(), DataLoader(data, batch_sampler=sampler), dp=dp, index=index).batch(0) for index in range(dp)
        ]
        return [row for part in parts for row in part.micros[0].input.tolist()]

    assert drawn_by(2) == drawn_by(1) and len({row[1] for row in drawn_by(1)}) == 4


def test_data_that_has_drawn_nothing_for_many_batches_is_no_longer_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WATCHED_LOADS", 2)
    stream = Stream(job(), Numbers(8))
    assert [stream.source.draws for step in range(3) if stream.batch(step)] == [None, False, False]
