"""The profile of a model whose weights, gradients and optimizer states are stored in bf16."""

from __future__ import annotations

from dataclasses import replace

from ..models.profile import Profile

_STORED = 2
"""Bytes per weight under `precision=bf16-pure`."""


def stored_in(profile: Profile, precision: str) -> Profile:
    """The profile as a precision stores it. One that was traced in bf16-pure has bf16 weights already."""
    if precision != "bf16-pure" or profile.parameter_bytes <= _STORED:
        return profile
    share = _STORED / profile.parameter_bytes
    return replace(
        profile,
        parameter_bytes=_STORED,
        state_per_parameter=share * profile.state_per_parameter,
        optimizer_bytes=share * profile.optimizer_bytes,
    )
