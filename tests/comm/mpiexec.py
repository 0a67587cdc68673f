"""Ranks started by a real mpiexec: `run("Open MPI", 3, "contract")` runs named checks of mpi_ranks.py in one start.

Open MPI comes with `pip install 'drumline[test]'`. MPICH's files have the same names, so it stands in a folder of its
own: `pip install --prefix .venv/mpich --no-deps mpich`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PREFIX = Path(sys.prefix)
NAMES = ("Open MPI", "MPICH")
_LEAVE_OUT = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MASTER_", "GLOO_", "DRUMLINE_")


def command(name: str, n: int) -> tuple[list[str], dict[str, str]]:
    """The command line and environment for n ranks; skips the test if this MPI is absent."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install 'drumline[mpi]'")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LEAVE_OUT)}
    env = {**inherited, "OMP_NUM_THREADS": "1"}
    if name == "Open MPI":
        mpiexec = PREFIX / "bin" / "mpiexec"
        options = ["--allow-run-as-root", "--oversubscribe"]
        env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        there = (PREFIX / "lib" / "libmpi.so.40").exists()
    else:
        mpiexec, options = PREFIX / "mpich" / "bin" / "mpiexec", []
        library = PREFIX / "mpich" / "lib" / "libmpi.so.12"
        env["MPI4PY_LIBMPI"] = str(library)
        there = library.exists()
    if not (mpiexec.exists() and there):
        pytest.skip(f"{name} is not installed next to this Python")
    return [str(mpiexec), *options, "-n", str(n)], env


def start(
    name: str, n: int, *arguments: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python command line on n ranks."""
    argv, env = command(name, n)
    with _one_at_a_time():
        before = set(_segments())
        done = subprocess.run(
            [*argv, sys.executable, *arguments],
            env={**env, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        end = time.monotonic() + 3.0
        while done.returncode and (left := set(_segments()) - before) and time.monotonic() < end:
            for segment in left:
                _remove_if_orphan(segment)
            time.sleep(0.05)  # an aborted rank may still be ending
    return done


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Serialise the tests of all processes: leftover shared memory is removed, and must not belong to another test."""
    with open(Path(tempfile.gettempdir()) / f"drumline-mpiexec-{os.getuid()}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _segments() -> list[Path]:
    return [*Path("/dev/shm").glob("mpich_shm_*"), *Path("/dev/shm").glob("sm_segment.*")]


def _remove_if_orphan(segment: Path) -> None:
    """Remove shared memory that an aborted MPI left behind, but not that of other programs."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(segment) in maps.read_text():
                return
        except OSError:
            continue
    segment.unlink(missing_ok=True)


def run(name: str, n: int, folder: Path, *checks: str, **variables: str) -> None:
    """Run checks of mpi_ranks.py by name; fail with the output of the first rank that failed."""
    done = start(name, n, str(HERE / "mpi_ranks.py"), str(folder), *checks, **variables)
    output = done.stdout[-4000:] + done.stderr[-4000:]
    for rank in range(n):
        file = folder / f"{rank}.json"
        assert file.exists(), f"rank {rank} wrote no results; mpiexec ended with {done.returncode}\n{output}"
        results = json.loads(file.read_text())
        assert results == dict.fromkeys(checks, "ok"), "\n".join([*results.values(), output])
    assert done.returncode == 0, output
