"""Host overhead of a GPU: launch time per operator, from small steps that the host bounds; and the host's speed now.

A shared host varies by a third in both directions, for fractions of a second or minutes. So all kinds of steps are
taken in turns during the measurement, and compared within a turn. Plain steps in a row before a run show the current
speed, compared with plain steps in a row of all turns: in a row they are faster.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..clusters import DeviceSpec
from ..core.job import Job
from ..costs.kernel_time import BACKWARD_CALL, BACKWARD_CAST, HOST_CALL, backward_calls, host_calls
from ..costs.tuning import BACKWARD_CAST_CALLS, CAST_CALLS, RECURRENT_LAYERS
from ..costs.what_if import SPEED_PROBE
from ..runtime.memory.recompute import recompute
from ..runtime.memory.selective import recompute_selectively
from ..torchkit.operators import foreach_norm
from ..tracing import trace
from ..tracing.optimizer import prefer_fused
from .gpu_shapes import float32_precision
from .in_step_slowdown import AttentionBlock, RecurrentBlock, block_job

LAYERS = 12
"""Blocks of the model: many, because a host repeats the same block faster than it runs the next one."""
WARM, TURNS = 3, 3
"""Uncounted steps; turns before and after a measurement, besides those during it."""
BEFORE, PROBED = 48, 3
"""Counted steps in a row: of the probe before a run, which takes most of a second, and in every turn."""
PERSISTENCE = 0.6
"""Share of a probed slowdown, as a logarithm, that remains in the run, if there is one probe: docs/log/gpu.md."""
PLAIN, FULL, SELECTIVE, RECURRENT = "plain", "full", "selective", "recurrent"
CELLS = 64, RECURRENT_LAYERS
"""Time steps and layers of the recurrent model."""


def _job() -> Job:
    """Large enough to run the kernels of large models, small enough that the GPU waits for its host."""
    return block_job(partial(AttentionBlock, 512, 8), (512, 512), 2, LAYERS)


def _recurrent() -> Job:
    """A small recurrent model: thousands of kernels, launched without Python."""
    return block_job(partial(RecurrentBlock, 512, CELLS[1]), (CELLS[0], 512), 64, 1)


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Host seconds of the parts of a small step."""

    forward: float
    backward: float
    update: float = 0.0
    """The norm of the gradients, as the engine takes it, and the optimizer."""

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class HostOverheadSteps:
    """Small steps on one GPU: plain, fully recomputed, selectively recomputed, recurrent."""

    def __init__(self, device: torch.device) -> None:
        job = _job()
        self._steps = {
            PLAIN: _Small(job, device),
            FULL: _Small(job, device, recompute),
            SELECTIVE: _Small(job, device, lambda model: recompute_selectively(model, "cuda")),
            RECURRENT: _Small(_recurrent(), device),
        }
        self._turns: list[dict[str, _Seconds]] = []
        self._probes: list[float] = []
        profile = trace(job, precision="tf32", device="cuda")
        self._tensors = profile.tensors
        self._count = {
            phase: sum(op.count for x in profile.each() for op in x.ops if op.phase == phase)
            for phase in ("forward", "backward")
        }
        self._inside = sum(op.count for x in profile.each() for op in x.ops if op.phase == "forward" and x.composite)
        self._entries = sum(map(host_calls, profile.each()))
        self._backward_entries = sum(map(backward_calls, profile.each()))
        for _ in range(WARM):
            self._turn()
        self.measure()

    def take(self) -> None:
        """Take one more turn."""
        self._turns.append(self._turn())
        with float32_precision("tf32"):
            self._probes.append(_in_a_row(self._steps[PLAIN], PROBED))

    def measure(self) -> dict[str, float]:
        """Take some more turns; returns `DeviceSpec.host_overhead` by all turns, with modules, views and autograd."""
        for _ in range(TURNS):
            self.take()

        def middle(of: Callable[[dict[str, _Seconds]], float]) -> float:
            return max(0.0, statistics.median(map(of, self._turns)))

        entry = middle(lambda t: t[PLAIN].forward) / self._entries
        backward_entry = middle(lambda t: t[PLAIN].backward) / self._backward_entries
        return {
            HOST_CALL: entry,
            BACKWARD_CALL: backward_entry,
            # by their ratios: a difference of two noisy kinds of steps, shared by their casts, is off by a half
            "cast": CAST_CALLS * entry,
            BACKWARD_CAST: BACKWARD_CAST_CALLS * backward_entry,
            "forward": middle(lambda t: t[PLAIN].forward) / self._count["forward"],
            "backward": middle(lambda t: t[PLAIN].backward) / self._count["backward"],
            "update": middle(lambda t: t[PLAIN].update) / self._tensors,
            "recompute": middle(lambda t: t[FULL].both - t[PLAIN].both - t[PLAIN].forward) / (2 * LAYERS),
            "selective_recompute": middle(lambda t: t[SELECTIVE].both - t[FULL].both + t[PLAIN].forward)
            / (2 * max(1, self._inside)),
            "recurrent": middle(lambda t: t[RECURRENT].forward) / math.prod(CELLS),
            "recurrent_backward": middle(lambda t: t[RECURRENT].backward) / math.prod(CELLS),
            SPEED_PROBE: statistics.median(self._probes),
        }

    def _turn(self) -> dict[str, _Seconds]:
        with float32_precision("tf32"):
            return {name: step() for name, step in self._steps.items()}


class HostProbe:
    """The speed of a GPU's host now, by a small model that stays on the GPU for several probes."""

    def __init__(self, device: torch.device) -> None:
        with _own_random_numbers(device):
            self._step = _Small(_job(), device)
        self._device = device
        self._log_slowdowns: list[float] = []

    def slowdown(self, measured: DeviceSpec, steps: int) -> float | None:
        """Expected host time relative to when the host was measured, after one more probe of some steps.

        The mean of the probes counts, the more of them the more: what a single one adds to it has passed when a step
        runs. None without a reference.
        """
        reference = measured.host_overhead.get(SPEED_PROBE)
        if not reference:
            return None
        with _own_random_numbers(self._device):
            self._log_slowdowns.append(math.log(_in_a_row(self._step, steps) / reference))
        probes = len(self._log_slowdowns)
        lasting = probes / (probes + (1 - PERSISTENCE) / PERSISTENCE)
        return math.exp(lasting * statistics.fmean(self._log_slowdowns))


def host_slowdown(measured: DeviceSpec, device: torch.device) -> float | None:
    """Expected host time in a run that begins now, relative to when the host was measured.

    None if unknown: there is no reference, or a model fills the GPU and leaves no room for a small one. The probe
    leaves no trace in the GPU's memory or its peak.
    """
    if SPEED_PROBE not in measured.host_overhead:
        return None
    try:
        return HostProbe(device).slowdown(measured, BEFORE)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Around a probe: the caller's random numbers stay as they are, and float32 is computed as in the measurement."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), float32_precision("tf32"):
        yield


def _in_a_row(step: _Small, steps: int = BEFORE) -> float:
    """Seconds of one of many steps, one after the other."""
    return statistics.median([step.passes().both for _ in range(WARM + steps)][WARM:])


class _Small:
    """A small step whose parts each start with an idle GPU."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
    ) -> None:
        self._job, self._device = job, device
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
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)), dtype=torch.float64)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return replace(seconds, update=time.perf_counter() - start)

    def passes(self, *, keep: bool = False) -> _Seconds:
        """Forward and backward only; `keep` keeps the gradients."""
        times = [self._synchronized()]
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
