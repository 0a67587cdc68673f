"""Parameters of several stages (an embedding that is also the head): their gradients are summed over the stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...partition.stage import StagedGraph
from ...schedules.pipeline import Pipeline
from .channels import PipelineChannels


def tied_ranks(cut: StagedGraph, order: Pipeline) -> dict[str, tuple[int, ...]]:
    """Tied parameter -> the ranks that have it. Stages of one rank share one tensor, and need no message."""
    homes = order.homes()
    ranks = {name: tuple(sorted({homes[s] for s in stages})) for name, stages in sorted(cut.shared.items())}
    return {name: at for name, at in ranks.items() if len(at) > 1}


def sum_tied_gradients(
    parameters: Mapping[str, torch.Tensor], ranks_of: Mapping[str, tuple[int, ...]], channels: PipelineChannels
) -> None:
    """After all backwards: give every rank the sum, added in the order of the ranks, so that all have the same bits.

    Each sends to each: there are usually two ranks, so no group of their own is needed. Every rank of the pipeline may
    call it; those without tied parameters do nothing. A sum over replicas may come before or after, but not meanwhile.
    """
    summands: dict[str, dict[int, torch.Tensor]] = {}
    works = []
    for tag, (name, ranks) in enumerate(ranks_of.items()):
        if channels.rank not in ranks or not parameters[name].requires_grad:
            continue
        parameter = parameters[name]
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        summands[name] = {channels.rank: own}
        for other in ranks:
            if other != channels.rank:
                summands[name][other] = torch.empty_like(own)
                works.append(channels.receive(summands[name][other], other, tag))
                works.append(channels.send(own, other, tag, "shared"))
    for work in works:
        work.wait()
    for name, parts in summands.items():
        first, *others = [parts[r] for r in sorted(parts)]
        total, gradient = sum(others, first), parameters[name].grad
        if gradient is None:
            parameters[name].grad = total
        else:
            gradient.copy_(total)  # in place: it may be a view of a buffer that is sent next


class TiedExchange:
    """Exchanges the gradients of tied parameters while batches are in flight, over channels of its own.

    Backwards run from the last stage to the first. So when a rank has the gradients of a batch, the ranks of higher
    stages have sent theirs already; those of lower stages follow.
    """

    def __init__(self, channels: PipelineChannels, ranks_of: Mapping[str, tuple[int, ...]]) -> None:
        self._channels = channels
        self._ranks_of = {name: ranks for name, ranks in sorted(ranks_of.items()) if channels.rank in ranks}
        self._count = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The tied parameters of this rank."""
        return tuple(self._ranks_of)

    @property
    def complete_here(self) -> tuple[str, ...]:
        """Those of which no lower stage has a part."""
        return tuple(name for name, ranks in self._ranks_of.items() if min(ranks) == self._channels.rank)

    def start(self, gradients: Mapping[str, torch.Tensor]) -> OpenExchange:
        """Send this rank's gradients of a batch, and receive the others'."""
        parts: dict[str, dict[int, torch.Tensor]] = {}
        works: dict[str, list[Any]] = {}
        for name, ranks in self._ranks_of.items():
            own = gradients[name].clone()  # the sum is written into the gradient
            parts[name], works[name] = {self._channels.rank: own}, []
            for other in (r for r in ranks if r != self._channels.rank):
                parts[name][other] = torch.empty_like(own)
                works[name].append(self._channels.receive(parts[name][other], other, self._count))
                works[name].append(self._channels.send(own, other, self._count, "shared"))
            self._count += 1
        return OpenExchange(parts, works)


class OpenExchange:
    """The gradients of one batch on their way."""

    def __init__(self, parts: dict[str, dict[int, torch.Tensor]], works: dict[str, list[Any]]) -> None:
        self._parts, self._works = parts, works

    def finish(self, gradients: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        """Wait for all parts of these parameters and write their sum, added in the order of the ranks."""
        for name in names:
            for work in self._works.pop(name):
                work.wait()
            first, *others = [part for _, part in sorted(self._parts.pop(name).items())]
            gradients[name].copy_(sum(others, first))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose sum is not written yet."""
        return tuple(self._parts)
