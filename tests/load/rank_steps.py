"""Functions that run on ranks: many steps, with what the process holds along the way."""

from __future__ import annotations

import gc
import os

import psutil
import small_jobs
import torch
import torch.distributed as dist

import drumline as dl
from drumline.comm.environment import connect


def held_while_stepping(plan: str, marks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Resident bytes, open files and threads at each of these steps."""
    engine = dl.initialize(small_jobs.make("mlp"), plan)
    process, held = psutil.Process(), []
    for number, batch in enumerate(engine.data(marks[-1]), start=1):
        engine.step(batch)
        if number in marks:
            gc.collect()
            held.append((process.memory_info().rss, len(os.listdir("/proc/self/fd")), process.num_threads()))
    return held


def meet() -> float:
    """The sum over all ranks."""
    connect()
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)
