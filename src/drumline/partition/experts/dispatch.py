"""Expert dispatch: tokens are sent to the ranks that have their experts, and the results back.

A rank sends a token once to each rank that has any of its experts, with the indices and weights of those. The owner
runs its experts on the tokens of all ranks, adds up their results per row, and sends one row back; the sender adds up
the rows of each token. Gradients take the same route back. So an expert's gradient, on its owner, covers the tokens of
all ranks, and the result equals the serial layer's up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...torchkit.fake_tensors import has_no_values
from ...tracing.expert_list import add_rows, expert_loads, with_zero_gradients
from ..sharding.redistribution import Axis

Sizes = list[int]
"""Rows per rank of the axis."""


def exchange_sizes(sends: Sizes, axis: Axis, device: torch.device) -> Sizes:
    """Rows that every rank sends to this one."""
    if axis.size == 1:
        return sends
    mine = torch.tensor(sends, device=device)
    counts = torch.empty_like(mine)
    with axis.observe("all_to_all", counts):
        dist.all_to_all_single(counts, mine, group=axis.group)
    # without values, every rank is assumed to send as much as this one
    return sends if has_no_values(counts) else [int(n) for n in counts.tolist()]


def exchange(x: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
    """All-to-all: the first sends[0] rows of x go to rank 0, the next sends[1] to rank 1; received rows are ordered
    alike."""
    if not x.is_floating_point():
        return _all_to_all(x, sends, receives, axis)
    # The backward is a message too: it must run on every rank, whether or not a rank's rows need a gradient.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    out = _Exchange.apply(x, anchor, sends, receives, axis)  # type: ignore[no-untyped-call]  # torch's own
    assert isinstance(out, Tensor)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
        ctx.sends, ctx.receives, ctx.axis = sends, receives, axis
        return _all_to_all(x, sends, receives, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, ctx.receives, ctx.sends, ctx.axis), None, None, None, None


def _all_to_all(x: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
    assert sum(sends) == x.shape[0], f"{sends} are not the sizes of {x.shape[0]} rows"
    if axis.size == 1:
        return x.clone()
    out = x.new_empty(sum(receives), *x.shape[1:])
    with axis.observe("all_to_all", out):
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=axis.group)
    return out


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """The rows that a rank sends, ordered by receiver."""

    token: Tensor
    """The token of each row."""
    index: Tensor
    """[rows, k]: the receiver's indices of its experts, -1 for the others."""
    sizes: Sizes


class ExpertDispatch:
    """Replaces the forward of a module of experts."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], bounds: tuple[int, ...], axis: Axis) -> None:
        self.module, self.names, self.bounds, self.axis = module, names, bounds, axis
        self.local: Callable[..., Tensor] = type(module).forward

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """(tokens [..., width], experts [..., k], weights [..., k]), by position or by the module's names."""
        given = dict(zip(self.names, arguments, strict=False)) | named
        x, index, weight = (given[name] for name in self.names)
        k = index.shape[-1]
        return self._run(x.reshape(-1, x.shape[-1]), index.reshape(-1, k), weight.reshape(-1, k)).view(x.shape)

    def _run(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        outgoing, axis = self._assign(index), self.axis
        sends = outgoing.sizes
        receives = exchange_sizes(sends, axis, x.device)
        indices = exchange(outgoing.index, sends, receives, axis)
        weights = exchange(weight[outgoing.token], sends, receives, axis)
        rows = exchange(x[outgoing.token], sends, receives, axis)
        results = exchange(self._run_experts(rows, indices, weights), receives, sends, axis)
        return add_rows(results, outgoing.token, x)

    def _assign(self, index: Tensor) -> _Outgoing:
        """Assign tokens to ranks."""
        expert_loads(index.reshape(-1), self.bounds[-1])  # refuses indices of missing experts
        n = self.axis.size
        if has_no_values(index):
            return _even(index, n)
        bounds = torch.tensor(self.bounds, device=index.device)
        owner = torch.bucketize(index, bounds[1:], right=True)
        hit = torch.zeros(n, index.shape[0], dtype=torch.bool, device=index.device)
        hit.scatter_(0, owner.T, True)
        rank, token = hit.nonzero(as_tuple=True)
        here = owner[token] == rank.unsqueeze(-1)
        numbers = torch.where(here, index[token] - bounds[rank].unsqueeze(-1), -1)
        return _Outgoing(token, numbers, [int(c) for c in hit.sum(1).tolist()])

    def _run_experts(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Run this rank's experts on the received rows: every pair of a row and an expert is one row."""
        row, column = _pairs(index, self.axis.size)
        if not len(row):  # nothing was received, but the backward of every exchange must run here too
            return with_zero_gradients(x + weight.sum(), self.module.parameters())
        y = self.local(self.module, x[row], index[row, column].unsqueeze(-1), weight[row, column].unsqueeze(-1))
        return add_rows(y, row, x)


def _pairs(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The received rows and their columns that name an expert."""
    if not has_no_values(index):
        row, column = (index >= 0).nonzero(as_tuple=True)
        return row, column
    rows, k = index.shape  # uniform load: each received row has k / min(k, n) experts here
    count = rows * k // min(k, n)
    return index.new_empty(count), index.new_empty(count)


def _even(index: Tensor, n: int) -> _Outgoing:
    """Uniform load, for tensors without values: a token's experts are on many ranks."""
    tokens, k = index.shape
    rows = tokens * min(k, n)
    sizes = [rows * (r + 1) // n - rows * r // n for r in range(n)]
    return _Outgoing(index.new_empty(rows), index.new_empty(rows, k), sizes)
