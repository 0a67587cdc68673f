"""Linear layers whose matmuls are in float8: `precision=fp8`.

Inputs and weights are rounded to e4m3 (three bits of mantissa), gradients to e5m2 (two bits, a larger range), each
tensor with one scale of its own, read off its largest number at the moment: nothing is remembered between steps. Scales
are powers of two, so scaling is exact. Results are in bf16; so is everything else in the model, by autocast.

    forward        y  = x8 w8^T         the backward keeps x8, and rounds the weight again
    backward       dx = g8 w8           g8: the gradient of y
                   dw = g8^T x8
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import PlanError
from ...torchkit.fake_tensors import active_fake_mode
from ...torchkit.operators import scaled_mm

DIVISOR = 16
"""A GPU multiplies float8 matrices only if this divides their sizes."""

LEAST_CAPABILITY = (9, 0)
"""CUDA's compute capability of Hopper, the first with float8 matmuls that torch supports for training."""

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def check_float8(device: torch.device, plan: str) -> None:
    """Refuse a device without float8 matmuls. A dry run, which computes nothing, has none to check."""
    here = missing_float8(device)
    if here and active_fake_mode() is None:
        raise PlanError(
            "precision=fp8 does not run on this device",
            where=f"plan {plan}",
            rule=f"its matmuls need an NVIDIA GPU of compute capability 9.0 (H100) or newer; {here}",
            fix="precision=bf16",
        )


def missing_float8(device: torch.device) -> str:
    """The feature that a device lacks for matmuls in float8; empty if it has them."""
    if device.type != "cuda":
        return f"this is a {device.type.upper() if device.type == 'cpu' else device.type}"
    if torch.version.hip:
        return "this is an AMD GPU, whose float8 types are not tested"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    return ""


def to_float8(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in bf16 as float8, and the float32 factor that undoes their scale.

    NaN stays NaN. An infinity makes the scale 0, and so all numbers NaN: a step that is not finite stays so.
    """
    largest = torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32)
    limit = torch.finfo(dtype).max
    # the exponent of limit / largest, rounded down; a tensor of zeros has any scale
    exponent = torch.floor(torch.log2(limit / largest.clamp(min=2.0**-100))).clamp(max=100.0)
    scale = torch.exp2(exponent)
    return (values * scale).to(dtype), torch.exp2(-exponent)


class _Float8Matmul(torch.autograd.Function):
    """x w^T of two-dimensional x, forward and backward in float8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x8, x_scale = to_float8(x, _FORWARD)
        w8, w_scale = to_float8(weight.to(torch.bfloat16), _FORWARD)
        ctx.save_for_backward(x8, x_scale, weight)
        return scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x8, x_scale, weight = ctx.saved_tensors
        g8, g_scale = to_float8(gradients[0].to(torch.bfloat16).contiguous(), _BACKWARD)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w8, w_scale = to_float8(weight.to(torch.bfloat16), _FORWARD)
            dx = scaled_mm(g8, w8.t().contiguous().t(), g_scale, w_scale, out_dtype=torch.bfloat16)
        if ctx.needs_input_grad[1]:
            columns = x8.t().contiguous().t()
            dw = scaled_mm(g8.t().contiguous(), columns, g_scale, x_scale, out_dtype=torch.bfloat16)
            dw = dw.to(weight.dtype)
        return dx, dw


class Float8Forward:
    """Replaces the forward of a linear layer."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        rows = x.to(torch.bfloat16).reshape(-1, m.in_features)
        missing = -len(rows) % DIVISOR
        if missing:  # the rows are the inner dim of the weight's gradient, to which zeros add nothing
            rows = F.pad(rows, (0, 0, 0, missing))
        y: torch.Tensor = _Float8Matmul.apply(rows, m.weight)  # type: ignore[no-untyped-call]  # torch's own
        y = y[: len(rows) - missing].view(*x.shape[:-1], m.out_features)
        return y if m.bias is None else y + m.bias.to(y.dtype)


def left_in_bf16(names: list[str]) -> str:
    """A sentence about the linear layers that stay in bf16; empty if there are none."""
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"precision=fp8 leaves {some} in bf16: {DIVISOR} does not divide both sizes" if names else ""


def use_float8(model: nn.Module) -> list[str]:
    """Compute the matmuls of the model's linear layers in float8; returns the names of those left in bf16."""
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    left = [name for name, m in linear.items() if m.in_features % DIVISOR or m.out_features % DIVISOR]
    if len(left) == len(linear):
        raise PlanError(
            "precision=fp8 has nothing to do in this model",
            rule=f"it computes torch.nn.Linear layers whose two sizes are multiples of {DIVISOR}; of "
            f"{len(linear)} there is none",
            fix="precision=bf16",
        )
    for name, module in linear.items():
        if name not in left:
            module.forward = Float8Forward(module)  # type: ignore[assignment,method-assign]  # its name must not change
    return left
