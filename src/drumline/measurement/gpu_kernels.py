"""Kernels of a GPU in all types of plans, its workspace, and its host memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from ..clusters import HostMemory
from ..theory.roofline import BYTES_PER_VALUE, MEMORY_EFFICIENCY
from .gpu_elementwise import measure_elementwise, measure_updates
from .gpu_shapes import TYPES, measure_shapes
from .kernels import KernelTimings, points_by_work
from .resume_journal import ResumeJournal
from .timing import RateLimited

ELEMENTWISE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types in which memory-bound kernels are measured; others reach about the same bytes per second."""

HOST_GAP_S = 2.0
"""Seconds between two small steps that measure the host, taken between the kernels."""


def measure_gpu(
    device: torch.device, report: Callable[[str], None], journal: ResumeJournal, between: Callable[[], None]
) -> KernelTimings:
    """Measure this rank's GPU, or resume it. `between` is called every few seconds between kernels."""
    often = RateLimited(between, HOST_GAP_S)
    shapes = {name: measure_shapes(device, name, report, journal, often) for name in TYPES}
    points = {name: points_by_work(timings, BYTES_PER_VALUE.get(name, 4)) for name, timings in shapes.items()}
    report("memory")
    for name, dtype in ELEMENTWISE_TYPES.items():
        points[name] = (
            points[name] + measure_elementwise(device, dtype, journal, often) + measure_updates(device, dtype)
        )
    torch.cuda.empty_cache()
    return KernelTimings(points, shapes)


COPY_BYTES = 2**28
REPEATS = 5
ADAM_BYTES = 28
"""Bytes that Adam reads and writes per 4-byte number: value, gradient and two moments in, all but one out."""


def measure_host_memory(device: torch.device, memory: float) -> HostMemory:
    """Rates of a rank that offloads to `memory` bytes of host memory."""
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def both_ways() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)

    copy = 2 * COPY_BYTES / _seconds(both_ways)
    p = torch.nn.Parameter(torch.zeros(COPY_BYTES // 16))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    optimizer.step()
    rate = ADAM_BYTES * p.numel() / _seconds(lambda: optimizer.step())
    return HostMemory(memory, rate / MEMORY_EFFICIENCY, copy)  # priced at that share of the bandwidth


def measure_workspace(device: torch.device) -> float:
    """Memory that the libraries keep allocated: what remains after a matmul and its backward, once kernels have run."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    gc.collect()
    torch.cuda.synchronize(device)
    return float(torch.cuda.memory_allocated(device))


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
