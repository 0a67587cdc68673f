"""Batches loaded ahead of time, by worker processes of torch's DataLoader: the same batches, in the same order.

A worker is asked for a step, not for samples: it loads what the stream would have loaded in the training thread. So a
run may be resumed at any step, with any number of workers, and changes nothing but the time it waits.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from ..core.errors import DrumlineError, GaveUp
from .stream import Batch, Stream

_AHEAD = 2
"""Batches that each worker has ready."""


class Loader:
    """`batch(step)`, as the stream has it, but loaded ahead where the job has workers."""

    def __init__(self, stream: Stream, *, workers: int = 0, pin: bool = False) -> None:
        self.stream, self.workers, self.pin = stream, workers, pin
        self._ahead: Iterator[_Parcel] | None = None
        self._next = -1

    def batch(self, step: int) -> Batch:
        """This rank's slice of the batch of a step. A step out of turn begins anew from there."""
        if not self.workers:
            return self.stream.batch(step)
        if self._ahead is None or step != self._next:
            self.close()
            self._ahead = self._start(step)
        try:
            parcel = next(self._ahead)
        except RuntimeError as e:
            self.close()
            raise GaveUp(
                f"a worker that loads data has died before step {step}",
                where=str(e).splitlines()[0],
                rule=f"all {self.workers} workers of a rank live as long as it",
                fix="`drumline doctor` shows the memory and /dev/shm, which they need; workers=0 loads without them",
            ) from e
        self._next = step + 1
        if parcel.error is not None:
            self.close()
            raise parcel.error
        assert parcel.batch is not None
        return parcel.batch

    def close(self) -> None:
        """End the workers; the next batch starts them again."""
        ahead, self._ahead, self._next = self._ahead, None, -1
        if ahead is not None:
            ahead._shutdown_workers()  # type: ignore[attr-defined]  # what its __del__ does, but now

    def _start(self, step: int) -> Iterator[_Parcel]:
        context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        loader = DataLoader(
            _Steps(self.stream),
            sampler=itertools.count(step),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=_AHEAD,
            pin_memory=self.pin,
            worker_init_fn=_end_with_the_rank,
            multiprocessing_context=context,
        )
        with _may_have_children(), _without_alarm(), _nothing_to_collect():
            return iter(loader)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """A worker that is forked here never collects what was there: a CUDA event that ends in a worker aborts it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What a worker sends: a batch, or the error that names the sample and the line."""

    batch: Batch | None = None
    error: DrumlineError | None = None

    def pin_memory(self) -> _Parcel:
        """Called by torch, in a thread of its own, where the batch goes to a CUDA device."""
        return self if self.batch is None else replace(self, batch=pinned(self.batch))


class _Steps(Dataset[_Parcel]):
    """The batches of a stream by step."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getitem__(self, step: int) -> _Parcel:
        try:
            return _Parcel(self.stream.batch(step))
        except DrumlineError as e:  # as it is: torch would make a text with a traceback of it
            return _Parcel(error=e.with_traceback(None))


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, from which a GPU copies while it computes."""
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


def _end_with_the_rank(worker: int) -> None:
    """Let the kernel end this worker when its rank dies, however that dies; Python's own watch looks every 5 s."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides


@contextmanager
def _may_have_children() -> Iterator[None]:
    """Ranks are daemons, so that they end with their launcher; Python forbids those to have children.

    Ours end with the rank (see above), which is what the rule is for.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # there is no other way
    daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            config["daemon"] = daemon


@contextmanager
def _without_alarm() -> Iterator[None]:
    """Without torch's signal handler, which raises amid whatever the rank is doing when a worker dies.

    `next` looks whether the workers live while it waits, and that is where the error belongs.
    """
    before, was_set = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = was_set
        assert signal.getsignal(signal.SIGCHLD) is before
