"""What every contestant does: the same GPT from the same seed, the same batches, AdamW, gradients clipped to 1.

Queries, keys and values have layers of their own, as those who split by hand write them; their heads are counted by
the numbers that are there, so that the same code runs on a part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drumline.data import Batch, Stream
from drumline.job import Job

CONTEXT, WIDTH, HEADS, BLOCKS, VOCABULARY = 64, 384, 6, 6, 256
CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}
KEPT = 8
"""Different batches, used in turn."""

Step = Callable[[int], float]
"""Runs the step of that number, and gives the mean loss."""


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """About 10.9 million parameters; no dropout, so that all contestants compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A sequence that a model can learn: every token follows from the one before, with some noise."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(1)
        noise = torch.randint(0, 4, (samples, CONTEXT + 1), generator=draw)
        start = torch.randint(0, VOCABULARY, (samples, 1), generator=draw)
        self.text = (start + (3 + noise).cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.text[i, :-1], self.text[i, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Work:
    """One case; ranks have the same batches, because they split the model."""

    plan: str
    """Of Drumline, without its backend."""
    micro: int
    job: Job
    batches: tuple[Batch, ...]
    shm: Any
    """The process group on the `shm` backend; the default group is on gloo."""

    def model(self) -> GPT:
        """A fresh copy, equal on all ranks and for all contestants."""
        torch.manual_seed(self.job.seed)
        return GPT()

    def pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target of a step, all micro-batches together."""
        micros = self.batches[number % KEPT].micros
        return torch.cat([m.input for m in micros]), torch.cat([m.target for m in micros])


def work_for(plan: str, samples: int, micro: int, shm: Any) -> Work:
    """Make the case's batches."""
    job = Job(
        model=GPT, loss=loss_of, optimizer=partial(torch.optim.AdamW, **ADAMW),
        data=partial(Tokens, KEPT * samples), batch_size=samples, clip=CLIP,
    )  # fmt: skip
    stream = Stream(job, job.data(), micro=micro)
    return Work(plan, micro, job, tuple(stream.batch(i) for i in range(KEPT)), shm)
