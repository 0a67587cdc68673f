"""Times the actions of a pipeline's last steps on this rank, and computes the bubble from the timings of all ranks.

The bubble is the share of a pipeline step in which ranks wait for each other instead of computing: at the beginning,
between actions, and at the end, until the last rank is done. So it takes the timings of all ranks for the same step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...costs.pipeline_clock import time_pipeline
from ...costs.steady_pipeline import StageSeconds, steady_seconds
from ...schedules.pipeline import Action, Pipeline

KEPT_STEPS = 64
"""Number of recent steps kept."""

Mark = Any
"""A moment: seconds of the host's clock, or a CUDA event."""


@dataclass(frozen=True, slots=True)
class LaneTiming:
    """One step of one rank."""

    seconds: float
    """From the start of the step to the end of its last action."""
    busy: float
    """Seconds of these spent computing."""
    actions: dict[str, float]
    """Mean seconds by action; `F2` is the forward of stage 2."""


@dataclass(slots=True)
class _Running:
    start: Mark
    end: Mark = None
    actions: list[tuple[Action, Mark, Mark]] = field(default_factory=list)


class PipelineClock:
    """Timings of the last steps of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: deque[_Running] = deque(maxlen=KEPT_STEPS)
        self._timed = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the lane of a step; a step that fails is dropped."""
        running = _Running(self._now())
        self._steps.append(running)
        try:
            yield
        except BaseException:
            self._steps.pop()
            raise
        running.end = self._now()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Around the computation of an action, which begins when its inputs have arrived."""
        start = self._now()
        yield
        if self._timed:
            self._steps[-1].actions.append((action, start, self._now()))

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Around actions that are no step of their own."""
        self._timed = False
        try:
            yield
        finally:
            self._timed = True

    def lanes(self, last: int) -> list[LaneTiming]:
        """The last steps that are kept, `last` at most, oldest first."""
        return [self._lane(s) for s in list(self._steps)[-last:]] if last > 0 else []

    def _lane(self, step: _Running) -> LaneTiming:
        each: dict[str, list[float]] = {}
        for action, a, b in step.actions:
            each.setdefault(f"{action.kind}{action.stage}", []).append(self._seconds(a, b))
        busy = sum(sum(times) for times in each.values())
        return LaneTiming(self._seconds(step.start, step.end), busy, {k: statistics.fmean(v) for k, v in each.items()})

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Mark, end: Mark) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def measured_bubble(ranks: Sequence[Sequence[LaneTiming]]) -> float | None:
    """The median bubble over the steps, from the lanes of all ranks; None if no step was measured.

    Ranks begin a step together, because they have just reduced the loss; it ends when the last rank is done. Where the
    pipeline does not drain they are at different batches, but each step takes all of them equally long.
    """
    steps = list(zip(*ranks, strict=False))
    shares = [1 - statistics.fmean(x.busy for x in lanes) / max(x.seconds for x in lanes) for lanes in steps]
    return max(0.0, statistics.median(shares)) if shares else None


def order_bubble(order: Pipeline, ranks: Sequence[Sequence[LaneTiming]], micros: int = 1) -> float | None:
    """The bubble of the order itself, with the measured times of the stages, if messages took no time.

    `micros` are those of a step, where the order does not drain between steps and has several of them.
    """
    samples: dict[str, list[float]] = {}
    for lane in (lane for lanes in ranks for lane in lanes):
        for name, seconds in lane.actions.items():
            samples.setdefault(name, []).append(seconds)
    times = {
        kind: [statistics.median(samples.get(f"{kind}{s}", (0.0,))) for s in range(order.stages)] for kind in "FBWU"
    }
    if not samples:
        return None
    if not order.has_updates:
        return time_pipeline(order, forward=times["F"], backward=times["B"], weight=times["W"]).bubble
    free = StageSeconds(times["F"], times["B"], [0.0] * (order.stages - 1), times["U"])
    whole = order.stages * steady_seconds(order, micros, free)
    busy = sum(micros * (f + b) + u for f, b, u in zip(free.forward, free.backward, free.update, strict=True))
    return 1 - busy / whole if whole else 0.0
