"""Pipelines by hand with torch's `PipelineStage` and its schedules: two stages, cut where Drumline's plan cuts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gpt_task import GPT, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from .work import BLOCKS, CLIP, Step, Work


class First(nn.Module):
    """The embedding and the first blocks."""

    def __init__(self, model: GPT, until: int) -> None:
        super().__init__()
        self.token, self.blocks = model.token, nn.Sequential(*list(model.blocks)[:until])

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.blocks(self.token(tokens))


class Last(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: GPT, since: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*list(model.blocks)[since:])
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.blocks(x)))


def make_1f1b(work: Work) -> Step:
    """One forward, one backward."""
    return _make(work, Schedule1F1B)


def make_gpipe(work: Work) -> Step:
    """All forwards, then all backwards."""
    return _make(work, ScheduleGPipe)


def _make(work: Work, kind: Any) -> Step:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert ranks == 2, "cut into two stages"
    model = work.model()
    part: nn.Module = Last(model, BLOCKS // 2) if rank else First(model, BLOCKS // 2)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=work.micro, loss_fn=loss_of)
    optimizer = work.job.optimizer(part.parameters())

    def step(number: int) -> float:
        x, y = work.pair(number)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        # the loss, and the norm over all stages, in one message
        square = sum(p.grad.square().sum() for p in part.parameters() if p.grad is not None)
        both = torch.stack([mean, torch.as_tensor(square)])
        dist.all_reduce(both)
        torch.nn.utils.clip_grads_with_norm_(part.parameters(), CLIP, both[1].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return both[0].item()

    return step
