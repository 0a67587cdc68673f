"""From tensors of any shape and stride to the flat memory that messages are made of, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import InputError
from .ops import name_of


def check_tensor(tensor: Tensor) -> None:
    """Refuse what has no elements in rows."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"a {type(tensor).__name__}", rule="collectives take torch tensors")
    if tensor.layout != torch.strided:
        raise InputError(f"a tensor of layout {tensor.layout}", rule="collectives take dense tensors")


def check_dense(tensor: Tensor) -> None:
    """Refuse what cannot be changed in place element by element."""
    check_tensor(tensor)
    if any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            rule="each element has its own memory",
            fix="call .contiguous() on the expanded tensor",
        )


def check_out(out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse an output of another shape, type or device."""
    if out is None:
        return
    check_dense(out)
    if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype or out.device != like.device:
        raise InputError(
            f"out= of {name_of(out.dtype)} {tuple(out.shape)} on {out.device}",
            rule=f"the result is {name_of(like.dtype)} {tuple(shape)} on {like.device}",
        )


def contiguous(tensor: Tensor) -> Tensor:
    """The elements in a row, to be read: the tensor's own memory where it is so."""
    # Not reshape(-1): of a strided vector that is a view with gaps, and messages need none.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def written_back(buffer: Tensor, tensor: Tensor) -> None:
    """Copy a buffer of `contiguous` to its tensor, unless it is the tensor's own memory."""
    if buffer.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(buffer.view(tensor.shape))


@dataclass(slots=True)
class Landing:
    """Where a result arrives: in the caller's `out`, by way of a buffer where that has gaps, or in a new tensor."""

    buffer: Tensor
    tensor: Tensor

    @classmethod
    def of(cls, out: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Landing:
        """Memory for a result of that shape."""
        if out is None:
            out = torch.empty(shape, dtype=like.dtype, device=like.device)
        return cls(contiguous(out), out)

    def result(self) -> Tensor:
        """The tensor, filled."""
        written_back(self.buffer, self.tensor)
        return self.tensor
