"""Batches loaded ahead by the worker processes of torch's DataLoader: the same batches, in the same order.

A worker is asked for a step, not for samples: it loads what the stream would have loaded in the training thread. So a
run can resume at any step, with any number of workers; only the waiting time changes.
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..core.errors import DrumlineError, GaveUp
from ..torchkit.data_workers import end_workers, without_sigchld_handler
from .child_processes import end_with_parent
from .stream import RankBatch, Stream

_AHEAD = 2
"""Batches that each worker prepares ahead."""


class Loader:
    """`batch(step)`, as of the stream, loaded ahead where the job has workers."""

    def __init__(self, stream: Stream, *, workers: int | None = None, pin: bool = False) -> None:
        self.stream, self.workers, self.pin = stream, stream.workers if workers is None else workers, pin
        self._ahead: Iterator[Parcel] | None = None
        self._next = -1

    def batch(self, step: int) -> RankBatch:
        """This rank's slice of the batch of a step. A step out of order restarts the workers there."""
        if not self.workers:
            return self.stream.batch(step)
        if self._ahead is None or step != self._next:
            self.close()
            self._ahead = self._start(step)
        try:
            batch = next_parcel(self._ahead, step, self.workers).result()
        except DrumlineError:
            self.close()
            raise
        self._next = step + 1
        return batch

    def close(self) -> None:
        """End the workers; the next batch starts them again."""
        ahead, self._ahead, self._next = self._ahead, None, -1
        if ahead is not None:
            end_workers(ahead)

    def _start(self, step: int) -> Iterator[Parcel]:
        prefetch = self.stream.source.prefetch or _AHEAD
        return start_workers(self.stream, itertools.count(step), workers=self.workers, prefetch=prefetch, pin=self.pin)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_workers(
    stream: Stream, order: Iterable[int | None], *, workers: int, prefetch: int, pin: bool
) -> Iterator[Parcel]:
    """The batches of the steps in `order`, which worker processes load; each prepares `prefetch` of them ahead."""
    context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    loader = DataLoader(
        _Steps(stream),
        sampler=order,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin,
        worker_init_fn=functools.partial(_begin_worker, stream.source.worker_init),
        multiprocessing_context=context,
    )
    with _allow_children(), without_sigchld_handler(), _frozen_heap():
        return iter(loader)


def next_parcel(parcels: Iterator[Parcel], step: int, workers: int) -> Parcel:
    """The next answer of the worker processes, read for some step."""
    try:
        return next(parcels)
    except RuntimeError as e:
        raise GaveUp(
            f"a data-loading worker died before step {step}",
            where=str(e).splitlines()[0],
            rule=f"all {workers} workers of a rank live as long as the rank",
            fix="`drumline doctor` shows memory and /dev/shm, which workers need; workers=0 loads without them",
        ) from e


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep forked workers from collecting the rank's objects: a CUDA event that is freed in a worker aborts it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class Parcel:
    """A worker's answer: a batch, the error that names the sample and the line, or nothing if nothing was asked for."""

    batch: RankBatch | None = None
    error: DrumlineError | None = None

    def result(self) -> RankBatch:
        """The batch; raises the error, if it is one."""
        if self.error is not None:
            raise self.error
        assert self.batch is not None
        return self.batch

    def pin_memory(self) -> Parcel:
        """Called by torch, in a thread of its own, if the batch goes to a CUDA device."""
        return self if self.batch is None else replace(self, batch=pin_batch(self.batch))


class _Steps(Dataset[Parcel]):
    """A dataset of batches, indexed by step."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getitem__(self, step: int | None) -> Parcel:
        try:
            return Parcel(None if step is None else self.stream.batch(step))
        except DrumlineError as e:  # unchanged: torch would turn it into text with a traceback
            return Parcel(error=e.with_traceback(None))


def pin_batch(batch: RankBatch) -> RankBatch:
    """The batch in page-locked memory, which a GPU reads while it computes."""
    micros = [replace(m, input=_pin(m.input), target=_pin(m.target)) for m in batch.micros]
    return replace(batch, micros=tuple(micros))


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {k: _pin(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        moved = [_pin(v) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def _begin_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Begin a worker process: with the user's `worker_init_fn`, if there is one."""
    _end_with_rank()
    if init is not None:
        init(worker)


def _end_with_rank() -> None:
    """Let the operating system end this worker when its rank dies in any way; Python checks only every 5 s."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides


@contextmanager
def _allow_children() -> Iterator[None]:
    """Allow child processes: ranks are daemons, which Python forbids to have any.

    The rule exists so that children end with their parent; these do (see above).
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # has no public setter
    daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            config["daemon"] = daemon
