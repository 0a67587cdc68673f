"""Jobs that a plan cannot split, for the tests of refusals: run on ranks, and from job files."""

from __future__ import annotations

from typing import Any

import small_jobs
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.core.errors import DrumlineError
from drumline.plans import Plan
from drumline.runtime.engine import initialize
from drumline.runtime.verification.verify import verify


class Asking(nn.Module):
    """A model whose control flow depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = self.second(x)
        return self.head(x)


class Wide(nn.Module):
    """A kernel of 7 rows over images of 8: on four tiles a halo reaches beyond the neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 7, padding=3), nn.Conv2d(2, 2, 5, padding=4, dilation=2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(x))).mean((2, 3)))


class Heads(small_jobs.Attention):
    """A block with three heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 3, -1).permute(2, 0, 3, 1, 4)
        return self.mlp(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1)))


class ThreeHeads(nn.Module):
    """Words, a block, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(11, 12), Heads(12), nn.Linear(12, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.words(tokens)))


class Strips(small_jobs.Samples):
    """Images of three rows."""

    def __getitem__(self, i: int) -> Any:
        image, label = super().__getitem__(i)
        return image[:, :3], label


MODELS: dict[str, dict[str, Any]] = {
    "asking": {"name": "mlp", "model": Asking},
    "wide": {"name": "convnet", "model": Wide},
    "heads": {"name": "gpt", "model": ThreeHeads},
    "long": {"name": "convnet", "data": lambda: Strips("picture")},
}


def make(name: str) -> dl.Job:
    """One of these, or one of the small jobs."""
    return small_jobs.make(**MODELS.get(name, {"name": name}))


def refusals(cases: list[tuple[str, str]]) -> list[tuple[str, str, str, str]]:
    """On every rank: what each (job, plan) is refused with: the error's type, what, rule and fix."""
    results = []
    for name, plan in cases:
        try:
            initialize(make(name), plan)
            results.append(("runs", "", "", ""))
        except DrumlineError as e:
            results.append((type(e).__name__, e.what, e.rule, e.fix))
    return results


def errors(cases: list[tuple[str, str]]) -> list[Any]:
    """On every rank: verify each; the first rank gets the results."""
    return [verify(make(name), Plan.parse(plan), steps=2) for name, plan in cases]
