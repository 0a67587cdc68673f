"""The model of `precision=bf16-pure`: its parameters in bf16, as soon as it is built. Buffers stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ...core.job import Job
from ...plans import Plan
from ...torchkit.modules import BatchNormBase
from ...tracing.fake import with_half_parameters
from ..state.prebuilt import PrebuiltModel


class HalfModel:
    """In the place of `Job.model`: builds the user's model, and casts its parameters."""

    def __init__(self, build: Any, keep: tuple[type[nn.Module], ...]) -> None:
        self._build, self._keep = build, keep

    def __call__(self) -> Any:
        """The model with parameters in bf16; what is not a model is refused by the caller."""
        model = self._build()
        return with_half_parameters(model, self._keep) if isinstance(model, nn.Module) else model


def with_half_weights(job: Job, plan: Plan) -> Job:
    """The job with a model in bf16, if the plan stores weights in it; a model that the user has built is cast itself.

    Torch's BatchNorm wants weights of the type of its statistics. Data-parallel plans replace its forward; a captured
    graph has torch's own, and keeps the weights of BatchNorm in float32.
    """
    if plan.precision != "bf16-pure":
        return job
    keep = (BatchNormBase,) if plan.splits_model else ()
    if isinstance(job.model, PrebuiltModel):
        with_half_parameters(job.model.model, keep)
        return job
    return replace(job, model=HalfModel(job.model, keep))
