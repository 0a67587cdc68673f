"""Horovod's collectives on torch's process group. Every rank calls them in the same order; names are not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..comm.environment import device_of, rank_info
from ..core.errors import InputError
from .world import require_init

T = TypeVar("T")

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
_OPERATORS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class NoCompressor:
    """Tensors travel in their own type."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor, and its type."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """The tensor in its own type."""
        return tensor.to(context)


class FP16Compressor(NoCompressor):
    """Floating-point tensors travel in fp16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor in fp16, and its own type."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """How tensors travel."""

    none = NoCompressor
    fp16 = FP16Compressor


def operator_of(op: str | None, average: bool | None = None) -> str:
    """The reduction that was asked for, by `op` or by the older `average`."""
    if op is not None and average is not None:
        raise InputError("op= and average=", rule="two names of one argument", fix="give op=")
    chosen = op or (Sum if average is False else Average)
    if chosen not in _OPERATORS:
        raise InputError(
            f"op={chosen}", rule=f"one of {', '.join(_OPERATORS)}; Adasum is Horovod's own", fix="hvd.Average"
        )
    return chosen


def refuse_process_set(process_set: object) -> None:
    """Refuse collectives among a part of the ranks."""
    if process_set is not None:
        raise InputError("process_set=...", rule="collectives are among all ranks", fix="torch.distributed.new_group")


@torch.no_grad()
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """Reduce in place over all ranks: the mean, unless `op` says otherwise."""
    require_init()
    refuse_process_set(process_set)
    op = operator_of(op, average)
    if op == Average and not tensor.is_floating_point():
        raise InputError(f"the average of {tensor.dtype}", rule="averages are of floating-point numbers", fix="hvd.Sum")
    device = tensor.device
    whole = tensor.detach().to(device_of(rank_info())).contiguous()
    if prescale_factor != 1.0:
        whole = whole * prescale_factor
    dist.all_reduce(whole, op=_OPERATORS[op])
    factor = postscale_factor / (dist.get_world_size() if op == Average else 1)
    tensor.copy_((whole * factor if factor != 1.0 else whole).to(device))
    return tensor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoCompressor] = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """The reduction over all ranks: the mean, unless `op` says otherwise. It has no gradient."""
    _refuse_gradient(tensor, "allreduce")
    small, context = compression.compress(tensor.detach())
    whole = small.clone()
    allreduce_(whole, average, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(whole, context)


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **options: Any) -> list[torch.Tensor]:
    """`allreduce` of each."""
    return [allreduce(t, *args, **options) for t in tensors]


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: object = None) -> torch.Tensor:
    """The tensors of all ranks, one after the other along the first dim, which may differ between ranks."""
    require_init()
    refuse_process_set(process_set)
    _refuse_gradient(tensor, "allgather")
    if not tensor.dim():
        raise InputError("hvd.allgather() of a number", rule="tensors are joined along dim 0", fix="x.reshape(1)")
    here = device_of(rank_info())
    whole = tensor.detach().to(here).contiguous()
    ranks = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64, device=here) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(whole)], device=here))
    rows = [int(c) for c in counts]
    padded = whole.new_zeros(max(rows), *whole.shape[1:])
    padded[: len(whole)] = whole
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]).to(tensor.device)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """The objects of all ranks, in their order. Objects travel as pickles, between ranks of one job."""
    require_init()
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, obj)
    return objects


@torch.no_grad()
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Give the tensor the values of `root_rank`'s."""
    require_init()
    refuse_process_set(process_set)
    check_root(root_rank)
    whole = tensor.detach().to(device_of(rank_info())).contiguous()
    dist.broadcast(whole, src=root_rank)
    tensor.copy_(whole.to(tensor.device))
    return tensor


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """A copy of `root_rank`'s tensor."""
    return broadcast_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None) -> T:
    """`root_rank`'s object. It travels as a pickle, between ranks of one job."""
    require_init()
    check_root(root_rank)
    objects = [obj]
    dist.broadcast_object_list(objects, src=root_rank, device=device_of(rank_info()))
    return objects[0]


def barrier() -> None:
    """Wait until all ranks have come here."""
    require_init()
    dist.barrier()


def check_root(root_rank: int) -> None:
    """Refuse a rank that does not exist."""
    n = dist.get_world_size()
    if not 0 <= root_rank < n:
        raise InputError(f"root_rank={root_rank} of {n} ranks", rule=f"from 0 to {n - 1}")


def _refuse_gradient(tensor: torch.Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"hvd.{name}() of a tensor that requires a gradient",
            rule="these collectives have no backward",
            fix=f"hvd.{name}(x.detach()), or torch.distributed.nn.functional",
        )
