"""How fast the machine is right now, against when it was measured. Machines that are shared speed up and slow down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..clusters import DeviceSpec
from .pace import PRODUCTS, SIZES, Look
from .shared import crowding

ROUNDS, AFTER = 32, 16
"""Rounds of looks before a run, for half a second so that one disturbance does not decide; and after it."""
IN_A_ROW = 8
"""Looks of a round, where ranks have cores of their own. Nobody rests between them: a product of two threads takes 1.7
times as long after 10 ms of sleep, a stream of one thread 1.2 times, and steps do not sleep."""
OWN = {"matmul": "pulse_matmul", "pointwise": "pulse_pointwise"}
"""The curves that a CPU's measurement leaves of such rounds amid it; other curves are of many shapes, and a single look
amid other kernels is slower than one of a row."""
AGAIN, SLOW, SLOWEST = 3, math.log(1.35), math.log(2.0)
"""How often a machine is looked at that seems to be that slow: another program may be about to end, and the fastest
look counts. And how slow a run can be by it: threads that wait for each other slow a short product more than a step."""
FLICKER = 0.35
"""How far, in logarithms, the pace of a shared core comes and goes by itself. What is beyond it lasts."""
LASTS, LASTED = 0.2, 0.3
"""The share of such a difference that is there in a run of some seconds, where it was seen before the run; and where
looks before and after the run both count. By the looks and steps of CPUs: docs/calibration.md."""


def speed(curves: DeviceSpec, device: torch.device, *, rounds: int = ROUNDS) -> float:
    """The ranks' speed now over their measured speed, by a matmul and a stream: the mean of the ranks.

    That a step waits for the slowest of them is priced by itself (`Cluster.straggle`).
    """
    then = {}
    for kernel, size in SIZES.items():
        curve = curves.curve_of(OWN[kernel], "fp32") or curves.curve_of(kernel, "fp32")
        if curve is None:
            return 1.0
        then[kernel] = size / curve.at(size)
    found: list[float] = []
    while not found or (found[-1] < -SLOW and len(found) < AGAIN):
        found.append(_share(then, looks(device, rounds), device))
    return math.exp(max(-SLOWEST, *found))


def _share(then: Mapping[str, float], seen: list[dict[str, float]], device: torch.device) -> float:
    """The logarithm of the speed, the same on all ranks."""
    share = sum(
        weight * statistics.median(math.log(then[kernel] / now[kernel]) for now in seen)
        for kernel, weight in (("matmul", PRODUCTS), ("pointwise", 1 - PRODUCTS))
    )
    if dist.is_initialized():
        total = torch.tensor([share], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        share = float(total.item()) / dist.get_world_size()
    return share


def expected(seen: float, device: torch.device) -> float:
    """The speed of a run of which `seen` is the speed before it: what flickers will be gone in part."""
    return math.exp(_kept(math.log(seen), LASTS)) if device.type == "cpu" else seen


def during(before: float, after: float, device: torch.device) -> float:
    """The speed of a run, by looks before and after it."""
    both = (math.log(before) + math.log(after)) / 2
    return math.exp(_kept(both, LASTED) if device.type == "cpu" else both)


def _kept(difference: float, share: float) -> float:
    flicker = max(-FLICKER, min(FLICKER, difference))
    return difference - (1 - share) * flicker


def looks(device: torch.device, rounds: int, *, rest: float = 0.0) -> list[dict[str, float]]:
    """Seconds of the kernels, in so many rounds. All ranks look at once. With a `rest`, single looks so far apart."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    crowded = device.type == "cpu" and crowding(ranks, torch.get_num_threads()) > 1
    look = Look(device, crowded=crowded)
    found = []
    for i in range(rounds):
        if ranks > 1 and (crowded or i == 0):
            dist.barrier()  # ranks that share cores are as slow as in a step only while all of them compute
        found.append(in_a_row(look, crowded=crowded or rest > 0))
        if rest:
            time.sleep(rest)
    return found


def in_a_row(look: Look, *, crowded: bool) -> dict[str, float]:
    """The middle of some looks, one right after the other; one where ranks share cores and meet for each."""
    row = [look() for _ in range(1 if crowded else IN_A_ROW)]
    return {kernel: statistics.median(seen[kernel] for seen in row) for kernel in SIZES}
