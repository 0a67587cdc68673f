"""The work of every contestant: the same GPT from the same seed, the same batches, AdamW, gradients clipped to 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpt_task import ADAMW, GPT, Size, Tokens, loss_of
from gpt_task import CLIP as CLIP

from drumline.core.job import Job
from drumline.datasets import RankBatch, Stream

SIZE = Size(context=64, width=384, heads=6, blocks=6)
"""About 10.9 million parameters."""
BLOCKS = SIZE.blocks
KEPT = 8
"""Different batches, used in turn."""

Step = Callable[[int], float]
"""Runs the step of that number, and gives the mean loss."""


@dataclass(frozen=True)
class Work:
    """One case; ranks have the same batches, because they split the model."""

    plan: str
    """Of Drumline, without its backend."""
    micro: int
    job: Job
    batches: tuple[RankBatch, ...]
    shm: Any
    """The process group on the `shm` backend; the default group is on gloo."""

    def model(self) -> GPT:
        """Build a fresh copy of the model, equal on all ranks and for all contestants."""
        torch.manual_seed(self.job.seed)
        return GPT(SIZE)

    def pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and target of a step, all micro-batches together."""
        micros = self.batches[number % KEPT].micros
        return torch.cat([m.input for m in micros]), torch.cat([m.target for m in micros])


def work_for(plan: str, samples: int, micro: int, shm: Any) -> Work:
    """Make the case's batches."""
    job = Job(
        model=partial(GPT, SIZE),
        loss=loss_of,
        optimizer=partial(torch.optim.AdamW, **ADAMW),
        data=partial(Tokens, KEPT * samples, SIZE.context),
        batch_size=samples,
        clip=CLIP,
    )
    stream = Stream(job, job.data(), micro=micro)
    return Work(plan, micro, job, tuple(stream.batch(i) for i in range(KEPT)), shm)
