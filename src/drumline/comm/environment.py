"""Who am I, and where are the others: found from what the launcher set, without a flag.

Known launchers: Drumline's own, torchrun, Slurm's srun, Open MPI's and MPICH's mpiexec. None of them: one rank.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import InputError

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
"""The variables that hold rank, size and local rank, by launcher; the first that is set counts."""

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
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    device = device_of(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
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
    else:
        for key in ("MASTER_ADDR", "MASTER_PORT"):
            if key not in os.environ:
                raise InputError(
                    f"{where.size} ranks were started by {where.launcher}, but {key} is not set",
                    where="environment", rule="ranks meet at MASTER_ADDR:MASTER_PORT",
                    fix=f"export {key} before starting the ranks, or use `drumline train` or torchrun",
                )  # fmt: skip
        if not 0 < _whole(os.environ, "MASTER_PORT") < 65536:
            raise InputError(f"MASTER_PORT={os.environ['MASTER_PORT']}", where="environment", rule="0 < port < 65536")
        dist.init_process_group(
            backend, init_method="env://", rank=where.rank, world_size=where.size, timeout=wait
        )
    return where


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
