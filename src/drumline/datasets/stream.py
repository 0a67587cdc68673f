"""The global order of samples, and the slice of it that one rank trains on.

The batch of a step is cut into micro-batches, and each micro-batch over the data-parallel ranks. So the samples of a
step and of a micro-batch do not depend on the number of ranks. The last batch of an epoch may be shorter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from ..core.errors import JobError
from ..core.job import Job, call_user_code


@dataclass(frozen=True, slots=True)
class RankMicroBatch:
    """One rank's slice of one micro-batch."""

    input: Any
    target: Any
    samples: int
    """Samples of this rank. A rank with none runs one sample with weight 0, so that all ranks take part."""
    total: int
    """Samples of all ranks."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's slice of one step's batch, micro-batch by micro-batch."""

    step: int
    micros: tuple[RankMicroBatch, ...]
    samples: int
    """Samples of all ranks and micro-batches."""


def split_range(n: int, parts: int) -> list[range]:
    """Split 0 .. n-1 into `parts` contiguous ranges whose lengths differ by at most one, longer ones first."""
    size, extra = divmod(n, parts)
    starts = [i * size + min(i, extra) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


class Stream:
    """The batches of a job, for one of `dp` data-parallel ranks."""

    def __init__(self, job: Job, dataset: Any, *, dp: int = 1, index: int = 0, micro: int = 1) -> None:
        self.dataset = check_dataset(dataset)
        self.job, self.dp, self.index, self.micro = job, dp, index, micro
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.dataset) // self.job.batch_size)

    def samples(self, step: int) -> list[int]:
        """The sample numbers of a step, the same on every rank and under every plan."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self.job.seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._order = epoch, self._epoch_order(generator)
        start = position * self.job.batch_size
        numbers: list[int] = self._order[start : start + self.job.batch_size].tolist()
        return numbers

    def _epoch_order(self, generator: torch.Generator) -> torch.Tensor:
        """A permutation of the samples; packed data may choose one that is quicker to read."""
        own = getattr(self.dataset, "epoch_order", None)
        return torch.randperm(len(self.dataset), generator=generator) if own is None else own(generator)

    def batch(self, step: int) -> RankBatch:
        """This rank's slice of the batch of a step. Random augmentation depends on (seed, step, rank) alone."""
        with seeded_random(self.job.seed, step, self.index):
            batch = self.cut(self.samples(step), step)
        if (prefetch := getattr(self.dataset, "prefetch", None)) is not None:
            prefetch([i for _, chosen, _ in self._slices(self.samples(step + 1)) for i in chosen])
        return batch

    def cut(self, samples: Sequence[int], step: int) -> RankBatch:
        """Cut a list of sample numbers into micro-batches, and take this rank's slice of each."""
        micros = []
        for part, chosen, own in self._slices(samples):
            value, target = self._load(chosen)
            micros.append(RankMicroBatch(value, target, own, len(part)))
        return RankBatch(step, tuple(micros), len(samples))

    def _slices(self, samples: Sequence[int]) -> Iterator[tuple[range, list[int], int]]:
        """For each micro-batch: its places in the batch, the samples that this rank loads, and how many count."""
        for part in split_range(len(samples), self.micro):
            if part:
                own = split_range(len(part), self.dp)[self.index]
                yield part, [samples[part[i]] for i in own] or [samples[part[0]]], len(own)

    def _load(self, chosen: list[int]) -> tuple[Any, Any]:
        """The collated samples. Packed data reads and collates a batch at once."""
        if self.job.collate is None and (collated := getattr(self.dataset, "collated", None)) is not None:
            batch = call_user_code(collated, f"loading {len(chosen)} samples from {chosen[0]} on", chosen)
            return as_pair(batch)
        return collate(self.job, [self._sample(i) for i in chosen])

    def _sample(self, i: int) -> Any:
        return call_user_code(self.dataset.__getitem__, f"sample {i} of the dataset", i)


@contextmanager
def seeded_random(*numbers: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's random numbers from `numbers`, around the loading of samples.

    So a batch is the same whichever process loads it, and however often. Afterwards the generators of torch and Python
    are restored; restoring numpy's would take ten times as long as all the rest, and the engine does not seed it.
    """
    seed = mix_seed(*numbers)
    states = torch.get_rng_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # datasets use the legacy interface
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])


def mix_seed(*numbers: int) -> int:
    """Mix a list of numbers into one seed."""
    seed = 0
    for n in numbers:
        seed = (seed * 6364136223846793005 + n + 1442695040888963407) % 2**63
    return seed


def check_dataset(dataset: Any) -> Any:
    """Check that it is a map-style dataset with at least one sample."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise JobError(
            f"the dataset is a {type(dataset).__name__}",
            rule="a map-style dataset has __len__ and __getitem__, so that its order can be a function of the seed",
        )
    if len(dataset) == 0:
        raise JobError("the dataset is empty", rule="at least one sample")
    return dataset


def collate(job: Job, samples: list[Any]) -> tuple[Any, Any]:
    """Samples -> (input, target), by the job's own function or torch's."""
    return as_pair(call_user_code(job.collate or default_collate, "collating samples", samples))


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (input, target)."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise JobError(f"a batch is a {type(batch).__name__}", rule="samples and batches are pairs (input, target)")
    return batch[0], batch[1]
