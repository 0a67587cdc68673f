"""Tensors as torch hands them to a process group, made fit for an engine: dense, contiguous, of matching sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import GroupInputError

_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_SUM = dist.ReduceOp.SUM
_OPS = {kind: _NAMES[name] for name, kind in dist.ReduceOp.RedOpType.__members__.items() if name in _NAMES}


class Refused(GroupInputError):
    """Found wrong before anything was sent: the other ranks have to be told."""


def operator(opts: Any) -> str:
    """The name of the operator that a call asks for."""
    asked = opts.reduceOp
    if asked == _SUM:  # nearly always, and quicker to see than to look up
        return "sum"
    kind = asked.op
    name = _OPS.get(kind)
    if name is None:
        raise Refused(f"operator {kind}", rule=f"known: {', '.join(_NAMES)}")
    return name


def dense(*tensors: Tensor) -> None:
    """Refuse what has no plain memory on the CPU."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise Refused(f"a tensor of layout {tensor.layout}", rule="collectives take dense tensors")
        if tensor.is_cuda:
            raise Refused("tensors on CPU and GPU in one call", rule="all on one kind of device")


def plain(tensor: Tensor, *, fill: bool = True) -> Tensor:
    """The tensor itself, or contiguous memory beside it; with its values if they are needed."""
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        return own
    if fill:
        return own.resolve_conj().resolve_neg().contiguous()
    return torch.empty(own.shape, dtype=own.dtype)


def back(flat: Tensor, tensor: Tensor) -> None:
    """Copy what was received beside a tensor into it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def count(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """Refuse a list that has not one tensor for each rank."""
    if len(tensors) != size:
        raise Refused(f"{what} with {len(tensors)} tensors over {size} ranks", rule="one tensor for each rank")


def same(a: Tensor, b: Tensor, what: str) -> None:
    """Refuse two tensors of different sizes or types."""
    if a.numel() != b.numel() or a.dtype != b.dtype:
        raise Refused(
            f"{what} between {tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}",
            rule="equally many elements of one type",
        )


def cut(tensor: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    """Parts of a contiguous tensor along its first dimension."""
    if sizes:
        return list(tensor.split(list(sizes)))
    rows = tensor.shape[0] if tensor.dim() else 1
    if rows % parts:
        raise Refused(f"all_to_all of {rows} rows over {parts} ranks", rule="rows divide evenly, or sizes are given")
    return list(tensor.split(rows // parts)) if rows else [tensor] * parts
