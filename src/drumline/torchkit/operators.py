"""Operators and kernels without a public function: ATen names with an underscore, foreach updates, fused AdamW.

Written for torch 2.13. Missing public API: captured graphs and traces hold these operators under these names, and
optimizers call the others, but no public function does.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = [
    "assert_async",
    "find_nonfinite_and_multiply_",
    "flash_attention_cpu",
    "flash_attention_cpu_backward",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fused_adam_",
    "fused_adamw_",
    "has_global_step_hooks",
    "log_softmax",
    "log_softmax_backward",
    "scaled_mm",
    "softmax",
    "softmax_backward",
    "spin",
    "to_copy",
    "unsafe_view",
    "upsample_nearest_exact",
]

assert_async = torch._assert_async
"""(condition, message): fails on the device without waiting for it."""

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_


find_nonfinite_and_multiply_ = torch._amp_foreach_non_finite_check_and_unscale_
"""(tensors, found, factor): writes 1 to `found` if a number is not finite, and multiplies the tensors by the factor.
Both are one float32 on their device. It is one launch, and a factor of 1 changes nothing."""

scaled_mm = torch._scaled_mm
"""(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum): a matmul of float8 numbers,
times both scales. `a` has contiguous rows, `b` contiguous columns, and a GPU wants sizes that 16 divides."""

flash_attention_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

softmax = torch.ops.aten._softmax
softmax_backward = torch.ops.aten._softmax_backward_data
log_softmax = torch.ops.aten._log_softmax
log_softmax_backward = torch.ops.aten._log_softmax_backward_data

to_copy = torch.ops.aten._to_copy
unsafe_view = torch.ops.aten._unsafe_view

upsample_nearest_exact = {
    1: torch.ops.aten._upsample_nearest_exact1d,
    2: torch.ops.aten._upsample_nearest_exact2d,
    3: torch.ops.aten._upsample_nearest_exact3d,
}
"""By the number of spatial dims."""


def has_global_step_hooks() -> bool:
    """Whether functions were registered that every optimizer calls before or after its step."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for this many clock cycles, without occupying the host."""
    torch.cuda._sleep(cycles)
