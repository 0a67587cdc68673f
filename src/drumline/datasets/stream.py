"""The global order of samples, and the slice of it that one rank trains on.

The batch of a step is cut into micro-batches, and each micro-batch over the data-parallel ranks. So the samples of a
step and of a micro-batch do not depend on the number of ranks. The last batch of an epoch may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..core.job import Job
from ..torchkit.fake_tensors import with_real_tensors
from .batch_form import as_pair
from .seeding import seeded_random
from .sources import MapSource, open_source


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
        self.job, self.dp, self.index, self.micro = job, dp, index, micro
        self.dataset = dataset

    @property
    def dataset(self) -> Any:
        """The object that the job's `data()` returned. Another one may take its place."""
        return self._dataset

    @dataset.setter
    @with_real_tensors()
    def dataset(self, dataset: Any) -> None:
        self._dataset, self.source = dataset, open_source(self.job, dataset)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data, which is map-style."""
        assert isinstance(self.source, MapSource)
        return self.source.steps_per_pass

    @property
    def workers(self) -> int:
        """Processes that load batches ahead: as many as the job says, else as the data says."""
        workers = self.job.workers or self.source.workers
        return workers if self.source.most_workers is None else min(workers, self.source.most_workers)

    @with_real_tensors()
    def samples(self, step: int) -> list[int]:
        """The sample numbers of a step, the same on every rank and under every plan."""
        return self.source.samples(step)

    def batch(self, step: int) -> RankBatch:
        """This rank's slice of the batch of a step.

        Random augmentation of a sample depends on seed, step and sample alone. What `collate` draws depends on the rank
        too, because it gets this rank's samples.
        """
        with seeded_random(self.job.seed, step, self.index):
            batch = self.cut(self.samples(step), step)
        if isinstance(self.source, MapSource) and self.source.prepares:
            self.source.prepare([i for _, _, chosen, _ in self._slices(self.samples(step + 1)) for i in chosen])
        return batch

    def cut(self, samples: Sequence[int], step: int) -> RankBatch:
        """Cut a list of sample numbers into micro-batches, and take this rank's slice of each."""
        micros = []
        for part, first, chosen, own in self._slices(samples):
            value, target = as_pair(self.source.load(chosen, self.job.seed, step, before=samples[:first]))
            micros.append(RankMicroBatch(value, target, own, len(part)))
        return RankBatch(step, tuple(micros), len(samples))

    def _slices(self, samples: Sequence[int]) -> Iterator[tuple[range, int, list[int], int]]:
        """For each micro-batch: its places in the batch, the first of this rank, its samples, and how many count."""
        for part in split_range(len(samples), self.micro):
            if part:
                own = split_range(len(part), self.dp)[self.index]
                chosen = own if own else range(1)
                first = part.start + chosen.start
                yield part, first, list(samples[first : first + len(chosen)]), len(own)
