"""This rank's number and how to reach the others, from the environment variables of the launcher.

Supported: Drumline's own launcher, torchrun, Slurm's srun, Open MPI's and MPICH's mpiexec; without one there is one
rank. Under mpiexec with mpi4py, MASTER_ADDR is not needed: the ranks find each other through MPI.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ..core.errors import DrumlineError, InputError
from ..torchkit.process_groups import own_store
from .heartbeat import start_heartbeat, stop_heartbeat
from .malloc_settings import keep_freed_memory
from .rank_status import STATUS, rank_status

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
"""By launcher, the variables of rank, size and local rank; the first launcher whose variables are set counts."""

MPI_LAUNCHERS = ("Open MPI", "MPICH")
"""Launchers whose ranks can find each other through MPI."""

_LOCAL_SIZES = {
    "torchrun": "LOCAL_WORLD_SIZE",
    "Slurm": "SLURM_NTASKS_PER_NODE",
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPICH": "MPI_LOCALNRANKS",
}
"""By launcher, the variable with the number of ranks on this host."""

CHECKED_GLOO = "checked_gloo"
"""The backend that is gloo with calls compared between ranks (process_group/gloo_group.py)."""
CHECK_CALLS = "DRUMLINE_CHECK_CALLS"
"""The variable that, set to 0, gives gloo groups without comparison of the ranks' calls."""
STORE = "DRUMLINE_STORE"
"""The variable with the file store of Drumline's own launcher: no port is opened."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process, and the launcher that started it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""
    """Empty if there is none."""


def rank_info(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and size from the environment; refuse inconsistent values."""
    env = os.environ if environment is None else environment
    for launcher, (rank, size, local) in _LAUNCHERS.items():
        if launcher == "Slurm" and "SLURM_STEP_ID" not in env:
            continue  # inside an allocation, but not started by srun
        if rank in env and size in env:
            r, n, i = _integer(env, rank), _integer(env, size), _integer(env, local if local in env else rank)
            if r >= n:
                raise InputError(f"{rank}={r} and {size}={n}", where="environment", rule=f"{rank} < {size}")
            return RankInfo(r, n, i, launcher)
    return RankInfo()


def device_of(where: RankInfo) -> torch.device:
    """The device of this rank: its own GPU if there are any, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", where.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def connect(*, backend: str = "auto", timeout: float = 300.0) -> RankInfo:
    """Join the process group, unless the caller already has one. A single rank has a group too."""
    where = rank_info()
    device = device_of(where)
    if device.type == "cpu":
        keep_freed_memory(_ranks_on_host(where))
    if dist.is_initialized():
        _check_backend(backend)
        return RankInfo(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "shm" if _on_one_host(where) else "gloo"
    if backend == "nccl":
        if device.type != "cuda":
            raise InputError("backend=nccl on a machine without CUDA", rule="nccl joins GPUs", fix="backend=gloo")
        backend = "cpu:gloo,cuda:nccl"
    elif backend == "gloo" and where.size > 1 and os.environ.get(CHECK_CALLS, "1") != "0":
        backend = CHECKED_GLOO
    wait = timedelta(seconds=timeout)
    atexit.register(_leave)
    if where.size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    elif STORE in os.environ:
        store = dist.FileStore(os.environ[STORE], where.size)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, timeout=wait)
    elif _through_mpi(where):
        dist.init_process_group(backend, init_method="mpi://", timeout=wait)  # comm/mpi registers the scheme
    else:
        _check_master(where)
        dist.init_process_group(backend, init_method="env://", rank=where.rank, world_size=where.size, timeout=wait)
    print_errors_without_traceback(where.rank)
    if where.size > 1 and STATUS not in os.environ and STORE not in os.environ:  # no launcher of ours
        start_heartbeat(own_store, where.rank, where.size, rank_status(), os.environ)
    return where


def print_errors_without_traceback(rank: int) -> None:
    """Print uncaught DrumlineErrors without a traceback: they name the user's line themselves."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DrumlineError) and not os.environ.get("DRUMLINE_DEBUG"):
            print(f"drumline: rank {rank}: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _check_backend(backend: str) -> None:
    """Refuse a process group of another backend than requested."""
    actual = str(dist.get_backend_config())
    if backend != "auto" and backend not in actual:
        raise InputError(
            f"backend={backend}, but the process group is {actual}",
            rule="a group keeps the backend it was made with",
            fix=f"backend=auto, or init_process_group({backend!r})",
        )


def _on_one_host(where: RankInfo) -> bool:
    """Whether the launcher reports that all ranks share this host."""
    if STORE in os.environ:
        return True
    local = _LOCAL_SIZES.get(where.launcher, "")
    return where.size > 1 and local in os.environ and _integer(os.environ, local) == where.size


def _ranks_on_host(where: RankInfo) -> int:
    """Number of ranks on this host; all ranks if the launcher does not report it."""
    local = os.environ.get(_LOCAL_SIZES.get(where.launcher, ""), "")
    return int(local) if local.isdecimal() else where.size


def _through_mpi(where: RankInfo) -> bool:
    """Whether the ranks find each other through MPI: started by mpiexec, no MASTER_ADDR, and mpi4py is installed."""
    return (
        where.launcher in MPI_LAUNCHERS
        and "MASTER_ADDR" not in os.environ
        and importlib.util.find_spec("mpi4py") is not None
    )


def _check_master(where: RankInfo) -> None:
    """Refuse a missing or invalid MASTER_ADDR or MASTER_PORT."""
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if key not in os.environ:
            mpi = "; with `pip install 'drumline[mpi]'` it is not needed" if where.launcher in MPI_LAUNCHERS else ""
            raise InputError(
                f"{where.size} ranks were started by {where.launcher}, but {key} is not set",
                where="environment",
                rule="ranks meet at MASTER_ADDR:MASTER_PORT",
                fix=f"export {key} before starting the ranks, or use `drumline train` or torchrun{mpi}",
            )
    if not 0 < _integer(os.environ, "MASTER_PORT") < 65536:
        raise InputError(f"MASTER_PORT={os.environ['MASTER_PORT']}", where="environment", rule="0 < port < 65536")


def _leave() -> None:
    """Destroy the group at the end of a script that did not disconnect."""
    stop_heartbeat()
    if dist.is_initialized():
        dist.destroy_process_group()


def disconnect() -> None:
    """Leave the process group after a barrier: a rank that leaves early breaks the others' connections."""
    if dist.is_initialized():
        dist.barrier()
        stop_heartbeat()
        dist.destroy_process_group()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the block on rank 0 first, then on the others: `with dl.rank_zero_first(): download()`."""
    where = connect()
    if where.rank > 0:
        dist.barrier()
    try:
        yield
    finally:
        if where.rank == 0:
            dist.barrier()


def _integer(env: Mapping[str, str], key: str) -> int:
    text = env[key]
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"{key}={text!r}", where="environment", rule=f"{key} is a whole number of at least 0")
    return int(text)
