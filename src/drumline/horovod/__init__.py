"""`import drumline.horovod as hvd`: a Horovod script for PyTorch runs on torch's process group with that line changed.

docs/from-horovod.md lists what is supported; what is not, raises with the way out.
"""

from __future__ import annotations

from typing import Any

from .collectives import Adasum as Adasum
from .collectives import Average as Average
from .collectives import Compression as Compression
from .collectives import Max as Max
from .collectives import Min as Min
from .collectives import Product as Product
from .collectives import Sum as Sum
from .collectives import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    grouped_allreduce,
)
from .optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from .world import (
    cross_rank,
    cross_size,
    gloo_built,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_threads_supported,
    nccl_built,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "gloo_built",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
]

_ASYNC = "collectives here return their result: call the function without _async, and leave synchronize() out"
REFUSED = {
    "join": "a rank that has run out of samples cannot sit out: use drop_last, or a DistributedSampler, which pads; "
    "a Job weighs ragged batches rightly",
    "elastic": "`drumline run --restarts N`, or `drumline train`, which resumes on any number of ranks",
    "run": "drumline.spawn(function, ranks=n)",
    "alltoall": "torch.distributed.all_to_all_single on the group that init() joins",
    "reducescatter": "torch.distributed.reduce_scatter_tensor on the group that init() joins",
    "ProcessSet": "torch.distributed.new_group",
    "add_process_set": "torch.distributed.new_group",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm, which uses the group that init() joins",
    "allreduce_async": _ASYNC,
    "allreduce_async_": _ASYNC,
    "allgather_async": _ASYNC,
    "broadcast_async": _ASYNC,
    "broadcast_async_": _ASYNC,
    "synchronize": _ASYNC,
    "poll": _ASYNC,
}
"""Names of Horovod's that are refused, each with what to do instead."""


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise AttributeError(f"drumline.horovod has no {name}: {REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
