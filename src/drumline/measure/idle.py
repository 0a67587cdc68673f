"""How much faster ranks of a host compute when others of them are idle: they share its cores, caches and memory."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ROUNDS, SECONDS = 4, 0.06
"""How often each number of ranks has its turn, and for how long."""


def measure_fewer(group: dist.ProcessGroup) -> dict[str, float]:
    """By how many ranks of this host work: the factor on what each takes, against all of them at once."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [k for k in (2**i for i in range(16)) if k < n] + [n]
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    x, y = torch.randn(2**18), torch.randn(2**18)
    done = torch.zeros(len(counts), dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, count in enumerate(counts):
            dist.barrier(group)
            start = time.perf_counter()
            times = 0
            while rank < count and time.perf_counter() - start < SECONDS:
                torch.mm(a, b)
                torch.add(x, y)
                times += 1
            if rank >= count:
                time.sleep(SECONDS)  # waiting for the others may take a core
            done[i] += times / (time.perf_counter() - start)
    dist.all_reduce(done, group=group)
    rates = [float(rate) / count for rate, count in zip(done, counts, strict=True)]
    return {str(count): rates[-1] / rate for count, rate in zip(counts, rates, strict=True)}
