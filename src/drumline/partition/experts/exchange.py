"""Rows to the ranks that want them: an all-to-all of uneven sizes, whose backward brings the gradients back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...tracing.running import without_values
from ..moves import Axis

Sizes = list[int]
"""Rows per rank of the axis."""


def exchange_sizes(gives: Sizes, axis: Axis, device: torch.device) -> Sizes:
    """How many rows every rank gives this one."""
    if axis.size == 1:
        return gives
    mine = torch.tensor(gives, device=device)
    found = torch.empty_like(mine)
    with axis.told("all_to_all", found):
        dist.all_to_all_single(found, mine, group=axis.group)
    # without values every rank is taken to give as much as this one
    return gives if without_values(found) else [int(n) for n in found.tolist()]


def exchange(x: Tensor, gives: Sizes, takes: Sizes, axis: Axis) -> Tensor:
    """The first gives[0] rows of x go to rank 0, the next gives[1] to rank 1; those that come lie in the same way."""
    if not x.is_floating_point():
        return _moved(x, gives, takes, axis)
    # The backward is a message too: it must run on every rank, whether or not what a rank sends depends on anything.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    out = _Exchange.apply(x, anchor, gives, takes, axis)  # type: ignore[no-untyped-call]  # torch's own
    assert isinstance(out, Tensor)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, gives: Sizes, takes: Sizes, axis: Axis) -> Tensor:
        ctx.gives, ctx.takes, ctx.axis = gives, takes, axis
        return _moved(x, gives, takes, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _moved(gradient, ctx.takes, ctx.gives, ctx.axis), None, None, None, None


def _moved(x: Tensor, gives: Sizes, takes: Sizes, axis: Axis) -> Tensor:
    assert sum(gives) == x.shape[0], f"{gives} are not the sizes of {x.shape[0]} rows"
    if axis.size == 1:
        return x.clone()
    out = x.new_empty(sum(takes), *x.shape[1:])
    with axis.told("all_to_all", out):
        dist.all_to_all_single(out, x.contiguous(), takes, gives, group=axis.group)
    return out
