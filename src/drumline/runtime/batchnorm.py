"""BatchNorm whose statistics span all data-parallel ranks of a micro-batch, on any device.

Forward: every rank adds up its values, their squares and their number per channel; one all-reduce makes the mean and
the variance of the whole micro-batch. Backward: one all-reduce of the two sums that the gradient of the input needs.
A rank that runs a stand-in sample of weight 0 counts nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Normalize(torch.autograd.Function):
    """(x - mean) / std over the ranks; the gradient of the affine part is autograd's own."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch leaves the arguments to us
        ctx: Any, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, count: torch.Tensor,
        group: dist.ProcessGroup, present: bool,
    ) -> torch.Tensor:  # fmt: skip
        shape = (1, -1, *([1] * (x.dim() - 2)))
        normed = (x - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(normed, invstd, count)
        ctx.group, ctx.present, ctx.shape = group, present, shape
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        normed, invstd, count = ctx.saved_tensors
        dims = [0, *range(2, gradient.dim())]
        sums = torch.stack([gradient.sum(dims), (gradient * normed).sum(dims)])
        if not ctx.present:
            sums.zero_()
        dist.all_reduce(sums, group=ctx.group)
        mean, project = (sums / count).unbind()
        inner = gradient - mean.view(ctx.shape) - normed * project.view(ctx.shape)
        return inner * invstd.view(ctx.shape), None, None, None, None, None


class _Spanning:
    """What is put in the place of a BatchNorm's forward."""

    def __init__(self, module: _BatchNorm, group: dist.ProcessGroup) -> None:
        self.module, self.group, self.present = module, group, True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        m._check_input_dim(x)
        if not m.training and m.running_mean is not None:
            return type(m).forward(m, x)
        mean, variance, count = self._statistics(x.detach())
        if m.training and m.running_mean is not None and m.running_var is not None:
            assert m.num_batches_tracked is not None
            m.num_batches_tracked.add_(1)
            factor = m.momentum if m.momentum is not None else 1.0 / float(m.num_batches_tracked)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            m.running_mean.lerp_(mean.to(m.running_mean.dtype), factor)
            m.running_var.lerp_(unbiased.to(m.running_var.dtype), factor)
        invstd = torch.rsqrt(variance + m.eps)
        out = _Normalize.apply(x, mean, invstd, count, self.group, self.present)  # type: ignore[no-untyped-call]
        if m.affine:
            shape = (1, -1, *([1] * (x.dim() - 2)))
            out = out * m.weight.view(shape) + m.bias.view(shape)
        assert isinstance(out, torch.Tensor)
        return out

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, variance and count per channel. Two passes, because a difference of large sums would lose digits."""
        dims = [0, *range(2, x.dim())]
        shape = (1, -1, *([1] * (x.dim() - 2)))
        share = 1.0 if self.present else 0.0
        first = torch.cat([x.sum(dims) * share, x.new_tensor([share * x.numel() / x.shape[1]])])
        dist.all_reduce(first, group=self.group)
        count = first[-1]
        mean = first[:-1] / count
        second = (x - mean.view(shape)).square().sum(dims) * share
        dist.all_reduce(second, group=self.group)
        return mean, second / count, count


def span_statistics(model: nn.Module, group: dist.ProcessGroup) -> list[_Spanning]:
    """Let every BatchNorm of the model see the whole micro-batch."""
    found = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            spanning = _Spanning(module, group)
            module.forward = spanning  # type: ignore[assignment,method-assign]  # its name must not change
            found.append(spanning)
    return found
