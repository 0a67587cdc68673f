"""Conversion between tensors of any shape and stride and the flat buffers that messages use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import InputError
from .operators import dtype_name


def check_tensor(tensor: Tensor) -> None:
    """Refuse anything but dense tensors."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"a {type(tensor).__name__}", rule="collectives take torch tensors")
    if tensor.layout != torch.strided:
        raise InputError(f"a tensor of layout {tensor.layout}", rule="collectives take dense tensors")


def check_dense(tensor: Tensor) -> None:
    """Refuse tensors whose elements share memory: they cannot be changed in place."""
    check_tensor(tensor)
    if any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            rule="each element has its own memory",
            fix="call .contiguous() on the expanded tensor",
        )


def check_out(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse an output of the wrong shape, type or device."""
    if out is None:
        return
    check_dense(out)
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise InputError(
            f"out= of {dtype_name(out.dtype)} {tuple(out.shape)} on {out.device}",
            rule=f"the result is {dtype_name(like.dtype)} {tuple(shape)} on {like.device}",
        )


def contiguous(tensor: Tensor) -> Tensor:
    """The elements as a flat, contiguous tensor: a view if the tensor is contiguous, else a copy."""
    # Not reshape(-1): for a strided vector that is a view with gaps.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def copy_back(buffer: Tensor, tensor: Tensor) -> None:
    """Copy a buffer made by `contiguous` back to its tensor, unless it is a view of it."""
    if buffer.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(buffer.view(tensor.shape))


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Adjacent parts of one memory as one tensor; None if they are not adjacent."""
    if len(parts) == 1:
        return parts[0]
    nonempty = [part for part in parts if part.numel()]
    if not nonempty:
        return parts[0]
    first = nonempty[0]
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in nonempty:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage:
            return None
        at += part.numel() * part.element_size()
    return first.as_strided((sum(part.numel() for part in nonempty),), (1,))


@dataclass(slots=True)
class OutputBuffer:
    """The output of a collective: the caller's `out` or a new tensor, and the flat buffer that receives it."""

    buffer: Tensor
    tensor: Tensor

    @classmethod
    def of(cls, out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> OutputBuffer:
        """Memory for a result of the given shape."""
        if out is None:
            out = torch.empty(shape, dtype=like.dtype, device=like.device)
        return cls(contiguous(out), out)

    def result(self) -> Tensor:
        """The tensor, filled."""
        copy_back(self.buffer, self.tensor)
        return self.tensor
