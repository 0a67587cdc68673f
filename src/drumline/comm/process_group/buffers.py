"""Check and prepare the tensors that torch passes to a process group: dense, contiguous, of matching sizes.

Programs written for torch catch RuntimeError, so the errors of a group are RuntimeErrors as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError, GaveUp, InputError

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


class GroupInputError(InputError, RuntimeError):
    """A wrong call of a process group."""


class GroupGaveUp(GaveUp, RuntimeError):
    """A process group that cannot continue."""


class RefusedCall(GroupInputError):
    """A call that was refused before anything was sent: the other ranks must be notified."""


def for_torch(error: BaseException) -> BaseException:
    """The same error, as one that `except RuntimeError` catches."""
    if isinstance(error, RuntimeError) or not isinstance(error, DrumlineError):
        return error
    kind = GroupInputError if isinstance(error, InputError) else GroupGaveUp
    twin = kind(error.what, where=error.where, rule=error.rule, fix=error.fix)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, True
    return twin.with_traceback(error.__traceback__)


def operator_name(opts: Any) -> str:
    """The name of a call's reduction operator."""
    requested = opts.reduceOp
    if requested == _SUM:  # the usual case, and faster than the lookup
        return "sum"
    kind = requested.op
    name = _OPS.get(kind)
    if name is None:
        raise RefusedCall(f"operator {kind}", rule=f"known: {', '.join(_NAMES)}")
    return name


def check_dense(*tensors: Tensor) -> None:
    """Refuse tensors that are not dense or not on the CPU."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise RefusedCall(f"a tensor of layout {tensor.layout}", rule="collectives take dense tensors")
        if tensor.is_cuda:
            raise RefusedCall("tensors on CPU and GPU in one call", rule="all on one kind of device")


def as_contiguous(tensor: Tensor, *, fill: bool = True) -> Tensor:
    """The tensor itself, or contiguous memory in its place; with its values if `fill`."""
    own = tensor.detach()
    if own.is_contiguous() and not own.is_conj() and not own.is_neg():
        return own
    if fill:
        return own.resolve_conj().resolve_neg().contiguous()
    return torch.empty(own.shape, dtype=own.dtype)


def copy_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy the result of `as_contiguous` back to its tensor, unless it is the tensor itself."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def check_count(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """Refuse a list without one tensor per rank."""
    if len(tensors) != size:
        raise RefusedCall(f"{what} with {len(tensors)} tensors over {size} ranks", rule="one tensor for each rank")


def check_same(a: Tensor, b: Tensor, what: str) -> None:
    """Refuse two tensors of different sizes or types."""
    if a.numel() != b.numel() or a.dtype != b.dtype:
        raise RefusedCall(
            f"{what} between {tuple(a.shape)} of {a.dtype} and {tuple(b.shape)} of {b.dtype}",
            rule="equally many elements of one type",
        )


def split_rows(tensor: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    """Split a contiguous tensor along its first dimension: by `sizes`, or evenly."""
    if sizes:
        return list(tensor.split(list(sizes)))
    rows = tensor.shape[0] if tensor.dim() else 1
    if rows % parts:
        raise RefusedCall(
            f"all_to_all of {rows} rows over {parts} ranks", rule="rows divide evenly, or sizes are given"
        )
    return list(tensor.split(rows // parts)) if rows else [tensor] * parts
