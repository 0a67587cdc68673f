"""Host overhead of a GPU: launch time per operator, from small steps that the host bounds; and the host's speed now.

A shared host varies by a third in both directions, for fractions of a second or minutes. So all kinds of steps are
taken in turns during the measurement, and compared within a turn. Plain steps in a row before a run show the current
speed, compared with plain steps in a row at the beginning and the end of the measurement: in a row they are faster.
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
from ..costs.kernel_time import BACKWARD_CALL, CAST, HOST_CALL, backward_calls, host_calls
from ..costs.what_if import SPEED_PROBE
from ..runtime.memory.recompute import recompute
from ..runtime.memory.selective import recompute_selectively
from ..tracing import trace
from ..tracing.optimizer import prefer_fused
from .gpu_shapes import float32_precision
from .in_step_slowdown import AttentionBlock, RecurrentBlock, block_job

LAYERS = 12
"""Blocks of the model: many, because a host repeats the same block faster than it runs the next one."""
WARM, TURNS, BEFORE = 3, 3, 48
"""Uncounted steps; turns before and after a measurement, besides those during it; steps of a probe, which take most of
a second."""
PERSISTENCE = 0.6
"""Share of a probed slowdown, as a logarithm, that remains in the run: docs/gpu.md."""
PLAIN, HALF, FULL, SELECTIVE, RECURRENT = "plain", "half", "full", "selective", "recurrent"
CELLS = 64, 4
"""Time steps and layers of the recurrent model."""


def _job() -> Job:
    """Large enough to run the kernels of large models, small enough that the GPU waits for its host."""
    return block_job(partial(AttentionBlock, 512, 8), (512, 512), 2, LAYERS)


def _recurrent() -> Job:
    """A small recurrent model: thousands of kernels, launched without Python."""
    return block_job(partial(RecurrentBlock, 256, CELLS[1]), (CELLS[0], 256), 16, 1)


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Host seconds of the parts of a small step."""

    forward: float
    backward: float
    update: float = 0.0

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class HostOverheadSteps:
    """Small steps on one GPU: plain, with autocast, fully recomputed, selectively recomputed, recurrent."""

    def __init__(self, device: torch.device) -> None:
        job = _job()
        self._steps = {
            PLAIN: _Small(job, device),
            HALF: _Small(job, device, half=True),
            FULL: _Small(job, device, recompute),
            SELECTIVE: _Small(job, device, lambda model: recompute_selectively(model, "cuda")),
            RECURRENT: _Small(_recurrent(), device),
        }
        self._turns: list[dict[str, _Seconds]] = []
        self._probes: list[float] = []
        profile, half = (trace(job, precision=name, device="cuda") for name in ("tf32", "bf16"))
        self._tensors = profile.tensors
        self._count = {
            phase: sum(op.count for x in profile.each() for op in x.ops if op.phase == phase)
            for phase in ("forward", "backward")
        }
        self._inside = sum(op.count for x in profile.each() for op in x.ops if op.phase == "forward" and x.composite)
        self._entries = sum(map(host_calls, profile.each()))
        self._backward_entries = sum(map(backward_calls, profile.each()))
        self._casts = sum(op.count for x in half.each() for op in x.ops if op.name == CAST)
        for _ in range(WARM):
            self._turn()
        self.measure()

    def take(self) -> None:
        """Take one more turn."""
        self._turns.append(self._turn())

    def measure(self) -> dict[str, float]:
        """Take some more turns; returns `DeviceSpec.host_overhead` by all turns, with modules, views and autograd."""
        for _ in range(TURNS):
            self.take()
        with float32_precision("tf32"):
            self._probes.append(_in_a_row(self._steps[PLAIN]))

        def middle(of: Callable[[dict[str, _Seconds]], float]) -> float:
            return max(0.0, statistics.median(map(of, self._turns)))

        return {
            HOST_CALL: middle(lambda t: t[PLAIN].forward) / self._entries,
            BACKWARD_CALL: middle(lambda t: t[PLAIN].backward) / self._backward_entries,
            "forward": middle(lambda t: t[PLAIN].forward) / self._count["forward"],
            "backward": middle(lambda t: t[PLAIN].backward) / self._count["backward"],
            "cast": middle(lambda t: t[HALF].both - t[PLAIN].both) / max(1, self._casts),
            "update": middle(lambda t: t[PLAIN].update) / self._tensors,
            "recompute": middle(lambda t: t[FULL].both - t[PLAIN].both - t[PLAIN].forward) / (2 * LAYERS),
            "selective_recompute": middle(lambda t: t[SELECTIVE].both - t[FULL].both + t[PLAIN].forward)
            / (2 * max(1, self._inside)),
            "recurrent": middle(lambda t: t[RECURRENT].forward) / math.prod(CELLS),
            "recurrent_backward": middle(lambda t: t[RECURRENT].backward) / math.prod(CELLS),
            SPEED_PROBE: statistics.geometric_mean(self._probes),
        }

    def _turn(self) -> dict[str, _Seconds]:
        with float32_precision("tf32"):
            return {name: step() for name, step in self._steps.items()}


def host_slowdown(measured: DeviceSpec, device: torch.device) -> float | None:
    """Expected host time in a run that begins now, relative to when the host was measured.

    None if unknown: there is no reference, or a model fills the GPU and leaves no room for a small one. The probe
    leaves no trace in the GPU's memory or its peak.
    """
    reference = measured.host_overhead.get(SPEED_PROBE)
    if not reference:
        return None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), float32_precision("tf32"):
            now = _in_a_row(_Small(_job(), device))
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return float((now / reference) ** PERSISTENCE)


def _in_a_row(step: _Small) -> float:
    """Seconds of one of many steps, one after the other."""
    return statistics.median([step.passes().both for _ in range(WARM + BEFORE)][WARM:])


class _Small:
    """A small step whose parts each start with an idle GPU."""

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
        """Take the step."""
        seconds = self.passes(keep=True)
        start = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return replace(seconds, update=time.perf_counter() - start)

    def passes(self, *, keep: bool = False) -> _Seconds:
        """Forward and backward only; `keep` keeps the gradients."""
        times = [self._synchronized()]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._half):
            loss: Any = self._job.loss(self._model(self._x), self._x)
        times.append(self._synchronized())
        loss.backward()
        times.append(self._synchronized())
        if not keep:
            self._model.zero_grad()
        return _Seconds(*(b - a for a, b in itertools.pairwise(times)))

    def _synchronized(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()
