"""The collectives that torch.distributed's backends bring along, in the form that a transport offers them.

Each takes flat tensors and answers False, before anything is sent, for an operator or type that the backend lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Run = Callable[[Tensor | None, Tensor | None, str, int, dist.ProcessGroup | None, int], bool]
"""(source, target, op, root, group, ranks)."""

# newer releases of torch have new names for these two
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_BITS = ("band", "bor", "bxor")
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_WHOLE = {torch.int8, torch.uint8, torch.int32, torch.int64}


def _knows(op: str, tensor: Tensor) -> bool:
    if tensor.is_cuda and op in _BITS:
        return False  # nccl has none
    return op in _OPERATIONS and tensor.dtype in (_WHOLE if op in _BITS else _FLOATS | _WHOLE)


def _mean(op: str, tensor: Tensor, ranks: int) -> None:
    if op == "avg":
        tensor.div_(ranks)


def _bytes(tensor: Tensor) -> Tensor:
    """Moving needs no type, and backends do not know every one."""
    return tensor.view(torch.uint8)


def _rows(tensor: Tensor | None, ranks: int) -> list[Tensor] | None:
    return None if tensor is None else list(_bytes(tensor).view(ranks, -1).unbind(0))


def _all_reduce(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert target is not None
    if not _knows(op, target):
        return False
    dist.all_reduce(target, op=_OPERATIONS[op], group=group)
    _mean(op, target, ranks)
    return True


def _reduce(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert source is not None
    if not _knows(op, source):
        return False
    work = source.clone() if target is None else target.copy_(source)  # torch reduces in place, on all ranks
    dist.reduce(work, group_dst=root, op=_OPERATIONS[op], group=group)
    if target is not None:
        _mean(op, target, ranks)
    return True


def _broadcast(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert target is not None
    dist.broadcast(_bytes(target), group_src=root, group=group)
    return True


def _all_gather(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert source is not None and target is not None
    _ALL_GATHER(_bytes(target), _bytes(source), group=group)
    return True


def _reduce_scatter(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert source is not None and target is not None
    if not _knows(op, source):
        return False
    _REDUCE_SCATTER(target, source, op=_OPERATIONS[op], group=group)
    _mean(op, target, ranks)
    return True


def _gather(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert source is not None
    dist.gather(_bytes(source), _rows(target, ranks), group_dst=root, group=group)
    return True


def _scatter(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert target is not None
    dist.scatter(_bytes(target), _rows(source, ranks), group_src=root, group=group)
    return True


def _all_to_all(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    assert source is not None and target is not None
    dist.all_to_all_single(_bytes(target), _bytes(source), group=group)
    return True


def _barrier(
    source: Tensor | None, target: Tensor | None, op: str, root: int, group: dist.ProcessGroup | None, ranks: int
) -> bool:
    dist.barrier(group=group)
    return True


NATIVE: dict[str, Run] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
"""By collective; scan and exscan no backend has."""
