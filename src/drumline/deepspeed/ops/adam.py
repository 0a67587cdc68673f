"""`deepspeed.ops.adam`: torch's Adam and AdamW with DeepSpeed's arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import JobError


def _adam(
    parameters: Any,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    *,
    decoupled: bool,
    bias_correction: bool,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise JobError("Adam without bias correction is DeepSpeed's own", fix="bias_correction=True")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, unless `adam_w_mode` is off; fused where torch can."""
    return _adam(params, lr, betas, eps, weight_decay, amsgrad, decoupled=adam_w_mode, bias_correction=bias_correction)


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """The same; `offload_optimizer` in the config is what moves its states to host memory."""
    return _adam(
        model_params, lr, betas, eps, weight_decay, amsgrad, decoupled=adamw_mode, bias_correction=bias_correction
    )
