"""The host of a GPU, as one rank sees it while all ranks measure: copies both ways, and an update in its memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from ..clusters import HostMemory
from ..theory.roofline import MEMORY_EFFICIENCY

BYTES = 2**28
TIMES = 5
ADAM = 28
"""Bytes that Adam reads and writes per number of four bytes: value, gradient and two moments in, all but one out."""


def measure_host(device: torch.device, memory: float) -> HostMemory:
    """Rates of a rank that offloads, with `memory` bytes of the host's to itself."""
    here = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(BYTES, dtype=torch.uint8, device=device)

    def both_ways() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)

    copy = 2 * BYTES / _seconds(both_ways)
    p = torch.nn.Parameter(torch.zeros(BYTES // 16))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    optimizer.step()
    rate = ADAM * p.numel() / _seconds(lambda: optimizer.step())
    return HostMemory(memory, rate / MEMORY_EFFICIENCY, copy)  # it is priced at that share of the memory's bandwidth


def measure_workspace(device: torch.device) -> float:
    """What the libraries keep of the allocator's memory: with kernels measured before, a product and its backward show
    it once their own tensors are gone.
    """
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    gc.collect()
    torch.cuda.synchronize(device)
    return float(torch.cuda.memory_allocated(device))


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
