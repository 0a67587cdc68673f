"""A DataLoader's batches divided over the ranks, in the order and with the padding of Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate

from ..comm.environment import RankInfo, device_of
from ..core.errors import JobError


class RankBatches:
    """Every `size`-th batch of a batch sampler. A ragged last round is filled up from the first samples."""

    def __init__(self, batches: Any, where: RankInfo) -> None:
        self.batches, self.where = batches, where
        self.batch_size, self.drop_last = int(batches.batch_size), bool(batches.drop_last)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batches), self.where.size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        size, rank, round_size = self.where.size, self.where.rank, self.where.size * self.batch_size
        first: list[int] = []
        waiting: list[int] = []
        for i, batch in enumerate(self.batches):
            first += batch if i < size else []
            waiting += batch
            if len(waiting) == round_size:
                yield waiting[rank * self.batch_size : (rank + 1) * self.batch_size]
                waiting = []
        if not waiting or self.drop_last:
            return
        while len(waiting) < round_size:
            waiting += first[: round_size - len(waiting)]
        yield waiting[rank * self.batch_size : (rank + 1) * self.batch_size]


class PreparedLoader:
    """This rank's batches on its device. While the last one is used, `at_end` is true."""

    def __init__(self, loader: DataLoader[Any], where: RankInfo, *, place: bool = True, skip: int = 0) -> None:
        self.original, self._where, self._place, self._skip = loader, where, place, skip
        self.dataset, self.at_end = loader.dataset, False
        self._generator = _generator_of(loader)
        self._loader: Any = _sharded(loader, where)
        sampler: Any = loader.sampler
        samples = len(sampler) if hasattr(sampler, "__len__") else 0
        self.remainder = samples % (where.size * int(loader.batch_size or 1)) if not loader.drop_last else 0
        """Samples of the last round over all ranks, without those that fill it up; 0 if it is full."""

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._skip)

    @property
    def batch_size(self) -> int | None:
        """Samples of one rank's batch."""
        return self.original.batch_size

    @property
    def total_batch_size(self) -> int:
        """Samples of a round over all ranks."""
        return int(self.original.batch_size or 1) * self._where.size

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler and the dataset, where they have one."""
        for part in (self.original.sampler, self.original.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def skipping(self, batches: int) -> PreparedLoader:
        """The same loader without its first batches."""
        return PreparedLoader(self.original, self._where, place=self._place, skip=batches)

    def __iter__(self) -> Iterator[Any]:
        if self._generator is not None and self._where.size > 1:
            _share(self._generator, self._where)
        self.at_end = False
        held: list[Any] = []
        try:
            for i, batch in enumerate(self._loader):
                if i < self._skip:
                    continue
                if held:
                    yield held.pop()
                held.append(move(batch, device_of(self._where)) if self._place else batch)
            if held:
                self.at_end = True
                yield held.pop()
        finally:
            self.at_end = False


def _sharded(loader: DataLoader[Any], where: RankInfo) -> Iterable[Any]:
    """A loader of this rank's batches."""
    if isinstance(loader.dataset, IterableDataset):
        raise JobError(
            "prepare() of a DataLoader over an IterableDataset",
            rule="batches are divided over the ranks by their numbers",
            fix="a map-style dataset; or divide the stream by accelerator.process_index and leave it unprepared",
        )
    batches = loader.batch_sampler
    if where.size == 1:
        return loader
    if batches is None or getattr(batches, "batch_size", None) is None:
        raise JobError("prepare() of a DataLoader without batch_size", rule="every rank gets batches of one size")
    workers: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
    if loader.num_workers:
        workers |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader(
        loader.dataset,
        batch_sampler=RankBatches(batches, where),
        collate_fn=loader.collate_fn or default_collate,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        **workers,
    )


def _generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator of a shuffling sampler, which all ranks must share; a new one where it had none."""
    sampler: Any = loader.sampler
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _share(generator: torch.Generator, where: RankInfo) -> None:
    """Give every rank the state of rank 0's generator, so that all draw one order."""
    state = generator.get_state().to(device_of(where))
    dist.broadcast(state, src=0)
    generator.set_state(state.cpu())


def move(value: Any, device: torch.device) -> Any:
    """The same batch with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        moved = {key: move(v, device) for key, v in value.items()}
        return moved if type(value) is dict else _like(value, moved)
    if isinstance(value, tuple):
        parts = [move(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [move(v, device) for v in value]
    return value.to(device) if hasattr(value, "to") else value


def _like(value: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of the type of `value`: Hugging Face's BatchEncoding moves itself."""
    return type(value)(moved)
