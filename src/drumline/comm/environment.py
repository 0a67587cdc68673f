"""Who am I, and where are the others: found from what the launcher set, without a flag.

Known launchers: Drumline's own, torchrun, Slurm's srun, Open MPI's and MPICH's mpiexec. None of them: one rank.
Under mpiexec, with mpi4py, nobody needs to set MASTER_ADDR: the ranks find each other through MPI.
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
from .pages import keep_pages

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
"""The variables that hold rank, size and local rank, by launcher; the first that is set counts."""

MPI_LAUNCHERS = ("Open MPI", "MPICH")
"""Launchers whose ranks can find each other through MPI."""

_LOCAL_SIZES = {
    "torchrun": "LOCAL_WORLD_SIZE",
    "Slurm": "SLURM_NTASKS_PER_NODE",
    "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPICH": "MPI_LOCALNRANKS",
}
"""How many of the ranks share this host, by launcher."""

STORE = "DRUMLINE_STORE"
"""The file through which the ranks of Drumline's own launcher meet: no port is opened."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""
    """Empty when there is none."""


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Read rank and size from the environment; refuse what makes no sense."""
    env = os.environ if environment is None else environment
    for launcher, (rank, size, local) in _LAUNCHERS.items():
        if launcher == "Slurm" and "SLURM_STEP_ID" not in env:
            continue  # inside an allocation, but not started by srun
        if rank in env and size in env:
            r, n, i = _whole(env, rank), _whole(env, size), _whole(env, local) if local in env else _whole(env, rank)
            if r >= n:
                raise InputError(f"{rank}={r} and {size}={n}", where="environment", rule=f"{rank} < {size}")
            return Place(r, n, i, launcher)
    return Place()


def device_of(where: Place) -> torch.device:
    """The device that this rank computes on: its own GPU where there are any, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", where.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def connect(*, backend: str = "auto", timeout: float = 300.0) -> Place:
    """Join the process group, unless the caller has one already. One rank alone has a group too."""
    where = place()
    device = device_of(where)
    if device.type == "cpu":
        keep_pages(_beside(where))
    if dist.is_initialized():
        _check_backend(backend)
        return Place(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "shm" if _on_one_host(where) else "gloo"
    if backend == "nccl":
        if device.type != "cuda":
            raise InputError("backend=nccl on a machine without CUDA", rule="nccl joins GPUs", fix="backend=gloo")
        backend = "cpu:gloo,cuda:nccl"
    wait = timedelta(seconds=timeout)
    atexit.register(_leave)
    if where.size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    elif STORE in os.environ:
        store = dist.FileStore(os.environ[STORE], where.size)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, timeout=wait)
    elif _through_mpi(where):
        from .meet import meet

        dist.init_process_group(backend, store=meet(wait), rank=where.rank, world_size=where.size, timeout=wait)
    else:
        _check_master(where)
        dist.init_process_group(backend, init_method="env://", rank=where.rank, world_size=where.size, timeout=wait)
    say_errors_plainly(where.rank)
    return where


def say_errors_plainly(rank: int) -> None:
    """An error of ours that a script does not catch is printed without a traceback: it names the user's own line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DrumlineError) and not os.environ.get("DRUMLINE_DEBUG"):
            print(f"drumline: rank {rank}: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _check_backend(backend: str) -> None:
    """Refuse to run on another backend than the one that was asked for."""
    there = str(dist.get_backend_config())
    if backend != "auto" and backend not in there:
        raise InputError(
            f"backend={backend}, but the process group is {there}",
            rule="a group keeps the backend it was made with",
            fix=f"backend=auto, or init_process_group({backend!r})",
        )


def _on_one_host(where: Place) -> bool:
    """Whether the launcher says that all ranks share this host."""
    if STORE in os.environ:
        return True
    local = _LOCAL_SIZES.get(where.launcher, "")
    return where.size > 1 and local in os.environ and _whole(os.environ, local) == where.size


def _beside(where: Place) -> int:
    """How many ranks share this host; all of them, if nobody says it."""
    local = os.environ.get(_LOCAL_SIZES.get(where.launcher, ""), "")
    return int(local) if local.isdecimal() else where.size


def _through_mpi(where: Place) -> bool:
    """Whether the ranks meet through MPI: mpiexec started them, nobody named a place to meet, and mpi4py is there."""
    return (
        where.launcher in MPI_LAUNCHERS
        and "MASTER_ADDR" not in os.environ
        and importlib.util.find_spec("mpi4py") is not None
    )


def _check_master(where: Place) -> None:
    """Refuse a place to meet that is not named, or cannot be."""
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if key not in os.environ:
            mpi = "; with `pip install 'drumline[mpi]'` it is not needed" if where.launcher in MPI_LAUNCHERS else ""
            raise InputError(
                f"{where.size} ranks were started by {where.launcher}, but {key} is not set",
                where="environment",
                rule="ranks meet at MASTER_ADDR:MASTER_PORT",
                fix=f"export {key} before starting the ranks, or use `drumline train` or torchrun{mpi}",
            )
    if not 0 < _whole(os.environ, "MASTER_PORT") < 65536:
        raise InputError(f"MASTER_PORT={os.environ['MASTER_PORT']}", where="environment", rule="0 < port < 65536")


def _leave() -> None:
    """At the end of a script that did not say goodbye."""
    if dist.is_initialized():
        dist.destroy_process_group()


def disconnect() -> None:
    """Leave the process group, when everyone is there: a rank that leaves early breaks the others' connections."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """What stands inside is done by the first rank, then by the others: `with dl.rank_zero_first(): download()`."""
    where = connect()
    if where.rank > 0:
        dist.barrier()
    try:
        yield
    finally:
        if where.rank == 0:
            dist.barrier()


def _whole(env: Mapping[str, str], key: str) -> int:
    text = env[key]
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InputError(f"{key}={text!r}", where="environment", rule=f"{key} is a whole number of at least 0")
    return int(text)
