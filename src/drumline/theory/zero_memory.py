"""Model states under ZeRO by the formula of its paper: weights, gradients and optimizer on one of N devices."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import InputError


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter. The defaults are mixed precision with Adam: 2 + 2 + 12."""

    weights: float = 2.0
    """bf16 or fp16."""
    gradients: float = 2.0
    optimizer: float = 12.0
    """An fp32 copy of the weight and Adam's two moments."""


def zero_states(parameters: float, devices: int, stage: int, states: StateBytes | None = None) -> float:
    """Bytes on one device: stage 1 divides the optimizer, 2 also the gradients, 3 also the weights by `devices`."""
    if stage not in (0, 1, 2, 3):
        raise InputError(f"ZeRO stage {stage}", rule="0, 1, 2 or 3")
    if devices < 1 or parameters <= 0:
        raise InputError(f"{parameters:g} parameters on {devices} devices", rule="at least one of each")
    each = states or StateBytes()
    shares = [1 / devices if stage >= since else 1.0 for since in (3, 2, 1)]
    amounts = (each.weights, each.gradients, each.optimizer)
    return parameters * sum(amount * share for amount, share in zip(amounts, shares, strict=True))
