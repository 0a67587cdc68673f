"""Where samples come from, and in which order: a map-style dataset, a DataLoader of the user's, or a stream.

The order of a source is the same on every rank and under every plan; each rank loads its slice of it. A map-style
dataset is permuted by (seed, epoch). A DataLoader's batch sampler, and an IterableDataset, are read from their
beginning on every rank, one batch of the whole job after the other; so a step is found again by reading up to it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ..core.errors import JobError
from ..core.job import Job, call_user_code
from .seeding import RandomStates, key_number, mix_seed, seeded_random
from .source_checks import can_be_read_again, check_dataset, one_collate, refuse_loader

WATCHED_LOADS = 64
"""Batches, or parts of them, after which data that has drawn no random number is taken to draw none: each comparison
takes a tenth of a millisecond or two."""


class DataSource(ABC):
    """The global batches of a job's data, as sample numbers, and the samples themselves."""

    name: str
    """For the user, such as `DataLoader(RandomSampler)`."""
    length: int | None = None
    """Samples in one pass, if that is known."""
    workers = 0
    """Processes that the data itself asks for."""
    most_workers: int | None = None
    """No more than these can load it."""
    prefetch: int | None = None
    """Batches that each worker loads ahead."""
    worker_init: Callable[[int], None] | None = None
    """Called in each worker with its number."""

    draws: bool | None = None
    """Whether samples draw random numbers; None until one has, or `WATCHED_LOADS` have not."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate
        self._loads = 0

    @abstractmethod
    def samples(self, step: int) -> list[int]:
        """The sample numbers of a step."""

    @abstractmethod
    def sample(self, number: int) -> Any:
        """A sample; for a stream, one of the batch asked for last."""

    @abstractmethod
    def one_pass(self) -> Iterator[list[int]]:
        """Batches in which every sample comes once, for an evaluation."""

    @property
    def steps_per_pass(self) -> int | None:
        """Batches in one pass, if that is known."""
        return None

    def first_sample(self) -> Any:
        """A sample, for shapes and types."""
        return self.sample(self.samples(0)[0])

    def collate(self, samples: list[Any]) -> Any:
        """Samples -> a batch, by the user's own function or torch's."""
        return call_user_code(self._collate or default_collate, "collating samples", samples)

    def load(self, numbers: list[int], *seed: int, before: Sequence[int] = ()) -> Any:
        """The batch of these samples. What one draws at random depends on `seed` and its number alone.

        So it does not matter which samples a rank loads together: a plan trains on what one device would. A number that
        comes again in a batch, also after those `before`, draws others.
        """
        samples = [] if self.draws else self.watched(lambda: [self.sample(i) for i in numbers])
        return self.collate(self._drawn(numbers, seed, before) if self.draws else samples)

    def watched(self, load: Callable[[], Any]) -> Any:
        """Load something; if that draws random numbers, set `draws` and return to the state before."""
        if self.draws is not None:
            return load()
        states = RandomStates()
        loaded, self._loads = load(), self._loads + 1
        if states.have_changed():
            states.restore()
            self.draws = True
        elif self._loads == WATCHED_LOADS:
            self.draws = False
        return loaded

    def _drawn(self, numbers: list[int], seed: tuple[int, ...], before: Sequence[int]) -> list[Any]:
        """The samples, each with random numbers of its own."""
        samples, seen = [], Counter(map(key_number, before))
        for i in numbers:
            key = key_number(i)
            with seeded_random(*seed, key, seen[key]):
                samples.append(self.sample(i))
            seen[key] += 1
        return samples


class MapSource(DataSource):
    """A map-style dataset, permuted by (seed, epoch)."""

    name = "shuffled"

    def __init__(self, job: Job, dataset: Any) -> None:
        super().__init__(job.collate)
        self._dataset, self._seed, self._size = check_dataset(dataset), job.seed, job.batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @property
    def length(self) -> int:  # type: ignore[override]  # a dataset may grow
        """Samples in one pass."""
        return len(self._dataset)

    @property
    def steps_per_pass(self) -> int:
        return -(-self.length // self._size)

    def samples(self, step: int) -> list[int]:
        epoch, position = divmod(step, self.steps_per_pass)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._order = epoch, self._epoch_order(generator)
        start = position * self._size
        numbers: list[int] = self._order[start : start + self._size].tolist()
        return numbers

    def _epoch_order(self, generator: torch.Generator) -> torch.Tensor:
        """A permutation of the samples; packed data may choose one that is quicker to read."""
        own = getattr(self._dataset, "epoch_order", None)
        return torch.randperm(self.length, generator=generator) if own is None else own(generator)

    def load(self, numbers: list[int], *seed: int, before: Sequence[int] = ()) -> Any:
        """The batch of these samples. Packed data that draws no random numbers reads and collates it at once."""
        collated = getattr(self._dataset, "collated", None)
        if self._collate is None and collated is not None and not self.draws:

            def load() -> Any:
                return call_user_code(collated, f"loading {len(numbers)} samples from {numbers[0]} on", numbers)

            batch = self.watched(load) if getattr(self._dataset, "runs_user_code", False) else load()
            if not self.draws:
                return batch
        return super().load(numbers, *seed, before=before)

    @property
    def prepares(self) -> bool:
        """Whether the data can begin to read samples before they are needed."""
        return hasattr(self._dataset, "prefetch")

    def prepare(self, numbers: list[int]) -> None:
        """Begin to read samples that are needed next."""
        self._dataset.prefetch(numbers)

    def sample(self, number: int) -> Any:
        return call_user_code(self._dataset.__getitem__, f"sample {number} of the dataset", number)

    def first_sample(self) -> Any:
        return self.sample(0)

    def one_pass(self) -> Iterator[list[int]]:
        whole, parts = range(self.length), self.steps_per_pass
        size, extra = divmod(len(whole), parts)
        start = 0
        for i in range(parts):
            stop = start + size + (i < extra)
            yield list(whole[start:stop])
            start = stop


class _Cursor:
    """Reads the batches of pass after pass in order; an earlier one is found by starting again."""

    def __init__(self, name: str, seed: int, begin: Callable[[int], Iterator[list[Any]]]) -> None:
        self._name, self._seed, self._begin = name, seed, begin
        self._batches: Iterator[list[Any]] | None = None
        self._pass, self._last, self._batch = 0, -1, [None]

    def at(self, step: int) -> list[Any]:
        """The batch of a step."""
        if self._batches is None or step < self._last:
            self._pass, self._last = 0, -1
            self._batches = self._begun(0)
        while self._last < step:
            self._last += 1
            self._batch = self._following()
        return self._batch

    def one_pass(self) -> Iterator[list[Any]]:
        """The batches of the first pass."""
        batches = self._begun(0)
        for i in itertools.count():
            with seeded_random(self._seed, i):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _following(self) -> list[Any]:
        """The next batch, of the next pass if this one is over. Random numbers depend on (seed, step) alone."""
        assert self._batches is not None
        for _ in range(2):
            with seeded_random(self._seed, self._last):
                batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._pass += 1
            self._batches = self._begun(self._pass)
        raise JobError(f"the {self._name} is empty", rule="at least one batch in each pass over it")

    def _begun(self, number: int) -> Iterator[list[Any]]:
        with seeded_random(self._seed, number):
            return self._begin(number)


class LoaderSource(DataSource):
    """A DataLoader of the user's over a map-style dataset: its batch sampler gives the order of the whole job."""

    def __init__(self, job: Job, loader: DataLoader[Any]) -> None:
        super().__init__(one_collate(job, loader))
        refuse_loader(job, loader)
        self._dataset, self._size = loader.dataset, job.batch_size
        self._sampler: Any = loader.batch_sampler
        inner = getattr(self._sampler, "sampler", None)
        own = type(self._sampler) is torch.utils.data.BatchSampler and inner is not None
        self.name = f"DataLoader({type(inner if own else self._sampler).__name__})"
        self.length = len(self._dataset) if hasattr(self._dataset, "__len__") else None
        self.workers, self.prefetch, self.worker_init = (
            loader.num_workers,
            loader.prefetch_factor,
            loader.worker_init_fn,
        )
        self._parts = [part for part in (loader, self._sampler, inner) if part is not None]
        self._generators = _generators(self._parts)
        self._cursor = _Cursor(self.name, job.seed, self._begin)
        self._refuse_another_order()

    def samples(self, step: int) -> list[int]:
        return self._checked(self._cursor.at(step))

    def sample(self, number: int) -> Any:
        dataset: Any = self._dataset
        return call_user_code(dataset.__getitem__, f"sample {number} of the dataset", number)

    def one_pass(self) -> Iterator[list[int]]:
        return map(self._checked, self._cursor.one_pass())

    def _begin(self, number: int) -> Iterator[list[Any]]:
        """Begin a pass, as a loop over epochs would: `set_epoch`, and generators seeded for this pass."""
        for part in self._parts[1:]:
            if hasattr(part, "set_epoch"):
                part.set_epoch(number)
        for generator, seed in self._generators:
            generator.manual_seed(mix_seed(seed, number))
        batches = iter(call_user_code(lambda: self._sampler.__iter__(), f"the sampler of the {self.name}"))
        return map(list, batches)

    def _checked(self, batch: list[int]) -> list[int]:
        if len(batch) > self._size:
            raise JobError(
                f"the {self.name} gives a batch of {len(batch)} samples, Job.batch_size is {self._size}",
                rule="Job.batch_size is the largest batch of all ranks together: plans are predicted with it",
                fix=f"batch_size={len(batch)}, or smaller batches from the sampler",
            )
        return batch

    def _refuse_another_order(self) -> None:
        first, again = (next(self._cursor.one_pass(), None) for _ in range(2))
        if first is None:
            raise JobError(f"the {self.name} is empty", rule="at least one batch in each pass over it")
        if first != again:
            raise JobError(
                f"the {self.name} gives another order each time: first {_few(first)}, then {_few(again or [])}",
                rule="every rank, and a run that resumes, reads the order of an epoch again, and must find the same",
                fix="draw its random numbers from torch, numpy or random (Drumline seeds them), from a torch.Generator "
                "that is an attribute of the sampler, or seed them in set_epoch(epoch)",
            )


class StreamSource(DataSource):
    """An IterableDataset: every rank reads the whole stream, and keeps its slice of each batch."""

    most_workers = 1
    """One process reads a stream in order; more would each read all of it."""

    def __init__(self, job: Job, stream: Any, loader: DataLoader[Any] | None = None) -> None:
        super().__init__(one_collate(job, loader) if loader is not None else job.collate)
        if loader is not None:
            refuse_loader(job, loader)
            self.workers, self.prefetch = min(1, loader.num_workers), loader.prefetch_factor
            self.worker_init = loader.worker_init_fn
        self._drops_last = loader is not None and loader.drop_last
        self._stream, self._size = stream, job.batch_size
        self.name = type(stream).__name__
        self._cursor = _Cursor(self.name, job.seed, self._begin)
        self._batch: list[Any] = []

    def samples(self, step: int) -> list[int]:
        self._batch = self._cursor.at(step)
        return list(range(len(self._batch)))

    def sample(self, number: int) -> Any:
        return self._batch[number]

    def one_pass(self) -> Iterator[list[int]]:
        for batch in self._cursor.one_pass():
            self._batch = batch
            yield list(range(len(batch)))

    def first_sample(self) -> Any:
        first: list[Any] | None = next(self._cursor.one_pass(), None)
        if first is None:
            raise JobError(f"the {self.name} is empty", rule="at least one batch in each pass over it")
        return first[0]

    def _begin(self, number: int) -> Iterator[list[Any]]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(number)
        items = call_user_code(lambda: iter(self._stream), f"iter() of the {self.name}")
        return self._cut(items, number)

    def _cut(self, items: Iterator[Any], number: int) -> Iterator[list[Any]]:
        def following(n: int) -> list[Any]:
            return call_user_code(lambda: list(itertools.islice(items, n)), f"the {self.name} in pass {number}")  # type: ignore[no-any-return]  # a list

        while batch := following(self._size):
            if len(batch) < self._size and self._drops_last:
                return
            yield batch


def open_source(job: Job, data: Any) -> DataSource:
    """The source of what a job's `data()` or `validation()` returned."""
    if isinstance(data, DataSource):
        return data
    if isinstance(data, DataLoader):
        return (
            StreamSource(job, data.dataset, data)
            if isinstance(data.dataset, IterableDataset)
            else LoaderSource(job, data)
        )
    if isinstance(data, IterableDataset) or can_be_read_again(data):
        return StreamSource(job, data)
    return MapSource(job, data)


def load_data(job: Job) -> Any:
    """Call the job's `data()`, with random numbers that depend on the seed alone: every rank gets the same."""
    with seeded_random(job.seed):
        return call_user_code(job.data, "the job's data()")


def load_validation(job: Job) -> Any:
    """Call the job's `validation()` in the same way."""
    assert job.validation is not None
    with seeded_random(job.seed):
        return call_user_code(job.validation, "the job's validation()")


def open_data(job: Job) -> DataSource:
    """The source of the job's training data."""
    return open_source(job, load_data(job))


def _generators(parts: Sequence[Any]) -> list[tuple[torch.Generator, int]]:
    """The generators that a loader and its samplers hold, each with the seed that it was given."""
    generators: dict[int, torch.Generator] = {}
    for part in parts:
        for value in getattr(part, "__dict__", {}).values():  # a list of batches has none
            if isinstance(value, torch.Generator):
                generators[id(value)] = value
    return [(generator, generator.initial_seed()) for generator in generators.values()]


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
