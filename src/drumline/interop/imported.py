"""The content of another tool's config as values: the plan and its surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..plans.plan import Plan


@dataclass(frozen=True, slots=True)
class NamedComponent:
    """An optimizer or a schedule, by name and parameters."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossScaleSettings:
    """Loss scaling of fp16, which keeps small gradients from vanishing."""

    fixed: float = 0.0
    """0: dynamic."""
    power: int = 16
    """The initial scale is 2 to this power."""
    window: int = 1000
    """Steps without overflow after which it doubles."""
    hysteresis: int = 2
    """Overflows before it halves."""
    least: float = 1.0


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """A config as a plan and settings. `str()` lists the keys that were not simply followed."""

    plan: Plan
    batch_size: int | None = None
    """Samples per step over all ranks; None if the config leaves it open."""
    micro_size: int | None = None
    """Samples of one rank in one micro-batch."""
    optimizer: NamedComponent | None = None
    schedule: NamedComponent | None = None
    clip: float | None = None
    loss_scale: LossScaleSettings | None = None
    drop_last: bool = False
    """Whether to drop the incomplete last batch of an epoch."""
    auto: tuple[str, ...] = ()
    """Keys that the config leaves to Drumline."""
    open_keys: tuple[str, ...] = ()
    """The plan keys that are open because of them."""
    given_sizes: tuple[str, ...] = ()
    """Those of `batch_size`, `micro_size` and `micro` that the config gives; the others are derived."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Keys without effect, with the reason."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Keys unknown to the tool itself, each with the nearest known one."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"plan {self.plan}", *self.notes]
        lines += [f"left to Drumline: {', '.join(self.auto)}"] if self.auto else []
        lines += [f"no effect: {key} ({reason})" for key, reason in self.ignored.items()]
        lines += [f"unknown key: {key}. {near}".rstrip(" .") for key, near in self.unknown.items()]
        return "\n".join(lines)
