"""Functions that test_slowest_rank.py runs on ranks: a rank that is twice as slow as the others in one phase.

Work is simulated by sleep, so that ranks which share few cores do not slow each other down.
"""

from __future__ import annotations

import time
from typing import Any

import small_jobs
import torch
import torch.distributed as dist

from drumline.runtime.engine import Engine, initialize
from drumline.runtime.training import link_probe
from drumline.runtime.training.link_probe import LinkProbe
from drumline.runtime.training.slowest_rank import EVERY, RankComparison, RankWatch
from drumline.runtime.training.step_times import PHASES

WORK = 0.05
"""Seconds of each phase on an even rank."""


def compare(plan: str, slowed: str, rank: int, *, steps: int = 2 * EVERY, work: float = WORK) -> list[RankComparison]:
    """Train, with one rank slowed in one phase, or none; the comparisons."""
    engine = initialize(small_jobs.make("mlp"), plan)
    seconds = {phase: work * (2 if (phase, engine.rank) == (slowed, rank) else 1) for phase in (*_SLOWERS, "data")}
    undo = [slower(engine, seconds[phase]) for phase, slower in _SLOWERS.items() if phase != "network"]
    if slowed == "network":
        undo.append(_SLOWERS["network"](engine, seconds["network"]))
    watch, results = RankWatch(engine), []
    try:
        for i, batch in enumerate(_slow_data(engine, steps, seconds["data"])):
            engine.step(batch)
            numbers = engine.record.steps[-EVERY:] if i % EVERY == EVERY - 1 else ()
            result = watch.compare(numbers)
            results += [result] if result else []
    finally:
        for call in undo:
            call()
    return results


def has_links(apart: bool) -> bool:
    """Check that the ranks have links that can be timed: they are on different hosts."""
    digest = link_probe.host_digest
    if apart:
        link_probe.host_digest = lambda: bytes([dist.get_rank()] * 16)
    try:
        return LinkProbe(None, dist.get_world_size())._has_links()
    finally:
        link_probe.host_digest = digest


def _slow_data(engine: Engine, steps: int, seconds: float) -> Any:
    load = engine.stream.batch

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return load(*arguments, **named)

    engine.stream.batch = slow  # type: ignore[method-assign]
    return engine.data(steps)


def _slow_forward(engine: Engine, seconds: float) -> Any:
    return engine.model.register_forward_hook(lambda *_: time.sleep(seconds)).remove


def _slow_backward(engine: Engine, seconds: float) -> Any:
    first = next(p for p in engine.model.parameters() if p.requires_grad)

    def wait(gradient: torch.Tensor) -> None:
        time.sleep(seconds)

    return first.register_hook(wait).remove


def _slow_optimizer(engine: Engine, seconds: float) -> Any:
    return engine.optimizer.register_step_pre_hook(lambda *_: time.sleep(seconds)).remove


def _slow_network(engine: Engine, seconds: float) -> Any:
    """Everything that this rank sends is on its way longer: the others wait for it inside of their messages."""
    group: Any = dist.group.WORLD
    send, reduce = group.send, group.allreduce

    def slow_send(tensors: list[torch.Tensor], *arguments: Any) -> Any:
        time.sleep(seconds / 5 if tensors[0].nbytes > 1 else 0.0)
        return send(tensors, *arguments)

    def slow_reduce(tensors: list[torch.Tensor], *arguments: Any) -> Any:
        # the sum of losses at the end of a step: buckets are started by the backward, which would seem slow instead
        time.sleep(seconds if tensors[0].nbytes <= 64 else 0.0)
        return reduce(tensors, *arguments)

    group.send, group.allreduce = slow_send, slow_reduce
    digest = link_probe.host_digest
    link_probe.host_digest = lambda: bytes([engine.rank] * 16)  # every rank on a host of its own

    def undo() -> None:
        del group.send, group.allreduce
        link_probe.host_digest = digest

    return undo


_SLOWERS = {
    "forward": _slow_forward,
    "backward": _slow_backward,
    "optimizer": _slow_optimizer,
    "network": _slow_network,
}
assert set(_SLOWERS) | {"data"} < set(PHASES)
