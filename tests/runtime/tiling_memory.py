"""Memory of a step, with tiled layers and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tiling_cases import shard
from torch import nn
from torch.profiler import ProfilerActivity, profile

from drumline.runtime.memory.tiling import tile


class Wide(nn.Module):
    """One layer of 16 MiB, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 16384, bias=False), nn.Linear(16384, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    """A vocabulary much larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 8), nn.Linear(8, 4096)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(tokens)))


def peak(step: Callable[[], Any]) -> float:
    """Peak bytes that a step allocates, from the profiler's allocator events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    most, base = 0.0, None
    pending = sorted(profiler.profiler.kineto_results.experimental_event_tree(), key=lambda e: e.start_time_ns)
    events = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            events.append(event)
    for event in sorted(events, key=lambda e: e.start_time_ns):
        total = float(event.extra_fields.total_allocated)
        base = total - float(event.extra_fields.alloc_size) if base is None else base
        most = max(most, total - base)
    return most


def peak_of_shards(n: int) -> float:
    """Of one step of the wide layer, sharded."""
    model = Wide()
    tile(model, n)
    shard(model)
    x = torch.ones(4, 256)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    step()
    return peak(step)


def peak_of_logits(n: int) -> float:
    """Of one step of the large vocabulary."""
    model = Words()
    tile(model, n)
    tokens = torch.arange(1024).view(8, 128)

    def step() -> None:
        F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 4096), tokens[:, 1:].reshape(-1)).backward()
        model.zero_grad()

    step()
    return peak(step)


LOGITS = 4 * 4096 * 65536
"""Bytes of the logits of 4096 tokens in float32."""


def peak_on_cuda(n: int, precision: str) -> int:
    """Of one step on 4096 tokens, beyond the parameters and their gradients."""
    model = nn.Sequential(nn.Embedding(65536, 64), nn.Tanh(), nn.Linear(64, 65536))
    tile(model, n)
    tokens = torch.arange(4096).view(8, 512)
    for _ in range(2):  # the first leaves gradients, and what torch keeps
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    return torch.cuda.max_memory_allocated() - before
