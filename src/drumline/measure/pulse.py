"""How fast the machine is right now, against when it was measured. Machines that are shared speed up and slow down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..cluster import Device
from .clock import settle
from .shared import crowding

ROUNDS = 24
"""Short looks, spread over a second, so that one disturbance does not decide."""


SIZES = {"matmul": 2.0 * 1024 * 256 * 256, "pointwise": 3.0 * 4 * 2**20}
"""What is looked at, by the kernel whose curve tells how fast it was, and its size."""
OTHERS = 2**20
"""Values of other memory that are touched before each product: what slows a step may be the memory."""
OWN = {"matmul": "pulse_matmul", "pointwise": "pulse_pointwise"}
"""The curves that a CPU's measurement leaves of the very same looks; other curves are of many shapes."""
PRODUCTS = 0.75
"""A step is mostly products."""


def speed(curves: Device, device: torch.device, *, rounds: int = ROUNDS) -> float:
    """The ranks' speed now over their measured speed, by a matmul and a stream: the mean of the ranks.

    That a step waits for the slowest of them is priced by itself (`Cluster.straggle`).
    """
    then = {}
    for kernel, size in SIZES.items():
        curve = curves.curve_of(OWN[kernel], "fp32") or curves.curve_of(kernel, "fp32")
        if curve is None:
            return 1.0
        then[kernel] = curve.at(size)
    ratios = [
        (now["matmul"] / then["matmul"]) ** PRODUCTS * (now["pointwise"] / then["pointwise"]) ** (1 - PRODUCTS)
        for now in looks(device, rounds)
    ]
    share = statistics.mean(ratios)
    if dist.is_initialized():
        total = torch.tensor([share], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        share = float(total.item()) / dist.get_world_size()
    return share if math.isfinite(share) and share > 0 else 1.0


def looks(device: torch.device, rounds: int) -> list[dict[str, float]]:
    """Rates of the kernels, again and again. All ranks look at once."""
    a, b = torch.randn(1024, 256, device=device), torch.randn(256, 256, device=device)
    x, y = torch.randn(2**20, device=device), torch.randn(2**20, device=device)
    others = torch.ones(OTHERS if device.type == "cpu" else 0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    crowded = device.type == "cpu" and crowding(ranks, torch.get_num_threads()) > 1
    found = []
    for i in range(rounds):
        if ranks > 1 and (crowded or i == 0):
            dist.barrier()  # ranks that share cores are as slow as in a step only while all of them compute
        matmul = _rate(lambda: a @ b, SIZES["matmul"], others, device, crowded)
        found.append({"matmul": matmul, "pointwise": _rate(lambda: x + y, SIZES["pointwise"], others, device, crowded)})
        time.sleep(0.02)
    return found


def _rate(
    action: Callable[[], object], size: float, others: torch.Tensor, device: torch.device, crowded: bool
) -> float:
    """The median of some repeats; where ranks take turns on a core their mean, since waiting is a part of it."""
    times = []
    for _ in range(5):
        others.add_(1.0)
        start = time.perf_counter()
        action()
        settle(device.type)
        times.append(time.perf_counter() - start)
    return size / (statistics.mean if crowded else statistics.median)(times)
