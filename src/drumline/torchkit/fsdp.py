"""The parameters that FSDP2 gathers together, and the full tensors behind their shards.

Written for torch 2.13. Missing public API: `FSDPModule` has no list of the parameters of its unit, and the gradients of
full parameters exist only inside of it, between a backward and its reduce-scatter.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["has_full_gradient", "parameter_group", "place_of"]


def parameter_group(module: nn.Module) -> Any:
    """The unit of a module: `fsdp_params`, and `post_backward`, which it calls itself. None if it gathers nothing."""
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def place_of(parameter: Any) -> Any:
    """Where a unit's parameter is in the model: `module`, `param_name`, and the same of those tied to it."""
    return parameter._module_info


def has_full_gradient(parameter: Any) -> bool:
    """Whether a backward has reached a unit's parameter since the last reduce-scatter."""
    full = getattr(parameter, "_unsharded_param", None)
    return full is not None and (full.grad is not None or parameter.unsharded_accumulated_grad is not None)
