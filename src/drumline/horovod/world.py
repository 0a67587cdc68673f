"""Horovod's questions about ranks, answered by the launcher's variables and torch's process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..comm.environment import connect, disconnect, rank_info
from ..core.errors import InputError
from ..core.rank_info import local_size as ranks_of_this_host


def init(comm: object = None, process_sets: object = None) -> None:
    """Join the group of all ranks: NCCL where each rank has a GPU, else shared memory or gloo."""
    if comm is not None or process_sets is not None:
        raise InputError(
            "hvd.init() with a communicator or process sets",
            rule="all ranks that the launcher started are in one group",
            fix="hvd.init(), and torch.distributed.new_group for a part of the ranks",
        )
    connect()


def shutdown() -> None:
    """Leave the group, after all ranks have come here."""
    disconnect()


def is_initialized() -> bool:
    """Whether this process is in the group."""
    return dist.is_initialized()


def require_init() -> None:
    """Refuse what needs the group before `init`."""
    if not dist.is_initialized():
        raise InputError("Horovod's functions before hvd.init()", rule="init() joins the group", fix="hvd.init()")


def rank() -> int:
    """This rank."""
    require_init()
    return dist.get_rank()


def size() -> int:
    """Number of ranks."""
    require_init()
    return dist.get_world_size()


def local_rank() -> int:
    """This rank's number on its host."""
    require_init()
    return rank_info().local_rank


def local_size() -> int:
    """Ranks on this host."""
    require_init()
    n = ranks_of_this_host(rank_info())
    if n is None:
        raise InputError("hvd.local_size()", rule="the launcher does not say how many ranks this host has")
    return n


def cross_size() -> int:
    """Number of hosts, where all have the same number of ranks."""
    return size() // local_size()


def cross_rank() -> int:
    """The number of this host."""
    return rank() // local_size()


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return size() % local_size() == 0


def nccl_built() -> bool:
    """Whether torch has NCCL."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return bool(dist.is_gloo_available())


def mpi_built() -> bool:
    """Whether the group is MPI's."""
    return dist.is_initialized() and "mpi" in str(dist.get_backend_config())


def mpi_threads_supported() -> bool:
    """MPI is not called from several threads."""
    return False
