"""A barrier that names the ranks that did not come, through the store: it works when nothing else does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import torch.distributed as dist

from .errors import GroupGaveUp

_ROUND = 0.002
"""Seconds between two looks into the store."""


def monitored_barrier(
    store: dist.Store, key: str, rank: int, size: int, seconds: float, *, wait_all_ranks: bool = False
) -> None:
    """Rank 0 waits for all others and tells them how it went; `key` is another one for every barrier.

    The first missing rank ends the wait of rank 0, or with `wait_all_ranks` it looks for all of them.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        late = seconds <= 0
        missing = [] if late else list(islice(_missing(store, key, size, end), None if wait_all_ranks else 1))
        store.set(f"{key}/end", "rank 0 had no time" if late else ", ".join(f"rank {s}" for s in missing))
        # the words of torch's own, for programs that look for them
        if late:
            raise GroupGaveUp(f"Rank 0 timed out in monitoredBarrier after {seconds:g} s")
        if missing:
            who = f"Ranks {', '.join(map(str, missing))}" if len(missing) > 1 else f"Rank {missing[0]}"
            raise GroupGaveUp(f"{who} failed to pass monitoredBarrier in {seconds:g} s", rule="all ranks call it")
        return
    store.set(f"{key}/{rank}", "")
    if not _came(store, f"{key}/end", end):
        raise GroupGaveUp(f"rank {rank} reached the monitored barrier, rank 0 did not within {seconds:g} s")
    if missed := store.get(f"{key}/end").decode():
        raise GroupGaveUp(f"rank {rank} reached the monitored barrier, others did not: {missed}")


def _missing(store: dist.Store, key: str, size: int, end: float) -> Iterator[int]:
    return (s for s in range(1, size) if not _came(store, f"{key}/{s}", end))


def _came(store: dist.Store, key: str, end: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(_ROUND)
    return True
