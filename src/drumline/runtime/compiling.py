"""`compile=true`: the forward of every layer is fused by torch.compile, layer by layer.

Layers rather than the whole model: equal blocks are compiled once, and what wraps a layer (gathering of shards,
recomputation) stays outside of what is compiled. A model of nothing but simple layers is compiled as one.
"""

from __future__ import annotations

import torch
from torch import nn

from ..trace.layers import layers_of


def compile_layers(model: nn.Module) -> None:
    """Compile in place: names of modules and parameters do not change."""
    for module in _compiled(model):
        module.forward = torch.compile(module.forward)


def inside_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules inside compiled ones, which nobody can look at: their calls are no calls any more."""
    return {inner for module in _compiled(model) for inner in module.modules() if inner is not module}


def _compiled(model: nn.Module) -> list[nn.Module]:
    return [spec.module for spec in layers_of(model) if spec.composite] or [model]
