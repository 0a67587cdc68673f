"""BatchNorm whose statistics span all data-parallel ranks of a micro-batch, on any device.

Forward: every rank computes mean and variance of its slice; one all-gather collects them, and they are combined without
cancellation. Backward: one all-reduce of the two sums that the gradient of the input needs. A rank that runs a
placeholder sample of weight 0 does not count.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...torchkit.modules import BatchNormBase, check_input_dim


class _Normalize(torch.autograd.Function):
    """weight * (x - mean) / std + bias, with the mean and the variance of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        group: dist.ProcessGroup,
        present: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.group, ctx.present = group, present
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        x, weight, mean, invstd, count = ctx.saved_tensors
        shape = _channels(x)
        dims = [0, *range(2, x.dim())]
        total = dy.sum(dims)
        product = (dy * x).sum(dims) - mean * total  # the sum of dy (x - mean)
        affine = (None, None) if weight is None else (product * invstd, total)
        sums = torch.stack([total, product])
        if not ctx.present:
            # as zeros that depend on the gradient: a compiler would move constants into the forward, and there the
            # message would mix with those of other layers
            sums = torch.where(count < 0, sums, torch.zeros_like(sums))
        dist.all_reduce(sums, group=ctx.group)
        if not ctx.present:  # its values were not in the statistics, so the others' losses do not depend on them
            return torch.zeros_like(x), *affine, *([None] * 6)
        scale = invstd if weight is None else invstd * weight
        slope = -scale * invstd.square() * sums[1] / count
        shift = -scale * sums[0] / count - slope * mean
        dx = torch.addcmul(dy * scale.view(shape), x, slope.view(shape)).add_(shift.view(shape))
        return dx, *affine, *([None] * 6)


class SyncedBatchNorm:
    """Replaces the forward of a BatchNorm."""

    def __init__(self, module: BatchNormBase, group: dist.ProcessGroup) -> None:
        self.module, self.group, self.present = module, group, True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        check_input_dim(m, x)
        if not m.training and m.running_mean is not None:
            return self._evaluate(x)
        if x.dtype in (torch.bfloat16, torch.float16):  # statistics of half precision in float32, as in torch's own
            x = x.float()
        mean, variance, count = self._statistics(x.detach())
        if m.training and m.running_mean is not None and m.running_var is not None:
            assert m.num_batches_tracked is not None
            m.num_batches_tracked.add_(1)
            factor = m.momentum if m.momentum is not None else 1.0 / float(m.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            m.running_mean.lerp_(mean.to(m.running_mean.dtype), factor)
            m.running_var.lerp_(unbiased.to(m.running_var.dtype), factor)
        weight, bias = (None, None) if m.weight is None else (m.weight.to(x.dtype), m.bias.to(x.dtype))
        out = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch's own
            x, weight, bias, mean, variance, count, m.eps, self.group, self.present
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _evaluate(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize with the running statistics, which are never in half precision, as a gathered weight may be."""
        m = self.module
        if m.weight is None or m.running_mean is None or m.weight.dtype == m.running_mean.dtype:
            return type(m).forward(m, x)
        weight, bias = m.weight.to(m.running_mean.dtype), m.bias.to(m.running_mean.dtype)
        return F.batch_norm(x, m.running_mean, m.running_var, weight, bias, False, 0.0, m.eps)

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, variance and count per channel over all ranks, from the means and variances of the slices."""
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        n = x.new_full((1,), x.numel() / x.shape[1] if self.present else 0.0)
        mine = torch.cat([mean, variance, n])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        table = torch.stack(parts)
        c = x.shape[1]
        means, variances, counts = table[:, :c], table[:, c : 2 * c], table[:, 2 * c :]
        count = counts.sum()
        whole = (means * counts).sum(0) / count
        return whole, ((variances + (means - whole).square()) * counts).sum(0) / count, count


def _channels(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a vector of channels along dim 1."""
    return (1, -1, *([1] * (x.dim() - 2)))


def sync_batchnorms(model: nn.Module, group: dist.ProcessGroup) -> list[SyncedBatchNorm]:
    """Give every BatchNorm of the model the statistics of the whole micro-batch."""
    synced = []
    for module in model.modules():
        if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm):
            replaced = SyncedBatchNorm(module, group)
            module.forward = replaced  # type: ignore[assignment,method-assign]  # its name must not change
            synced.append(replaced)
    return synced
