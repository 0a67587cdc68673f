"""How fast the machine is right now, against when it was measured. Machines that are shared speed up and slow down."""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist

from ..cluster import Device
from .clock import settle

ROUNDS = 24
"""Short looks, spread over a second, so that one disturbance does not decide."""


def speed(curves: Device, device: torch.device, *, rounds: int = ROUNDS) -> float:
    """The ranks' speed now over their measured speed, by a matmul and a stream: the mean of the ranks.

    That a step waits for the slowest of them is priced by itself (`Cluster.straggle`).
    """
    a, b = torch.randn(1024, 256, device=device), torch.randn(256, 256, device=device)
    x, y = torch.randn(2**18, device=device), torch.randn(2**18, device=device)
    matmul, stream = curves.curve_of("matmul", "fp32"), curves.curve_of("pointwise", "fp32")
    if matmul is None or stream is None:
        return 1.0
    ratios = []
    if dist.is_initialized():
        dist.barrier()
    for _ in range(rounds):
        work = _rate(lambda: a @ b, 2.0 * 1024 * 256 * 256, device) / matmul.at(2.0 * 1024 * 256 * 256)
        moved = _rate(lambda: x + y, 3.0 * 4 * 2**18, device) / stream.at(3.0 * 4 * 2**18)
        ratios.append(work**0.75 * moved**0.25)  # a step is mostly products
        time.sleep(0.02)
    share = statistics.mean(ratios)
    if dist.is_initialized():
        total = torch.tensor([share], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        share = float(total.item()) / dist.get_world_size()
    return share if math.isfinite(share) and share > 0 else 1.0


def _rate(action: object, size: float, device: torch.device) -> float:
    assert callable(action)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        action()
        settle(device.type)
        times.append(time.perf_counter() - start)
    return size / statistics.median(times)
