"""This rank's number and how to reach the others, from the environment variables of the launcher.

Supported: Drumline's own launcher, torchrun, Slurm's srun, Open MPI's and MPICH's mpiexec; without one there is one
rank. Under mpiexec with mpi4py, MASTER_ADDR is not needed: the ranks find each other through MPI.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ..core.errors import DrumlineError, InputError
from ..core.rank_info import ELASTIC, STORE, RankInfo, local_size, rank_info
from ..torchkit.process_groups import own_store
from .fault_injection import inject_from
from .heartbeat import start_heartbeat, stop_heartbeat
from .malloc_settings import keep_freed_memory
from .parent_process import die_with_parent
from .rank_status import STATUS, rank_status
from .rendezvous import MPI_LAUNCHERS, default_timeout, group_store

CHECKED_GLOO = "checked_gloo"
"""The backend that is gloo with calls compared between ranks (process_group/gloo_group.py)."""
CHECK_CALLS = "DRUMLINE_CHECK_CALLS"
"""The variable that, set to 0, gives gloo groups without comparison of the ranks' calls."""

TORCH_NAMES = {"mpi": "mpi4py"}
"""Backends of plans that torch knows by another name: it refuses `mpi` before it looks at registered backends."""

__all__ = [
    "CHECKED_GLOO",
    "CHECK_CALLS",
    "MPI_LAUNCHERS",
    "TORCH_NAMES",
    "RankInfo",
    "connect",
    "device_of",
    "disconnect",
    "print_errors_without_traceback",
    "rank_info",
    "rank_zero_first",
]


def device_of(where: RankInfo) -> torch.device:
    """The device of this rank: its own GPU if there are any, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", where.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def connect(
    *,
    backend: str = "auto",
    timeout: float | None = None,
    part: RankInfo | None = None,
    store: dist.Store | None = None,
) -> RankInfo:
    """Join the process group, unless the caller already has one. A single rank has a group too.

    `timeout` is for the ranks to come and for a collective, in seconds (default: DRUMLINE_TIMEOUT, or 300). `part`: the
    place of this process in a group of some of the ranks, which meet in `store`.
    """
    whole, timeout = rank_info(), timeout or default_timeout()
    where = part or whole
    device = device_of(where)
    if device.type == "cpu":
        keep_freed_memory(local_size(where) or where.size)
    if where.launcher == "torchrun" and ELASTIC in os.environ:
        die_with_parent()  # torchrun leaves its ranks training when it is killed
    if dist.is_initialized():
        _check_backend(backend)
        return RankInfo(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = _auto_backend(where, device)
    if backend == "mpi":
        _check_mpi(where)
        backend = TORCH_NAMES[backend]
    if backend == "nccl":
        if device.type != "cuda":
            raise InputError("backend=nccl on a machine without CUDA", rule="nccl joins GPUs", fix="backend=gloo")
        backend = "cpu:gloo,cuda:nccl"
    elif backend == "gloo" and where.size > 1 and os.environ.get(CHECK_CALLS, "1") != "0":
        backend = CHECKED_GLOO
    inject_from(os.environ, rank=whole.rank, ranks=whole.size)
    wait = timedelta(seconds=timeout)
    atexit.register(_leave)
    if where.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    else:
        store = store or group_store(where, timeout)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, timeout=wait)
    print_errors_without_traceback(whole.rank)
    if where.size > 1 and part is None and STATUS not in os.environ and STORE not in os.environ:  # no launcher of ours
        start_heartbeat(own_store, where.rank, where.size, rank_status(), os.environ)
    return where


def _auto_backend(where: RankInfo, device: torch.device) -> str:
    """NCCL where each rank has a GPU of its own, shared memory between the CPUs of one host, else gloo."""
    local = local_size(where)
    if device.type == "cuda":
        shared = local is not None and local > torch.cuda.device_count()
        return "gloo" if shared else "nccl"  # NCCL refuses two ranks on one GPU
    return "shm" if where.size > 1 and local == where.size else "gloo"


def print_errors_without_traceback(rank: int) -> None:
    """Print uncaught DrumlineErrors without a traceback: they name the user's line themselves."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DrumlineError) and not os.environ.get("DRUMLINE_DEBUG"):
            if error.silent:
                return
            print(f"drumline: rank {rank}: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _check_backend(backend: str) -> None:
    """Refuse a process group of another backend than requested."""
    actual = str(dist.get_backend_config())
    if backend != "auto" and TORCH_NAMES.get(backend, backend) not in actual:
        raise InputError(
            f"backend={backend}, but the process group is {actual}",
            rule="a group keeps the backend it was made with",
            fix=f"backend=auto, or init_process_group({backend!r})",
        )


def _check_mpi(where: RankInfo) -> None:
    """Refuse MPI between ranks that mpiexec did not start, or without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        raise InputError("backend=mpi without mpi4py", fix="pip install 'drumline[mpi]'")
    if where.launcher not in MPI_LAUNCHERS:
        raise InputError(
            f"backend=mpi, but the ranks were started by {where.launcher or 'no launcher'}",
            rule="MPI's ranks are started by mpiexec",
            fix=f"mpiexec -n {max(2, where.size)} python train.py, or backend=gloo",
        )


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
