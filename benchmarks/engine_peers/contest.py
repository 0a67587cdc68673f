"""Code of the ranks: all contestants share the ranks, each with its own model, and run blocks of steps in turns."""

from __future__ import annotations

import random
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from drumline.comm.environment import connect

from .work import Refused, Step, Work, work_for

DRUMLINE, SHM, HAND, ALONE = "Drumline", "Drumline, shm", "torch by hand", "computing alone"
MAKERS = {
    DRUMLINE: "by_drumline:make",
    SHM: "by_drumline:make_shm",
    HAND: "by_hand:make",
    "DeepSpeed": "by_deepspeed:make",
    "Accelerate": "by_accelerate:make",
    "Lightning Fabric": "by_fabric:make",
    ALONE: "by_hand:make_alone",
}
"""The contestants, and who makes their step. The last one computes only: it shows what the others' sending costs."""

WARM = 4
"""Steps of each contestant before the clock runs: the first ones make the optimizer's state and the buckets."""
MOST = 20
"""Steps of one block at most."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass
class Results:
    """Measurements of one stage on one rank."""

    steps: int = 0
    """Number of steps per block."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds per step, mean over the ranks, by contestant and block."""
    loss: dict[str, float] = field(default_factory=dict)
    """Loss of the last step; all contestants run equally many."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a contestant does not take part."""


def contest(emit: Callable[[dict[str, Any]], None], stage: int, samples: int, blocks: int, seconds: float) -> Results:
    """Run all contestants of a stage for about `seconds`, but at least `blocks` blocks of one step."""
    _begin()
    # a group of its own, because the default group keeps the backend it was made with
    work = work_for(stage, samples, dist.new_group(backend="shm"))
    results = Results()
    runners: dict[str, Step] = {}
    once = 0.0
    for name, maker in MAKERS.items():
        try:
            runners[name], last = _start(maker, work)
            once += last
        except Exception as e:
            results.refused[name] = _reason(e)
        # a contestant that fails on one rank alone must not leave the others waiting for it
        if _mean(float(name in results.refused)) and name in runners:
            del runners[name]
            results.refused[name] = "it failed on another rank"
    results.steps = int(_mean(max(1, min(MOST, round(seconds / blocks / once)))))
    results.seconds = {name: [] for name in runners}
    for block in range(blocks):
        for name in random.Random(block).sample(list(runners), len(runners)):
            first = WARM + block * results.steps
            taken, results.loss[name] = _block(runners[name], first, results.steps)
            results.seconds[name].append(taken)
        emit({"block": block + 1})
    return results


def shares(emit: Callable[[dict[str, Any]], None], rounds: int) -> dict[int, float]:
    """Measure the share of communication in a step of handwritten DDP, by samples per rank."""
    _begin()
    measured: dict[int, float] = {}
    for samples in SIZES:
        work = work_for(0, samples, None)
        alone, full = (_start(MAKERS[name], work)[0] for name in (ALONE, HAND))
        pairs = [(_block(alone, WARM + i, 1)[0], _block(full, WARM + i, 1)[0]) for i in range(rounds)]
        measured[samples] = 1 - statistics.median(a / b for a, b in pairs)
        emit({"samples": samples, "share": measured[samples]})
        if max(list(measured.values())[-2:]) < 0.25 and len(measured) > 1:  # one alone may be a disturbance
            break
    return measured


def _begin() -> None:
    connect(backend="gloo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some contestants call functions of torch by their old names, in every step


def _start(maker: str, work: Work) -> tuple[Step, float]:
    """Build a contestant and run its warm-up steps; returns the seconds of the last one."""
    file, _, function = maker.partition(":")
    step: Step = getattr(import_module(f"{__package__}.{file}"), function)(work)
    for number in range(WARM):
        begin = time.perf_counter()
        step(number)
    return step, time.perf_counter() - begin


def _block(step: Step, first: int, steps: int) -> tuple[float, float]:
    """Time a block: seconds per step, mean over the ranks, and the loss of the last step."""
    dist.barrier()
    begin = time.perf_counter()
    for number in range(first, first + steps):
        loss = step(number)
    taken = (time.perf_counter() - begin) / steps
    return _mean(taken), loss


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _reason(e: Exception) -> str:
    if isinstance(e, Refused):
        return str(e)
    place = traceback.extract_tb(e.__traceback__)[-1]
    text = (str(e).strip().splitlines() or [""])[0]
    return f"{type(e).__name__}: {text[:160]} ({place.filename.rpartition('/')[2]}, line {place.lineno})"
