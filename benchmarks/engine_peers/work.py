"""The work of every contestant: the same model from the same seed, the same batches, AdamW, gradients clipped to 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_task import ADAMW as ADAMW
from gpt_task import CLIP as CLIP
from gpt_task import VOCABULARY, Tokens
from gpt_task import loss_of as loss_of
from torch import nn

from drumline.core.job import Job
from drumline.datasets import RankBatch, Stream

CONTEXT, WIDTH, HEADS, BLOCKS = 32, 384, 6, 6
KEPT = 8
"""Different batches, used in turn: loading data is no part of the contest."""

Step = Callable[[int], float]
"""Runs the step of that number, and gives the mean loss over the ranks."""


class Refused(Exception):
    """A contestant cannot take part; the text is printed in its row."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """About 10.9 million parameters; no dropout, so that all contestants compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Work:
    """One case on this rank."""

    stage: int
    """0: every rank has all; 1: the optimizer's state is sharded; 2: the gradients too; 3: the parameters too."""
    samples: int
    """Of one rank in one step."""
    batches: tuple[RankBatch, ...]
    """This rank's."""
    job: Job
    shm: Any
    """The process group on the `shm` backend; the default group is on gloo."""

    def model(self) -> GPT:
        """Build a fresh copy of the model, equal on all ranks and for all contestants."""
        torch.manual_seed(self.job.seed)
        return GPT()

    def pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and target of a step."""
        micro = self.batches[number % KEPT].micros[0]
        return micro.input, micro.target


def work_for(stage: int, samples: int, shm: Any) -> Work:
    """Make the case's batches on this rank."""
    p = dist.get_world_size()
    job = Job(
        model=GPT,
        loss=loss_of,
        optimizer=partial(torch.optim.AdamW, **ADAMW),
        data=partial(Tokens, KEPT * samples * p, CONTEXT),
        batch_size=samples * p,
        clip=CLIP,
    )
    stream = Stream(job, job.data(), dp=p, index=dist.get_rank())
    return Work(stage, samples, tuple(stream.batch(i) for i in range(KEPT)), job, shm)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Average the loss over the ranks, as training loops log it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
