"""`dl.profile`: a model as layers with their work, bytes, parameters and saved activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import load_profile

if TYPE_CHECKING:
    from ..models import Profile
    from .inputs import ModelInput


def profile(
    job: ModelInput,
    *,
    batch: int | None = None,
    precision: str = "",
    device: str = "cpu",
    data_flow: bool = False,
) -> Profile:
    """Trace a job without allocating its model; a zoo model is computed by formula, `profile.json` is loaded.

    `precision` (`bf16`, `fp16`) traces the casts that a `device` of that kind makes. `batch` replaces the batch size.
    With `data_flow` the profile of a job has the graph of its forward: operators, and the values between them.
    """
    return load_profile(job, batch=batch, precision=precision, device=device, data_flow=data_flow)
