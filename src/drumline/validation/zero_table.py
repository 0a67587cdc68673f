"""ZeRO's memory table: the paper's numbers, its formula, and the cost model's peak of the same model, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..costs.memory import PeakMemory, peak_memory
from ..costs.rank_model import memory_by_layer, with_layers
from ..models import zoo
from ..models.profile import Profile
from ..plans import Plan
from ..theory.zero_memory import zero_states

ZERO_PARAMETERS, ZERO_DEVICES = 7.5e9, 64
ZERO_PUBLISHED = (120.0, 31.4, 16.6, 1.9)
"""GB on one device by stage, as the paper prints them."""
BLOCKS = 36
"""Blocks of width 4096 that make 7.5 G parameters."""


@dataclass(frozen=True, slots=True)
class ZeroRow:
    """One stage: bytes on one device."""

    stage: int
    formula: float
    parameters: int
    """Of our model."""
    peak: PeakMemory

    @property
    def states(self) -> float:
        """Parameters with their copies, gradients, optimizer."""
        return self.peak.parameters + self.peak.gradients + self.peak.optimizer

    @property
    def rest(self) -> float:
        """Activations and communication."""
        return self.peak.total - self.states

    @property
    def total(self) -> float:
        """All of it."""
        return self.peak.total

    def numbers(self) -> dict[str, float]:
        """The row for a JSON document."""
        return {"formula": self.formula, "total": self.total, **{f"ours.{k}": v for k, v in self.peak.parts().items()}}


def zero_rows() -> tuple[ZeroRow, ...]:
    """All four stages."""
    profile = _model()
    return tuple(
        ZeroRow(stage, zero_states(ZERO_PARAMETERS, ZERO_DEVICES, stage), profile.parameters, _peak(profile, stage))
        for stage in range(4)
    )


def _peak(profile: Profile, stage: int) -> PeakMemory:
    plan = Plan(dp=ZERO_DEVICES, zero=stage, precision="bf16", recompute="full")
    return peak_memory(profile, plan, 1, device="cuda")


def _model() -> Profile:
    """A GPT of 7.5 G parameters: gpt:7b with more blocks."""
    profile = zoo.profile("gpt:7b", batch_size=ZERO_DEVICES)
    layers = [replace(x, repeats=BLOCKS) if x.repeats > 1 else x for x in profile.layers]
    return with_layers(profile, layers, memory_by_layer(profile))
