"""What a config of another tool asks for, as values: the plan, and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer or a schedule, by its name and numbers."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossScale:
    """How fp16 losses are scaled so that small gradients do not vanish."""

    fixed: float = 0.0
    """0: it follows the gradients."""
    power: int = 16
    """It begins at 2 to this power."""
    window: int = 1000
    """Steps without overflow after which it doubles."""
    hysteresis: int = 2
    """Overflows before it halves."""
    least: float = 1.0


@dataclass(frozen=True, slots=True)
class Imported:
    """What a config asks for. `str()` tells a person what became of every key that is not simply followed."""

    plan: Plan
    batch_size: int | None = None
    """Samples per step over all ranks; None when the config leaves it open."""
    micro_size: int | None = None
    """Samples of one rank in one micro-batch."""
    optimizer: Named | None = None
    schedule: Named | None = None
    clip: float | None = None
    loss_scale: LossScale | None = None
    drop_last: bool = False
    """Whether the ragged last batch of an epoch is left out."""
    auto: tuple[str, ...] = ()
    """Keys that the config leaves to Drumline."""
    free: tuple[str, ...] = ()
    """The keys of the plan that are open because of them."""
    stated: tuple[str, ...] = ()
    """Which of `batch_size`, `micro_size` and `micro` the config itself has a number for; the others follow."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Keys without effect here, and why."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Keys that the tool does not have either, each with the nearest that it has."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"plan {self.plan}", *self.notes]
        lines += [f"left to Drumline: {', '.join(self.auto)}"] if self.auto else []
        lines += [f"no effect: {key} ({reason})" for key, reason in self.ignored.items()]
        lines += [f"unknown key: {key}. {near}".rstrip(" .") for key, near in self.unknown.items()]
        return "\n".join(lines)
