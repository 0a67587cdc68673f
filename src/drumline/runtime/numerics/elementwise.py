"""Checks whether an optimizer can be sharded, by trying it on a whole tensor and on its halves."""

from __future__ import annotations

import torch
from torch import nn

from ...core.errors import PlanError
from ...core.job import Job
from ...torchkit.fake_tensors import with_real_tensors


def check_elementwise(job: Job, plan: str) -> None:
    """Refuse, by name, an optimizer whose update of an element depends on other elements (LAMB, Muon, ...)."""
    with with_real_tensors():
        name, difference = _difference(job)
    if difference is not None and difference > 1e-9:
        raise PlanError(
            f"{name} cannot be sharded",
            where=f"plan {plan}",
            rule="the update of a shard must equal the shard of the update; "
            f"on a matrix and its halves they differ by {difference:.1e}",
            fix="zero=0, or an element-wise optimizer such as AdamW",
        )


def _difference(job: Job) -> tuple[str, float | None]:
    """The optimizer's name, and the largest difference between updating a matrix and updating its two halves."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    whole = [nn.Parameter(start.clone())]
    halves = [nn.Parameter(start[:3].clone()), nn.Parameter(start[3:].clone())]
    name = "the optimizer"
    try:
        for parameters in (whole, halves):
            optimizer = job.optimizer(parameters)
            name = type(optimizer).__name__
            gradients = torch.Generator().manual_seed(1)
            for _ in range(3):
                g = torch.randn(8, 6, dtype=torch.float64, generator=gradients)
                for p, part in zip(parameters, [g] if len(parameters) == 1 else [g[:3], g[3:]], strict=True):
                    p.grad = part.clone()
                optimizer.step()
    except Exception as e:
        raise PlanError(
            f"{name} cannot be shown to be element-wise: {type(e).__name__}: {str(e)[:120]}",
            rule="where a plan shards the optimizer, its update is tried on a matrix and on its halves",
            fix="zero=0",
        ) from e
    return name, float((whole[0] - torch.cat([halves[0], halves[1]])).detach().abs().max())
