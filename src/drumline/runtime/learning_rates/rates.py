"""Learning rates as curves: values that say what the rate of a step is, and make torch's scheduler of it.

`Job(schedule=dl.rates.Cosine(steps=1000, warmup=50))`. A curve is a function of the step alone, never of the rate
before it, so a run that is resumed at any step has exactly the rates of one that was never stopped.
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
from ...costs.batch import Scaled, batch_warning, critical_tokens, scale_rate, token_warning

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
    "Scaled",
    "Step",
    "batch_warning",
    "critical_tokens",
    "scale_rate",
    "token_warning",
]


@dataclass(frozen=True, kw_only=True)
class Curve(ABC):
    """The rate of every step. Step 0 is the first; step `warmup` is the first one with the full rate."""

    warmup: int = 0
    """Steps in which the rate grows linearly: step k has (k + 1) / (warmup + 1) of it, so none is wasted on rate 0."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int":
                self._need(isinstance(value, int) and not isinstance(value, bool), f"{f.name} is a whole number")
            elif f.type == "float":
                self._need(isinstance(value, int | float) and math.isfinite(value), f"{f.name} is a number")
        self._need(self.warmup >= 0, "warmup >= 0")

    def __call__(self, optimizer: Optimizer) -> CurveLR:
        """The scheduler of an optimizer, as `Job.schedule` wants it."""
        return CurveLR(optimizer, self)

    @abstractmethod
    def after(self, step: int) -> float:
        """The share of the optimizer's own rate, `step` steps after the warm-up."""

    def factor(self, step: int) -> float:
        """The share of the optimizer's own rate that a step has."""
        return (step + 1) / (self.warmup + 1) if step < self.warmup else self.after(step - self.warmup)

    def rate(self, step: int, base: float, group: int = 0) -> float:
        """The rate of a step for a group of parameters whose optimizer was made with the rate `base`."""
        return base * self.factor(step)

    def betas(self, step: int) -> tuple[float, float | None] | None:
        """The momentum of a step, and the second beta where the curve sets it too; None where it leaves both alone."""
        return None

    def _need(self, holds: bool, rule: str) -> None:
        if not holds:
            given = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
            raise JobError(f"{type(self).__name__}({given})", rule=rule)


class CurveLR(LRScheduler):
    """A curve on an optimizer. Its state is the step and the rates that the optimizer was made with: plain numbers."""

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of the coming step, one per group of parameters."""
        return [self.curve.rate(self.last_epoch, float(base), i) for i, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        """On to the next step. A step may not be named: a curve knows where it is."""
        if epoch is not None:
            raise JobError(f"a scheduler was told the step {epoch}", rule="step() counts by itself")
        super().step()
        self._set_momentum()

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs; it has a JSON form."""
        return {"step": self.last_epoch, "base_rates": [float(rate) for rate in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Be at the step of the state, and give the optimizer its rates."""
        step = int(state_dict["step"])
        bases: list[Any] = [float(rate) for rate in state_dict["base_rates"]]
        if len(bases) != len(self.optimizer.param_groups):
            raise JobError(
                f"the state is of {len(bases)} groups of parameters", rule=f"the optimizer has {len(self.base_lrs)}"
            )
        self.last_epoch, self._step_count, self.base_lrs = step, step + 1, bases
        rates = self.get_lr()
        self._last_lr = rates
        for group, rate, base in zip(self.optimizer.param_groups, rates, bases, strict=True):
            _set(group, "lr", rate)
            group["initial_lr"] = base
        self._set_momentum()

    def _set_momentum(self) -> None:
        found = self.curve.betas(self.last_epoch)
        if found is None:
            return
        first, second = found
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
class Constant(Curve):
    """The full rate after the warm-up."""

    def after(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _Falling(Curve, ABC):
    """Falls from 1 after the warm-up to `end` at `steps`, and stays there; the last step is still above `end`."""

    steps: int
    """Of the whole run, warm-up included."""
    end: float = 0.0
    """The share of the rate that is left."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.steps > self.warmup, f"steps > warmup: {self.steps} <= {self.warmup}")
        self._need(0.0 <= self.end <= 1.0, "0 <= end <= 1")

    def after(self, step: int) -> float:
        passed = min(1.0, step / (self.steps - self.warmup))
        return self.end + (1.0 - self.end) * self.left(passed)

    @abstractmethod
    def left(self, passed: float) -> float:
        """What is left of the fall, from 1 to 0, when a share of it has passed."""


@dataclass(frozen=True, kw_only=True)
class Cosine(_Falling):
    """Half a wave of a cosine."""

    def left(self, passed: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * passed))


@dataclass(frozen=True, kw_only=True)
class Linear(_Falling):
    """A straight line."""

    def left(self, passed: float) -> float:
        return 1.0 - passed


@dataclass(frozen=True, kw_only=True)
class Polynomial(_Falling):
    """A power of the straight line."""

    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.power > 0.0, "power > 0")

    def left(self, passed: float) -> float:
        return float((1.0 - passed) ** self.power)


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(Curve):
    """1 / sqrt(step), scaled so that it is 1 where the warm-up ends (Vaswani et al. 2017)."""

    def after(self, step: int) -> float:
        reference = max(1, self.warmup)
        return math.sqrt(reference / (reference + step))


@dataclass(frozen=True, kw_only=True)
class Step(Curve):
    """Multiplied by `by` at each step of `at`, or after every `every` steps; counted from the first step of the run."""

    by: float = 0.1
    every: int = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need((self.every > 0) != bool(self.at), "either every > 0, or at names the steps")
        self._need(self.by > 0.0, "by > 0")
        self._need(all(a < b for a, b in zip(self.at, self.at[1:], strict=False)), "at grows")

    def after(self, step: int) -> float:
        now = step + self.warmup
        return float(self.by ** (now // self.every if self.every else sum(a <= now for a in self.at)))


@dataclass(frozen=True, kw_only=True)
class Exponential(Curve):
    """Multiplied by `by` after every step that follows the warm-up."""

    by: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.by > 0.0, "by > 0")

    def after(self, step: int) -> float:
        return float(self.by**step)


@dataclass(frozen=True, kw_only=True)
class WSD(Curve):
    """Warm-up, stable, decay: the full rate, until the last `decay` steps fall to `end` (Hu et al. 2024)."""

    steps: int
    """Of the whole run."""
    decay: int
    """How many of them, at the end, fall."""
    end: float = 0.0
    shape: str = "linear"
    """Of the fall: linear, cosine, or sqrt (1 - sqrt of what has passed)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.decay > 0, "decay > 0")
        self._need(
            self.warmup + self.decay <= self.steps,
            f"warmup + decay <= steps: {self.warmup} + {self.decay} > {self.steps}",
        )
        self._need(0.0 <= self.end <= 1.0, "0 <= end <= 1")
        self._need(self.shape in ("linear", "cosine", "sqrt"), "shape is linear, cosine or sqrt")

    def after(self, step: int) -> float:
        passed = (step + self.warmup - (self.steps - self.decay)) / self.decay
        passed = min(1.0, max(0.0, passed))
        left = {"linear": 1.0 - passed, "cosine": 0.5 * (1 + math.cos(math.pi * passed)), "sqrt": 1 - math.sqrt(passed)}
        return self.end + (1.0 - self.end) * left[self.shape]


@dataclass(frozen=True, kw_only=True)
class OneCycle(Curve):
    """Up to the full rate, then far down; momentum the other way round (Smith 2018). `warmup` is the way up."""

    steps: int
    start: float = 0.04
    """The share of the rate at step 0."""
    end: float = 4e-6
    """The share of the rate at the end."""
    momentum: tuple[float, float] | None = (0.85, 0.95)
    """At the full rate, and at the lowest; None leaves the optimizer's alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(0 < self.warmup < self.steps, f"0 < warmup < steps: {self.warmup}, {self.steps}")
        self._need(0.0 <= self.end <= self.start <= 1.0, "0 <= end <= start <= 1")
        self._need(self.momentum is None or all(0.0 <= m < 1.0 for m in self.momentum), "momentum in [0, 1)")

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
        """0 at the start and at the end, 1 at the top; a wave in between."""
        passed = step / self.warmup if step < self.warmup else (self.steps - step) / (self.steps - self.warmup)
        return 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, passed))))
