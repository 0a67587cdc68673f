"""Parameters of several stages (an embedding that is also the head): their gradients are summed over the stages."""

from __future__ import annotations

from collections.abc import Mapping

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
