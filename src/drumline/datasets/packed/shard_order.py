"""An order for packs that are larger than the memory: random, from a few shards at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

TOGETHER = 8
"""Shards whose samples are mixed. More mix better, and need more memory for the shards that are read at once."""


def shard_order(samples: Sequence[int], generator: torch.Generator, together: int = TOGETHER) -> torch.Tensor:
    """The sample numbers of an epoch: shards in random order, `together` at a time, their samples mixed.

    The order is a function of the generator's seed and the sizes of the shards alone, so it does not depend on ranks,
    workers or restarts.
    """
    starts = [0, *accumulate(samples)]
    shards = torch.randperm(len(samples), generator=generator).tolist()
    order = []
    for k in range(0, len(shards), together):
        numbers = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in shards[k : k + together]])
        order.append(numbers[torch.randperm(len(numbers), generator=generator)])
    return torch.cat(order) if order else torch.empty(0, dtype=torch.long)
