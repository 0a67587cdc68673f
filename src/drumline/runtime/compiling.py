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
    blocks = [spec.module for spec in layers_of(model) if spec.composite]
    for module in blocks or [model]:
        module.forward = torch.compile(module.forward)
