"""Backends, devices and operations, each combination tried in processes of its own, which may hang or die.

An operation that ends its process is found as such, and what stands after it is tried in a new one. What took too long
is tried a second time with more patience before it is called broken: the machine may be busy with other things.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .processes import Forked, Ranks, mpi_ranks, no_mpi, server
from .rank import JOIN
from .trials import OPERATIONS, PAIRS, Operation

START = 30.0
"""Seconds that ranks may take to join: a GPU and its libraries wake up slowly."""
PATIENCE = (2.0, 6.0)
"""Seconds after which a backend shall give up by itself, at the first try and at the second."""
_BAD = ("aborts", "hangs", "wrong", "refused")
"""States that are not ok, the worst first."""
_LATE = ("timeout", "timed out", "time out", "no answer within", "waited ")
"""Words of errors that a busy machine can be the cause of."""


@dataclass(frozen=True, slots=True)
class Column:
    """A backend on a kind of device."""

    backend: str
    device: str
    ranks: int
    missing: str = ""
    """Why it is not tried, and what helps; empty if it is."""

    def __str__(self) -> str:
        return f"{self.backend} {self.device}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one operation of one column."""

    backend: str
    device: str
    operation: str
    state: str
    """ok, refused (an error, cleanly), wrong, hangs, aborts, not tried."""
    why: str = ""


def columns() -> list[Column]:
    """What there is to be tried on this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gloo = "" if dist.is_gloo_available() else "torch was built without gloo"
    found = [Column("gloo", "cpu", 2, no_gloo), Column("shm", "cpu", 2), Column("mpi", "cpu", 2, no_mpi())]
    if gpus:
        no_nccl = "" if dist.is_nccl_available() else "torch was built without NCCL"
        found += [Column("nccl", "cuda", min(2, gpus), no_nccl), Column("gloo", "cuda", 2, no_gloo)]
        found += [Column("shm", "cuda", min(2, gpus), no_nccl)]
    return found


def try_column(
    column: Column,
    *,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    seconds: float = 60.0,
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[Trial]:
    """Try all operations; a column that takes longer than `seconds` is left where it stands."""
    if column.backend != "mpi" and not column.missing:
        server()
    end = time.monotonic() + seconds
    left = [name for name in operations if column.ranks > 1 or name not in PAIRS]
    results: list[Trial] = []

    def note(name: str, state: str, why: str = "") -> None:
        results.append(Trial(column.backend, column.device, name, state, why))
        on_trial(results[-1])

    for name in operations:
        if column.missing or name not in left:
            note(name, "not tried", column.missing or "one rank alone")
    patience, later = PATIENCE
    while left and not column.missing:
        if time.monotonic() > end:
            for name in left:
                note(name, "not tried", f"{seconds:g} s were over")
            break
        tried, again = _once(column, {name: operations[name] for name in left}, note, patience, last=patience == later)
        if not tried and not again:
            break  # the ranks do not even join: said for all operations
        left, patience = left[tried:], later if again else PATIENCE[0]
    return sorted(results, key=lambda trial: list(operations).index(trial.operation))


def _once(
    column: Column,
    operations: Mapping[str, Operation],
    note: Callable[[str, str, str], None],
    patience: float,
    *,
    last: bool,
) -> tuple[int, bool]:
    """One start of the ranks, until all is tried or something breaks them: how many operations were tried, and whether
    the next one is worth another try, which it never is after the last."""
    with tempfile.TemporaryDirectory(prefix="drumline-doctor-") as folder:
        names = list(operations)
        ranks: Ranks
        if column.backend == "mpi":
            ranks = mpi_ranks(folder, names, patience)
        else:
            ranks = Forked(folder, column.backend, column.device, column.ranks, operations, patience)
        watch = _Watch(folder, column.ranks)
        try:
            state, why = watch.until(JOIN, ranks, START)
            if state != "ok" and not last:
                return 0, True
            if state != "ok":
                for name in names:
                    note(name, state, why if state == "refused" else f"at the start of the group: {why}")
                return 0, False
            for i, name in enumerate(names):
                state, why = watch.until(name, ranks, 2 * patience)
                if not last and state in ("hangs", "refused") and any(word in why.lower() for word in _LATE):
                    return i, True
                note(name, state, why)
                if state in ("aborts", "hangs") or watch.apart(name):
                    return i + 1, False
            watch.until(JOIN, ranks, patience, last="done")
            return len(names), False
        finally:
            ranks.end()


class _Watch:
    """Reads what the ranks write down."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder, self._ranks = Path(folder), ranks

    def until(self, name: str, ranks: Ranks, seconds: float, *, last: str = "") -> tuple[str, str]:
        """Wait until every rank has ended an operation (or written `last` for it): the worst state, and why."""
        end = time.monotonic() + seconds
        while True:
            died = ranks.died()  # before reading: what was written before the death is then there
            states = self._states(name, last)
            if len(states) == self._ranks:
                return next((s for bad in _BAD for s in states if s[0] == bad), ("ok", ""))
            if died:
                return "aborts", died
            if time.monotonic() > end:
                return "hangs", f"no answer within {seconds:g} s"
            time.sleep(0.01)

    def apart(self, name: str) -> bool:
        """Whether the ranks ended an operation differently: they may be out of step."""
        return len({state for state, _ in self._states(name)}) > 1

    def _states(self, name: str, last: str = "") -> list[tuple[str, str]]:
        found = []
        for rank in range(self._ranks):
            events = [e for e in self._events(rank) if e["operation"] == name and e["state"] != "begun"]
            events = [e for e in events if not last or e["state"] == last]
            if events:
                found.append((events[0]["state"], events[0]["why"]))
        return found

    def _events(self, rank: int) -> list[dict[str, str]]:
        file = self._folder / f"{rank}.jsonl"
        if not file.exists():
            return []
        # A line that is still being written has no end.
        return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
