"""Code of the ranks: the contestants of a case share them, each with its own model, and run blocks in turns."""

from __future__ import annotations

import cProfile
import io
import pstats
import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from drumline.comm.environment import connect

from .work import Step, Work, work_for

WARM = 4
"""Steps of each contestant before the clock runs."""
MOST = 20
"""Steps of one block at most."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Case:
    """A plan of Drumline and the contestants that do the same by hand."""

    title: str
    plan: str
    micro: int
    makers: Mapping[str, str]
    """Contestant -> `file:function` that builds it."""


@dataclass
class Results:
    """Measurements of one case on one rank."""

    steps: int = 0
    """Number of steps per block."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per step, mean over the ranks, by contestant and block."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Losses of the first steps."""


def contest(emit: Emit, case: Case, samples: int, blocks: int, seconds: float) -> Results:
    """Run all contestants of a case for about `seconds`, but at least `blocks` blocks of one step."""
    work = _begin(case, samples)
    results, runners, once = Results(), {}, 0.0
    for name, maker in case.makers.items():
        runners[name] = _build(maker, work)
        results.losses[name] = []
        for number in range(WARM):
            begin = time.perf_counter()
            results.losses[name].append(runners[name](number))
        once += time.perf_counter() - begin
    results.steps = int(_mean(max(1, min(MOST, round(seconds / blocks / once)))))
    results.seconds = {name: [] for name in runners}
    for block in range(blocks):
        for name in random.Random(block).sample(list(runners), len(runners)):
            results.seconds[name].append(_block(runners[name], WARM + block * results.steps, results.steps))
        emit({"block": block + 1})
    return results


def profiled(_: Emit, case: Case, name: str, samples: int, steps: int) -> str:
    """Profile a contestant on this rank, function by function."""
    step = _build(case.makers[name], _begin(case, samples))
    for number in range(WARM):
        step(number)
    profile = cProfile.Profile()
    profile.enable()
    for number in range(steps):
        step(WARM + number)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def _begin(case: Case, samples: int) -> Work:
    connect(backend="gloo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # parts of torch call others by their old names, in every step
    return work_for(case.plan, samples, case.micro, dist.new_group(backend="shm"))


def _build(maker: str, work: Work) -> Step:
    file, _, function = maker.partition(":")
    step: Step = getattr(import_module(f"{__package__}.{file}"), function)(work)
    return step


def _block(step: Step, first: int, steps: int) -> float:
    """Time a block: seconds per step, mean over the ranks."""
    dist.barrier()
    begin = time.perf_counter()
    for number in range(first, first + steps):
        step(number)
    return _mean((time.perf_counter() - begin) / steps)


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
