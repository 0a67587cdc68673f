"""What a GPU's host takes to start an operator, by small steps that it bounds; and how fast that host is right now.

A host that is shared with others is now a third faster and now a third slower, for parts of a second or for minutes. So
the kinds of steps are taken in turns, all along the measurement, and what one costs beside another is told by turns
that were taken together. A look at the plain one before a run tells how the host is doing then.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..clusters import DeviceSpec
from ..core.job import Job
from ..costs.entries import CAST, entries
from ..costs.pace import LOOK
from ..costs.work import ENTRY
from ..runtime.memory.recompute import recompute
from ..runtime.memory.selective import recompute_selectively
from ..tracing import trace
from ..tracing.fused import prefer_fused
from .blocks import Attention, Recurrent, steps_of
from .shapes import computing_in

LAYERS = 12
"""Blocks of the model: many, because what a host has just done once more it does faster than what it does next."""
WARM, TURNS, BEFORE = 3, 3, 48
"""Steps that are not counted; turns before and after a measurement, beside those amid it; steps of a look before a run,
most of a second."""
LASTS = 0.6
"""How much of what a look sees, as a logarithm, is there in the run after it: docs/gpu.md."""
PLAIN, HALF, FULL, WATCHED, RECURRENT = "plain", "half", "full", "watched", "recurrent"
CELLS = 64, 4
"""Steps and layers of a recurrent layer."""


def _job() -> Job:
    """Large enough to run the kernels that large models run, and small enough that the GPU waits for its host."""
    return steps_of(partial(Attention, 512, 8), (512, 512), 2, LAYERS)


def _recurrent() -> Job:
    """As small, a recurrent layer: thousands of kernels, of which a host tells without Python."""
    return steps_of(partial(Recurrent, 256, CELLS[1]), (CELLS[0], 256), 16, 1)


@dataclass(frozen=True, slots=True)
class _Seconds:
    """What the host takes for the parts of a small step."""

    forward: float
    backward: float
    update: float = 0.0

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class Starts:
    """Small steps on one GPU: plain, with autocast, recomputed fully, recomputed selectively, of a recurrent layer."""

    def __init__(self, device: torch.device) -> None:
        job = _job()
        self._steps = {
            PLAIN: _Small(job, device),
            HALF: _Small(job, device, half=True),
            FULL: _Small(job, device, recompute),
            WATCHED: _Small(job, device, lambda model: recompute_selectively(model, "cuda")),
            RECURRENT: _Small(_recurrent(), device),
        }
        self._turns: list[dict[str, _Seconds]] = []
        profile, half = (trace(job, precision=name, device="cuda") for name in ("tf32", "bf16"))
        self._tensors = profile.tensors
        self._count = {
            way: sum(op.count for x in profile.each() for op in x.ops if op.phase == way)
            for way in ("forward", "backward")
        }
        self._inside = sum(op.count for x in profile.each() for op in x.ops if op.phase == "forward" and x.composite)
        self._entries = sum(map(entries, profile.each()))
        self._casts = sum(op.count for x in half.each() for op in x.ops if op.name == CAST)
        for _ in range(WARM):
            self._turn()
        self.look()

    def take(self) -> None:
        """One more turn."""
        self._turns.append(self._turn())

    def look(self) -> dict[str, float]:
        """Take some more turns. `Device.start` by all of them: modules, views and autograd are in it."""
        for _ in range(TURNS):
            self.take()

        def middle(of: Callable[[dict[str, _Seconds]], float]) -> float:
            return max(0.0, statistics.median(map(of, self._turns)))

        return {
            ENTRY: middle(lambda t: t[PLAIN].forward) / self._entries,
            "forward": middle(lambda t: t[PLAIN].forward) / self._count["forward"],
            "backward": middle(lambda t: t[PLAIN].backward) / self._count["backward"],
            "cast": middle(lambda t: t[HALF].both - t[PLAIN].both) / max(1, self._casts),
            "update": middle(lambda t: t[PLAIN].update) / self._tensors,
            "again": middle(lambda t: t[FULL].both - t[PLAIN].both - t[PLAIN].forward) / (2 * LAYERS),
            "watched": middle(lambda t: t[WATCHED].both - t[FULL].both + t[PLAIN].forward) / (2 * max(1, self._inside)),
            "recurrent": middle(lambda t: t[RECURRENT].forward) / math.prod(CELLS),
            "recurrent_backward": middle(lambda t: t[RECURRENT].backward) / math.prod(CELLS),
            LOOK: middle(lambda t: t[PLAIN].both),
        }

    def _turn(self) -> dict[str, _Seconds]:
        with computing_in("tf32"):
            return {name: step() for name, step in self._steps.items()}


def host_pace(measured: DeviceSpec, device: torch.device) -> float | None:
    """How many times as long as when it was measured the host of a GPU will take in a run that begins now.

    None where that is not known: nothing was measured by which to tell, or a model fills the GPU and leaves no room for
    a small one. Nothing of the look stays in the GPU's memory, nor in its peak.
    """
    then = measured.host_overhead.get(LOOK)
    if not then:
        return None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), computing_in("tf32"):
            step = _Small(_job(), device)
            times = [step.passes().both for _ in range(WARM + BEFORE)]
        del step
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return float((statistics.median(times[WARM:]) / then) ** LASTS)


class _Small:
    """A small step; before each of its parts the GPU has done what it was told."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
        *,
        half: bool = False,
    ) -> None:
        self._job, self._device, self._half = job, device, half
        with device:
            self._model = job.model()
            self._x = torch.randn(job.batch_size, *job.data()[0][0].shape)
        prepare(self._model)

    @functools.cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        return prefer_fused(self._job.optimizer(self._model.parameters()))

    def __call__(self) -> _Seconds:
        """Take it."""
        found = self.passes(keep=True)
        start = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return replace(found, update=time.perf_counter() - start)

    def passes(self, *, keep: bool = False) -> _Seconds:
        """Its forward and backward alone; the gradients are there afterwards if they are to be kept."""
        times = [self._settled()]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._half):
            loss: Any = self._job.loss(self._model(self._x), self._x)
        times.append(self._settled())
        loss.backward()
        times.append(self._settled())
        if not keep:
            self._model.zero_grad()
        return _Seconds(*(b - a for a, b in itertools.pairwise(times)))

    def _settled(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()
