"""The learning-rate schedulers that DeepSpeed configs name, with the same rate at every step as in DeepSpeed.

DeepSpeed's schedulers start one step late: step 0 runs before they count, step k has the rate of iteration k - 1.
Their rates are absolute, except for WarmupCosineLR, which scales the optimizer's base rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ...core.errors import JobError, nearest
from ..learning_rates.rates import RateCurve

Rates = float | tuple[float, ...]
"""One for all parameter groups, or one for each."""


def _of_group(rates: Rates, group: int) -> float:
    return rates[group] if isinstance(rates, tuple) else rates


@dataclass(frozen=True, kw_only=True)
class _Warmup(RateCurve):
    """Base of the three warm-ups: logarithmic by default, over at least two steps."""

    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.warmup == 0, "set warmup_num_steps, not warmup")
        self._require(self.warmup_num_steps > 0, "warmup_num_steps > 0")
        self._require(self.warmup_type in ("log", "linear"), "warmup_type is log or linear")

    @property
    def _warm(self) -> int:
        return max(2, self.warmup_num_steps)

    def after(self, step: int) -> float:
        """Position at a step between the lowest (0) and the highest rate (1)."""
        iteration = max(0, step - 1)
        if iteration >= self._warm:
            return self.decay(iteration)
        return math.log(iteration + 1) / math.log(self._warm) if self.warmup_type == "log" else iteration / self._warm

    def decay(self, iteration: int) -> float:
        """The same, after the warm-up."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupLR(_Warmup):
    """Warm up from the lowest to the highest rate, then stay there."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    """Default: the optimizer's base rate."""

    def rate(self, step: int, base: float, group: int = 0) -> float:
        low = _of_group(self.warmup_min_lr, group)
        high = base if self.warmup_max_lr is None else _of_group(self.warmup_max_lr, group)
        return low + (high - low) * self.factor(step)


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """Warm-up, then linear decay to 0 at `total_num_steps`."""

    total_num_steps: int
    warmup_max_lr: Rates | None = 0.001

    def decay(self, iteration: int) -> float:
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self._warm))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(_Warmup):
    """Fractions of the base rate: warm-up from `warmup_min_ratio`, then cosine decay to `cos_min_ratio`."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def rate(self, step: int, base: float, group: int = 0) -> float:
        if step == 0:
            return 0.0
        if step - 1 >= self._warm:
            return base * self.decay(step - 1)
        return base * (self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self.after(step))

    def decay(self, iteration: int) -> float:
        passed = min(1.0, (iteration - self._warm + 1) / max(1, self.total_num_steps - self._warm))
        wave = 0.5 * (1.0 + math.cos(math.pi * passed))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOneCycle(RateCurve):
    """Linear rise and fall, then a slow decay. Sets both betas: the second to 0.99, as DeepSpeed does."""

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        second = self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size
        self._require(self.cycle_first_step_size > 0 and second > 0, "both halves of the cycle have at least one step")
        self._require(self.decay_step_size >= 0, "decay_step_size >= 0")

    @property
    def _halves(self) -> tuple[int, int]:
        first = self.cycle_first_step_size
        return first, first if self.cycle_second_step_size is None else self.cycle_second_step_size

    def after(self, step: int) -> float:
        """Height in the cycle."""
        first, second = self._halves
        place = step % (first + second)
        rising = place <= first
        height = place / first if rising else (first + second - place) / second
        later = self.cycle_second_stair_count
        stairs = self.cycle_first_stair_count if rising or later is None else later
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height

    def rate(self, step: int, base: float, group: int = 0) -> float:
        beyond = step - sum(self._halves)
        if beyond <= 0:
            return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self.after(step)
        if not self.decay_step_size:
            return self.cycle_min_lr
        return self.cycle_min_lr / (1.0 + self.decay_lr_rate * beyond / self.decay_step_size)

    def betas(self, step: int) -> tuple[float, float | None] | None:
        if not self.cycle_momentum:
            return None
        if step == 0:
            return self.cycle_min_mom, 0.99  # before its first count, DeepSpeed sets the minimum
        beyond = step - sum(self._halves)
        if beyond <= 0:
            return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self.after(step), 0.99
        decay = self.decay_mom_rate * beyond / self.decay_step_size if self.decay_step_size else 0.0
        return self.cycle_max_mom * (1.0 + decay), 0.99


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(RateCurve):
    """Grow without limit, to see which rate is too large."""

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.lr_range_test_step_size > 0, "lr_range_test_step_size > 0")

    def after(self, step: int) -> float:
        interval = step / self.lr_range_test_step_size
        return 1.0 + self.lr_range_test_step_rate * (math.floor(interval) if self.lr_range_test_staircase else interval)

    def rate(self, step: int, base: float, group: int = 0) -> float:
        return _of_group(self.lr_range_test_min_lr, group) * self.after(step)


SCHEDULERS: dict[str, Callable[..., RateCurve]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": DeepSpeedOneCycle,
    "LRRangeTest": LRRangeTest,
}
"""By their names in a config."""


def named_scheduler(kind: str, numbers: Mapping[str, Any], where: str, steps: int | None = None) -> RateCurve:
    """The curve for `scheduler.type` and `scheduler.params`; unknown keys are refused by name.

    `steps` is the length of the run, for curves that need it and configs that leave it open.
    """
    if kind not in SCHEDULERS:
        raise JobError(
            f"unknown scheduler {kind!r}", where=where, rule=", ".join(SCHEDULERS), fix=nearest(kind, SCHEDULERS)
        )
    curve: Any = SCHEDULERS[kind]
    known = {f.name: f for f in fields(curve) if f.name != "warmup"}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()}
    if steps is not None and "total_num_steps" in known:
        given.setdefault("total_num_steps", steps)
    for key in given:
        if key not in known and key != "last_batch_iteration":  # the position of a run is in its checkpoint
            raise JobError(f"unknown key {key!r} of the scheduler {kind}", where=where, fix=nearest(key, known))
    missing = [name for name, f in known.items() if f.default is MISSING and name not in given]
    if missing:
        raise JobError(f"the scheduler {kind} lacks {missing[0]!r}", where=where, rule=f"it needs {', '.join(missing)}")
    try:
        result: RateCurve = curve(**{key: value for key, value in given.items() if key in known})
    except JobError as e:
        raise JobError(e.what, where=where, rule=e.rule) from None
    except TypeError as e:
        raise JobError(f"the scheduler {kind} with {given}", where=where, rule=f"its values are numbers: {e}") from None
    return result
