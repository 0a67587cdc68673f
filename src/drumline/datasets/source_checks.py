"""Checks of a job's data: refuses, with the fix, data whose order or batches cannot be those of the whole job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from ..core.errors import JobError
from ..core.job import Job


def check_dataset(dataset: Any) -> Any:
    """Check that it is a map-style dataset with at least one sample."""
    has_items, has_length = hasattr(dataset, "__getitem__"), hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_items or not has_length:
        raise JobError(
            f"the dataset is a {type(dataset).__name__}" + (" without __len__" if has_items and not has_length else ""),
            rule="a map-style dataset has __len__ and __getitem__, so that its order can be a function of the seed",
            fix=_way_out(dataset, has_items=has_items),
        )
    if len(dataset) == 0:
        raise JobError("the dataset is empty", rule="at least one sample")
    return dataset


def _way_out(dataset: Any, *, has_items: bool) -> str:
    if has_items:
        return "give it a __len__ (the number of its samples), or make it an IterableDataset"
    if isinstance(dataset, Iterator):
        return "an iterator can be read only once: return a list, or an IterableDataset whose __iter__ makes it anew"
    return "a list, a Dataset, an IterableDataset, or a DataLoader of one of them"


def can_be_read_again(data: Any) -> bool:
    """Whether it is a stream without torch's base class, as other libraries have them."""
    plain = not hasattr(data, "__getitem__") and not hasattr(data, "__len__")
    return plain and isinstance(data, Iterable) and not isinstance(data, Iterator)


def one_collate(job: Job, loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """The collate function of a loader, or the job's."""
    own: Any = loader.collate_fn
    if job.collate is not None and own is not default_collate and own is not job.collate:
        name = getattr(own, "__name__", type(own).__name__)
        raise JobError(
            f"the job has a collate function, and its DataLoader another: {name}",
            rule="samples are collated by one function",
            fix="leave out Job.collate, or the DataLoader's collate_fn",
        )
    return job.collate or own


def refuse_loader(job: Job, loader: DataLoader[Any]) -> None:
    """Refuse, by name, a loader whose batches are not those of the whole job."""
    streams = isinstance(loader.dataset, IterableDataset)
    sampler = getattr(loader, "sampler", None)
    replicas = getattr(sampler, "num_replicas", 1)
    if isinstance(replicas, int) and replicas > 1:
        raise JobError(
            f"the DataLoader has a {type(sampler).__name__} for {replicas} ranks",
            rule="a job's data is the same on every rank; Drumline gives each rank its slice of every batch, and would "
            "slice what is a slice already",
            fix="leave the sampler out: DataLoader(dataset, batch_size=..., shuffle=True)",
        )
    if loader.batch_size is None and (streams or loader.batch_sampler is None):
        raise JobError(
            "the DataLoader has batch_size=None",
            rule="its batches are cut into micro-batches and over ranks by samples, which are then collated",
            fix=f"a dataset of single samples, and DataLoader(..., batch_size={job.batch_size})",
        )
    if loader.batch_size is not None and loader.batch_size != job.batch_size:
        raise JobError(
            f"the DataLoader has batch_size={loader.batch_size}, Job.batch_size is {job.batch_size}",
            rule="both count the samples of one optimizer step, over all ranks and micro-batches",
            fix=f"DataLoader(..., batch_size={job.batch_size}), or Job(..., batch_size={loader.batch_size})",
        )
