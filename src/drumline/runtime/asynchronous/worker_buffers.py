"""The buffers that workers change, as running statistics: sent with every gradient, averaged by the first server.

Constants such as masks stay where they are. A worker that joins, or comes back, begins with the first server's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..strategies.server_shard import FlatLayout

Buffers = dict[str, torch.Tensor]
"""Flat buffers in the memory of the host, by name."""


def flat(buffers: Mapping[str, torch.Tensor]) -> Buffers:
    """Buffers as they are sent."""
    return {name: b.detach().flatten().cpu() for name, b in buffers.items()}


@torch.no_grad()
def put(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Set buffers of a model; those that have these values already are left alone, so that constants stay constant."""
    own = dict(model.named_buffers())
    for name, part in buffers.items():
        value = part.view(own[name].shape).to(own[name].device)
        if not torch.equal(own[name], value):
            own[name].copy_(value)


def mean(parts: Sequence[Buffers]) -> Buffers:
    """The mean of the workers' buffers; of integers, which count, the largest."""
    columns: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            columns.setdefault(name, []).append(tensor)
    return {name: _mean(column) for name, column in columns.items()}


def _mean(column: list[torch.Tensor]) -> torch.Tensor:
    kind = column[0].dtype
    if kind.is_floating_point or kind.is_complex:
        exact = torch.complex128 if kind.is_complex else torch.float64
        return torch.stack([t.to(exact) for t in column]).mean(0).to(kind)
    return torch.stack(column).amax(0)


def most_bytes(layout: FlatLayout, model: nn.Module) -> int:
    """The largest message between a worker and a server: all weights, or their gradients, and all buffers."""
    return layout.bytes + sum(b.nbytes for b in model.buffers())
