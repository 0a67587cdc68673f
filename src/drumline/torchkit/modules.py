"""Base classes of torch's modules, their hooks and kinds of buffers, and a module run with other parameters.

Written for torch 2.13. Missing public API: batch norm, instance norm and dropout come in variants by dimension whose
common bases are private; `torch.func.functional_call` calls `forward` alone and cannot wrap an export; a module lists
neither its hooks nor which of its buffers are not in its state dict, and has no way to convert some tensors only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as RunningNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.utils.stateless import _reparametrize_module as reparametrize

__all__ = [
    "BatchNormBase",
    "DropoutBase",
    "RunningNormBase",
    "check_input_dim",
    "clear_forward_hooks",
    "convert_tensors",
    "has_gradient_hooks",
    "is_persistent",
    "reparametrize",
]


def check_input_dim(norm: BatchNormBase, x: torch.Tensor) -> None:
    """Raise torch's own error if a batch norm does not take inputs with this number of dims."""
    norm._check_input_dim(x)


def clear_forward_hooks(module: nn.Module) -> None:
    """Remove the hooks of a module's forward."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def convert_tensors(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Replace every parameter and buffer by what a function makes of it, in place."""
    converted: nn.Module = module._apply(convert)
    return converted


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook is on the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of a module is in its state dict."""
    return buffer not in module._non_persistent_buffers_set
