"""Parameters that several stages hold (an embedding that is also the head): their gradients are added up over them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...partition.stage import StagedGraph
from ...schedules.pipeline import Pipeline
from .channels import PipelineChannels


def tied_ranks(cut: StagedGraph, order: Pipeline) -> dict[str, tuple[int, ...]]:
    """Shared parameter -> the ranks that hold it. Stages of one rank hold one and the same, and need no message."""
    homes = order.homes()
    ranks = {name: tuple(sorted({homes[s] for s in stages})) for name, stages in sorted(cut.shared.items())}
    return {name: at for name, at in ranks.items() if len(at) > 1}


def sum_tied_gradients(
    parameters: Mapping[str, torch.Tensor], held_by: Mapping[str, tuple[int, ...]], wires: PipelineChannels
) -> None:
    """After all backwards: every holder gets the sum, added in the order of the ranks, so that all have the same bits.

    Each sends to each: there are two holders as a rule, and so no group of their own has to be made. Every rank of the
    pipeline may call it; those that hold nothing shared have nothing to do. A sum over replicas may come before or
    after, but not at the same time.
    """
    summands: dict[str, dict[int, torch.Tensor]] = {}
    works = []
    for tag, (name, ranks) in enumerate(held_by.items()):
        if wires.rank not in ranks or not parameters[name].requires_grad:
            continue
        parameter = parameters[name]
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        summands[name] = {wires.rank: own}
        for other in ranks:
            if other != wires.rank:
                summands[name][other] = torch.empty_like(own)
                works.append(wires.receive(summands[name][other], other, tag))
                works.append(wires.send(own, other, tag, "shared"))
    for work in works:
        work.wait()
    for name, parts in summands.items():
        first, *others = [parts[r] for r in sorted(parts)]
        total, held = sum(others, first), parameters[name].grad
        if held is None:
            parameters[name].grad = total
        else:
            held.copy_(total)  # in place: it may lie in a buffer that is sent next
