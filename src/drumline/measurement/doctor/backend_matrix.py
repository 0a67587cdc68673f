"""Test of backends, devices and operations in separate processes, which may hang or die.

If an operation ends its process, the next ones run in a new one. An operation that took too long is tried once more
with a longer timeout before it is called broken: the machine may be busy.
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

from .operations import OPERATIONS, PAIRS, Operation
from .processes import ForkedRanks, TrialRanks, mpi_ranks, no_mpi, server
from .rank import JOIN

START = 30.0
"""Seconds for the ranks to join: a GPU and its libraries start slowly."""
TIMEOUTS = (2.0, 6.0)
"""Timeout of the backend in seconds, at the first and at the second try."""
_BAD = ("aborts", "hangs", "wrong", "refused")
"""Bad states, the worst first."""
_LATE = ("timeout", "timed out", "time out", "no answer within", "waited ")
"""Words of errors that a busy machine can cause."""


@dataclass(frozen=True, slots=True)
class BackendColumn:
    """A backend on a kind of device."""

    backend: str
    device: str
    ranks: int
    missing: str = ""
    """Why it is not tested, with a remedy; empty if it is."""

    def __str__(self) -> str:
        return f"{self.backend} {self.device}"


@dataclass(frozen=True, slots=True)
class OperationTrial:
    """Result of one operation of one column."""

    backend: str
    device: str
    operation: str
    state: str
    """ok, refused (an error, cleanly), wrong, hangs, aborts, not tried."""
    why: str = ""


def columns() -> list[BackendColumn]:
    """Backends and devices to test on this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    no_gloo = "" if dist.is_gloo_available() else "torch was built without gloo"
    tested = [
        BackendColumn("gloo", "cpu", 2, no_gloo),
        BackendColumn("shm", "cpu", 2),
        BackendColumn("mpi", "cpu", 2, no_mpi()),
    ]
    if gpus:
        no_nccl = "" if dist.is_nccl_available() else "torch was built without NCCL"
        tested += [BackendColumn("nccl", "cuda", min(2, gpus), no_nccl), BackendColumn("gloo", "cuda", 2, no_gloo)]
        tested += [BackendColumn("shm", "cuda", min(2, gpus), no_nccl)]
    return tested


def try_column(
    column: BackendColumn,
    *,
    on_trial: Callable[[OperationTrial], None] = lambda trial: None,
    seconds: float = 60.0,
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[OperationTrial]:
    """Test all operations; a column that takes longer than `seconds` is cut short."""
    if column.backend != "mpi" and not column.missing:
        server()
    end = time.monotonic() + seconds
    left = [name for name in operations if column.ranks > 1 or name not in PAIRS]
    results: list[OperationTrial] = []

    def note(name: str, state: str, why: str = "") -> None:
        results.append(OperationTrial(column.backend, column.device, name, state, why))
        on_trial(results[-1])

    for name in operations:
        if column.missing or name not in left:
            note(name, "not tried", column.missing or "one rank alone")
    timeout, later = TIMEOUTS
    while left and not column.missing:
        if time.monotonic() > end:
            for name in left:
                note(name, "not tried", f"the limit of {seconds:g} s was reached")
            break
        tried, again = _once(column, {name: operations[name] for name in left}, note, timeout, last=timeout == later)
        if not tried and not again:
            break  # the ranks do not even join: noted for all operations
        left, timeout = left[tried:], later if again else TIMEOUTS[0]
    return sorted(results, key=lambda trial: list(operations).index(trial.operation))


def _once(
    column: BackendColumn,
    operations: Mapping[str, Operation],
    note: Callable[[str, str, str], None],
    timeout: float,
    *,
    last: bool,
) -> tuple[int, bool]:
    """Start the ranks and test until all is done or an operation breaks them: the number of operations tested, and
    whether the next one deserves another try (never if this is the last)."""
    with tempfile.TemporaryDirectory(prefix="drumline-doctor-") as folder:
        names = list(operations)
        ranks: TrialRanks
        if column.backend == "mpi":
            ranks = mpi_ranks(folder, names, timeout)
        else:
            ranks = ForkedRanks(folder, column.backend, column.device, column.ranks, operations, timeout)
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
                state, why = watch.until(name, ranks, 2 * timeout)
                if not last and state in ("hangs", "refused") and any(word in why.lower() for word in _LATE):
                    return i, True
                note(name, state, why)
                if state in ("aborts", "hangs") or watch.disagree(name):
                    return i + 1, False
            watch.until(JOIN, ranks, timeout, last="done")
            return len(names), False
        finally:
            ranks.end()


class _Watch:
    """Reads the records of the ranks."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder, self._ranks = Path(folder), ranks

    def until(self, name: str, ranks: TrialRanks, seconds: float, *, last: str = "") -> tuple[str, str]:
        """Wait until each rank has finished an operation (or recorded `last` for it): the worst state, and why."""
        end = time.monotonic() + seconds
        while True:
            died = ranks.died()  # before reading, so that records written before the death are seen
            states = self._states(name, last)
            if len(states) == self._ranks:
                return next((s for bad in _BAD for s in states if s[0] == bad), ("ok", ""))
            if died:
                return "aborts", died
            if time.monotonic() > end:
                return "hangs", f"no answer within {seconds:g} s"
            time.sleep(0.01)

    def disagree(self, name: str) -> bool:
        """Whether the ranks ended an operation differently, and so may be out of step."""
        return len({state for state, _ in self._states(name)}) > 1

    def _states(self, name: str, last: str = "") -> list[tuple[str, str]]:
        states = []
        for rank in range(self._ranks):
            events = [e for e in self._events(rank) if e["operation"] == name and e["state"] != "begun"]
            events = [e for e in events if not last or e["state"] == last]
            if events:
                states.append((events[0]["state"], events[0]["why"]))
        return states

    def _events(self, rank: int) -> list[dict[str, str]]:
        file = self._folder / f"{rank}.jsonl"
        if not file.exists():
            return []
        # an unfinished line has no line end
        return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
