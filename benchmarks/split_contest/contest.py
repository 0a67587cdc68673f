"""What the ranks do: the contestants of a case live in them, each with a model of its own, and run blocks in turns."""

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
    """A plan of Drumline, and who does the same by hand."""

    title: str
    plan: str
    micro: int
    makers: Mapping[str, str]
    """Contestant -> `file:function`."""


@dataclass
class Found:
    """What one case gave, on one rank."""

    steps: int = 0
    """Of one block."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of one step, mean over the ranks, by contestant and block."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of the first steps."""


def contest(emit: Emit, case: Case, samples: int, blocks: int, seconds: float) -> Found:
    """All contestants of a case in about that many seconds, but `blocks` blocks of a step at least."""
    work = _begin(case, samples)
    found, runners, once = Found(), {}, 0.0
    for name, maker in case.makers.items():
        runners[name] = _made(maker, work)
        found.losses[name] = []
        for number in range(WARM):
            begin = time.perf_counter()
            found.losses[name].append(runners[name](number))
        once += time.perf_counter() - begin
    found.steps = int(_mean(max(1, min(MOST, round(seconds / blocks / once)))))
    found.seconds = {name: [] for name in runners}
    for block in range(blocks):
        for name in random.Random(block).sample(list(runners), len(runners)):
            found.seconds[name].append(_block(runners[name], WARM + block * found.steps, found.steps))
        emit({"block": block + 1})
    return found


def profiled(_: Emit, case: Case, name: str, samples: int, steps: int) -> str:
    """Where a contestant spends its time on this rank, function by function."""
    step = _made(case.makers[name], _begin(case, samples))
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


def _made(maker: str, work: Work) -> Step:
    file, _, function = maker.partition(":")
    step: Step = getattr(import_module(f"{__package__}.{file}"), function)(work)
    return step


def _block(step: Step, first: int, steps: int) -> float:
    """Seconds of a step, mean over the ranks."""
    dist.barrier()
    begin = time.perf_counter()
    for number in range(first, first + steps):
        step(number)
    return _mean((time.perf_counter() - begin) / steps)


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
