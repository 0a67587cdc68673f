"""Converts a loss or metric of a slice of the batch to a sum and a weight, to be added over the slices of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import JobError
from ...core.job import Job
from .constants import constant


def weighted_sum(job: Job, loss: Any, value: Any, target: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Sum and weight of what a loss or metric returned, and whether the job gave the weight.

    A slice without samples has weight 0.
    """
    if isinstance(loss, tuple | list):
        total, weight, own = loss[0], _number(loss[1], loss[0]), True
    elif job.sample_weight is not None:
        weight, own = _number(job.sample_weight(value, target), loss), True
        # a mean over no samples is NaN, and counts nothing
        total = torch.where(weight.to(loss.device) > 0, loss * weight.to(loss.device, loss.dtype), 0.0)
    else:
        weight, own = _number(float(samples), loss), False
        total = loss * samples
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise JobError(f"the loss is {what}", rule="the loss is one number (a mean), or (sum, weight)")
    if samples == 0:
        total, weight = torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0.0), weight * 0.0
    return _scalar(total), _scalar(weight.to(total.device)), own


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    """Its one element, without dimensions: a view of it is one more node of the autograd graph."""
    return tensor.reshape(()) if tensor.dim() else tensor


def _number(value: Any, like: Any) -> torch.Tensor:
    """A number on the device of `like`, created there: copying it to a GPU would make the host wait."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype=torch.float64)
    return constant(float(value), like) if isinstance(like, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
