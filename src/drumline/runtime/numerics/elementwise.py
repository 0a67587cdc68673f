"""Checks whether an optimizer can be sharded, by trying it on a whole tensor and on its halves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...core.errors import PlanError
from ...core.job import Job
from ...core.job_functions import takes_names
from ...torchkit.fake_tensors import with_real_tensors

_SIZES = (8, 6, 2, 2, 2)
"""Shape of the trial parameters; the first dim is cut."""


def check_elementwise(job: Job, plan: str, names: Mapping[str, int] | None = None) -> None:
    """Refuse, by name, an optimizer whose update of an element depends on other elements (LAMB, Muon, ...).

    One that groups parameters by name is tried on all of them: `names` are theirs, with their numbers of dims.
    """
    if names is None and takes_names(job.optimizer):
        return  # tried when the names are known
    if names is not None and not takes_names(job.optimizer):
        return  # tried before
    with with_real_tensors():
        name, difference = _difference(job, names or {"": 2})
    if difference is not None and difference > 1e-9:
        raise PlanError(
            f"{name} cannot be sharded",
            where=f"plan {plan}",
            rule="the update of a shard must equal the shard of the update; "
            f"on a matrix and its halves they differ by {difference:.1e}",
            fix="zero=0, or an element-wise optimizer such as AdamW",
        )


def _difference(job: Job, names: Mapping[str, int]) -> tuple[str, float | None]:
    """The optimizer's name, and the largest difference between updating a matrix and updating its two halves."""
    generator = torch.Generator().manual_seed(0)
    kind = "the optimizer"
    try:
        start = {
            k: torch.randn(_SIZES[: max(1, n)], dtype=torch.float64, generator=generator) for k, n in names.items()
        }
        runs = []
        for part in (slice(None), slice(0, 3), slice(3, None)):
            parameters = {name: nn.Parameter(value[part].clone()) for name, value in start.items()}
            optimizer = job.optimizer_on(parameters.items())
            kind = type(optimizer).__name__
            gradients = torch.Generator().manual_seed(1)
            for _ in range(3):
                for p, value in zip(parameters.values(), start.values(), strict=True):
                    p.grad = torch.randn(value.shape, dtype=torch.float64, generator=gradients)[part].clone()
                optimizer.step()
            runs.append(parameters)
    except Exception as e:
        raise PlanError(
            f"{kind} cannot be shown to be element-wise: {type(e).__name__}: {str(e)[:120]}",
            rule="where a plan shards the optimizer, its update is tried on a matrix and on its halves",
            fix="zero=0",
        ) from e
    whole, *halves = runs
    largest = max(float((p - torch.cat([h[k] for h in halves])).detach().abs().max()) for k, p in whole.items())
    return kind, largest
