"""Tokens to the ranks that have their experts, and back.

A rank sends a token once to each rank that has any of its experts, with the numbers and weights of those. The owner
runs its experts on what came from all ranks, adds up what they made of the same row, and sends one row back; at home
the rows of a token are added. Gradients take the same ways back. So an expert's gradient, on its owner, is that of all
ranks' tokens, and the result is the serial layer's up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...tracing.running import without_values
from ..moves import Axis
from .exchange import Sizes, exchange, exchange_sizes
from .layer import add_rows, loads, touched


@dataclass(frozen=True, slots=True)
class _Letters:
    """What a rank sends, in the order of the ranks that get it."""

    token: Tensor
    """Which token each row is."""
    index: Tensor
    """[rows, k]: the receiver's own numbers of the experts that are its, -1 for the others."""
    sizes: Sizes


class Dispatch:
    """What is put in the place of the forward of a module of experts."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], bounds: tuple[int, ...], axis: Axis) -> None:
        self.module, self.names, self.bounds, self.axis = module, names, bounds, axis
        self.local: Callable[..., Tensor] = type(module).forward

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """(tokens [..., width], experts [..., k], weights [..., k]), by place or by the module's names for them."""
        given = dict(zip(self.names, arguments, strict=False)) | named
        x, index, weight = (given[name] for name in self.names)
        k = index.shape[-1]
        return self._run(x.reshape(-1, x.shape[-1]), index.reshape(-1, k), weight.reshape(-1, k)).view(x.shape)

    def _run(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        letters, axis = self._write(index), self.axis
        gives = letters.sizes
        takes = exchange_sizes(gives, axis, x.device)
        there = exchange(letters.index, gives, takes, axis)
        weights = exchange(weight[letters.token], gives, takes, axis)
        rows = exchange(x[letters.token], gives, takes, axis)
        back = exchange(self._work(rows, there, weights), takes, gives, axis)
        return add_rows(back, letters.token, x)

    def _write(self, index: Tensor) -> _Letters:
        """Which tokens go to which ranks."""
        loads(index.reshape(-1), self.bounds[-1])  # refuses experts that do not exist
        n = self.axis.size
        if without_values(index):
            return _even(index, n)
        bounds = torch.tensor(self.bounds, device=index.device)
        owner = torch.bucketize(index, bounds[1:], right=True)
        hit = torch.zeros(n, index.shape[0], dtype=torch.bool, device=index.device)
        hit.scatter_(0, owner.T, True)
        rank, token = hit.nonzero(as_tuple=True)
        here = owner[token] == rank.unsqueeze(-1)
        numbers = torch.where(here, index[token] - bounds[rank].unsqueeze(-1), -1)
        return _Letters(token, numbers, [int(c) for c in hit.sum(1).tolist()])

    def _work(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """This rank's experts on all that came: every pair of a row and an expert is one row of its own."""
        row, column = _pairs(index, self.axis.size)
        if not len(row):  # nothing came; but the backward of every exchange must run here too
            return touched(x + weight.sum(), self.module.parameters())
        y = self.local(self.module, x[row], index[row, column].unsqueeze(-1), weight[row, column].unsqueeze(-1))
        return add_rows(y, row, x)


def _pairs(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The rows that came and their places in them that name an expert."""
    if not without_values(index):
        row, column = (index >= 0).nonzero(as_tuple=True)
        return row, column
    rows, k = index.shape  # of a row's places as many name experts here as there are tokens' experts for the rows
    count = rows * k // min(k, n)
    return index.new_empty(count), index.new_empty(count)


def _even(index: Tensor, n: int) -> _Letters:
    """Without values nobody knows where tokens go: the load is taken to be uniform, a token's experts on many ranks."""
    tokens, k = index.shape
    rows = tokens * min(k, n)
    sizes = [rows * (r + 1) // n - rows * r // n for r in range(n)]
    return _Letters(index.new_empty(rows), index.new_empty(rows, k), sizes)
