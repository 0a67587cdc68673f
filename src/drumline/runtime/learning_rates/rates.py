"""Learning-rate schedules as values: each gives the rate of every step, and makes the torch scheduler for it.

`Job(schedule=dl.rates.Cosine(steps=1000, warmup=50))`. A curve is a function of the step alone, never of the
previous rate, so a run resumed at any step has exactly the rates of an uninterrupted one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...core.errors import JobError
from ...theory.batch_scaling import ScaledLearningRate, batch_warning, critical_tokens, scale_rate, token_warning

__all__ = [
    "WSD",
    "Constant",
    "Cosine",
    "Curve",
    "CurveLR",
    "Exponential",
    "InverseSquareRoot",
    "Linear",
    "OneCycle",
    "Polynomial",
    "RateCurve",
    "ScaledLearningRate",
    "Step",
    "StepDecay",
    "batch_warning",
    "critical_tokens",
    "scale_rate",
    "token_warning",
]


@dataclass(frozen=True, kw_only=True)
class RateCurve(ABC):
    """The learning rate of every step. Step 0 is the first; step `warmup` is the first one at the full rate."""

    warmup: int = 0
    """Steps of linear warm-up: step k has (k + 1) / (warmup + 1) of the rate, so no step is wasted at rate 0."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                self._require(isinstance(value, int) and not isinstance(value, bool), f"{f.name} is a whole number")
            elif f.type == "float":
                self._require(isinstance(value, int | float) and math.isfinite(value), f"{f.name} is a number")
        self._require(self.warmup >= 0, "warmup >= 0")

    def __call__(self, optimizer: Optimizer) -> CurveLR:
        """The scheduler for an optimizer, as `Job.schedule` requires."""
        return CurveLR(optimizer, self)

    @abstractmethod
    def after(self, step: int) -> float:
        """Fraction of the base rate, `step` steps after the warm-up."""

    def factor(self, step: int) -> float:
        """Fraction of the base rate at a step."""
        return (step + 1) / (self.warmup + 1) if step < self.warmup else self.after(step - self.warmup)

    def rate(self, step: int, base: float, group: int = 0) -> float:
        """The rate of a step for a parameter group with the base rate `base`."""
        return base * self.factor(step)

    def betas(self, step: int) -> tuple[float, float | None] | None:
        """The momentum of a step, and the second beta if the curve sets it; None if it sets neither."""
        return None

    def _require(self, condition: bool, rule: str) -> None:
        if not condition:
            given = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
            raise JobError(f"{type(self).__name__}({given})", rule=rule)


class CurveLR(LRScheduler):
    """A curve applied to an optimizer. Its state is the step and the base rates: plain numbers."""

    def __init__(self, optimizer: Optimizer, curve: RateCurve) -> None:
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of the next step, one per parameter group."""
        return [self.curve.rate(self.last_epoch, float(base), i) for i, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step. Passing an epoch is refused: the curve counts by itself."""
        if epoch is not None:
            raise JobError(f"step({epoch}) of a scheduler", rule="step() takes no epoch: it counts by itself")
        super().step()
        self._set_momentum()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-serializable."""
        return {"step": self.last_epoch, "base_rates": [float(rate) for rate in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the step of the state and set the optimizer's rates."""
        step = int(state_dict["step"])
        bases: list[Any] = [float(rate) for rate in state_dict["base_rates"]]
        if len(bases) != len(self.optimizer.param_groups):
            raise JobError(
                f"the scheduler state has {len(bases)} parameter groups", rule=f"the optimizer has {len(self.base_lrs)}"
            )
        self.last_epoch, self._step_count, self.base_lrs = step, step + 1, bases
        rates = self.get_lr()
        self._last_lr = rates
        for group, rate, base in zip(self.optimizer.param_groups, rates, bases, strict=True):
            _set(group, "lr", rate)
            group["initial_lr"] = base
        self._set_momentum()

    def _set_momentum(self) -> None:
        betas = self.curve.betas(self.last_epoch)
        if betas is None:
            return
        first, second = betas
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (first, group["betas"][1] if second is None else second, *group["betas"][2:])
            elif "momentum" in group:
                group["momentum"] = first


def _set(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


@dataclass(frozen=True, kw_only=True)
class Constant(RateCurve):
    """The full rate after the warm-up."""

    def after(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _Decay(RateCurve, ABC):
    """Decays from 1 after the warm-up to `end` at `steps`, then stays there; the last step is still above `end`."""

    steps: int
    """Length of the run, warm-up included."""
    end: float = 0.0
    """Final fraction of the base rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.steps > self.warmup, f"steps > warmup: {self.steps} <= {self.warmup}")
        self._require(0.0 <= self.end <= 1.0, "0 <= end <= 1")

    def after(self, step: int) -> float:
        passed = min(1.0, step / (self.steps - self.warmup))
        return self.end + (1.0 - self.end) * self.remaining(passed)

    @abstractmethod
    def remaining(self, passed: float) -> float:
        """Remaining fraction of the decay, from 1 to 0, after the fraction `passed` of it."""


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Cosine decay."""

    def remaining(self, passed: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * passed))


@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """Linear decay."""

    def remaining(self, passed: float) -> float:
        return 1.0 - passed


@dataclass(frozen=True, kw_only=True)
class Polynomial(_Decay):
    """Polynomial decay: a power of the linear one."""

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.power > 0.0, "power > 0")

    def remaining(self, passed: float) -> float:
        return float((1.0 - passed) ** self.power)


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(RateCurve):
    """1 / sqrt(step), scaled to 1 at the end of the warm-up (Vaswani et al. 2017)."""

    def after(self, step: int) -> float:
        reference = max(1, self.warmup)
        return math.sqrt(reference / (reference + step))


@dataclass(frozen=True, kw_only=True)
class StepDecay(RateCurve):
    """Multiply by `by` at each step in `at`, or every `every` steps; counted from the first step of the run."""

    by: float = 0.1
    every: int = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require((self.every > 0) != bool(self.at), "set either every > 0 or at, not both")
        self._require(self.by > 0.0, "by > 0")
        self._require(all(a < b for a, b in zip(self.at, self.at[1:], strict=False)), "the steps of at are increasing")

    def after(self, step: int) -> float:
        now = step + self.warmup
        return float(self.by ** (now // self.every if self.every else sum(a <= now for a in self.at)))


@dataclass(frozen=True, kw_only=True)
class Exponential(RateCurve):
    """Multiply by `by` after every step that follows the warm-up."""

    by: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.by > 0.0, "by > 0")

    def after(self, step: int) -> float:
        return float(self.by**step)


@dataclass(frozen=True, kw_only=True)
class WSD(RateCurve):
    """Warm-up, stable, decay: the full rate until the last `decay` steps, which decay to `end` (Hu et al. 2024)."""

    steps: int
    """Length of the run."""
    decay: int
    """Number of decay steps at the end of the run."""
    end: float = 0.0
    shape: str = "linear"
    """Shape of the decay: linear, cosine, or sqrt (1 - sqrt of the passed fraction)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.decay > 0, "decay > 0")
        self._require(
            self.warmup + self.decay <= self.steps,
            f"warmup + decay <= steps: {self.warmup} + {self.decay} > {self.steps}",
        )
        self._require(0.0 <= self.end <= 1.0, "0 <= end <= 1")
        self._require(self.shape in ("linear", "cosine", "sqrt"), "shape is linear, cosine or sqrt")

    def after(self, step: int) -> float:
        passed = (step + self.warmup - (self.steps - self.decay)) / self.decay
        passed = min(1.0, max(0.0, passed))
        left = {"linear": 1.0 - passed, "cosine": 0.5 * (1 + math.cos(math.pi * passed)), "sqrt": 1 - math.sqrt(passed)}
        return self.end + (1.0 - self.end) * left[self.shape]


@dataclass(frozen=True, kw_only=True)
class OneCycle(RateCurve):
    """Rise to the full rate, then anneal; momentum moves the opposite way (Smith 2018). `warmup` is the rise."""

    steps: int
    start: float = 0.04
    """Fraction of the base rate at step 0."""
    end: float = 4e-6
    """Fraction of the base rate at the end."""
    momentum: tuple[float, float] | None = (0.85, 0.95)
    """Momentum at the full rate and at the lowest; None leaves the optimizer's unchanged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.warmup < self.steps, f"0 < warmup < steps: {self.warmup}, {self.steps}")
        self._require(0.0 <= self.end <= self.start <= 1.0, "0 <= end <= start <= 1")
        self._require(self.momentum is None or all(0.0 <= m < 1.0 for m in self.momentum), "momentum in [0, 1)")

    def factor(self, step: int) -> float:
        low = self.start if step < self.warmup else self.end
        return low + (1.0 - low) * self._height(step)

    def after(self, step: int) -> float:
        return self.factor(step + self.warmup)

    def betas(self, step: int) -> tuple[float, float | None] | None:
        if self.momentum is None:
            return None
        at_full, at_lowest = self.momentum
        return at_lowest + (at_full - at_lowest) * self._height(step), None

    def _height(self, step: int) -> float:
        """0 at the start and at the end, 1 at the peak; a cosine in between."""
        passed = step / self.warmup if step < self.warmup else (self.steps - step) / (self.steps - self.warmup)
        return 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, passed))))


Curve, Step = RateCurve, StepDecay
"""Earlier names of these two."""
