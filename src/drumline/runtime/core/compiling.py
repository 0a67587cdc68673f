"""`compile=true`: torch.compile fuses the forward of every layer, layer by layer.

Layers rather than the whole model: equal blocks are compiled once, and wrappers of a layer (gathering of shards,
recomputation) stay outside. A model of nothing but simple layers is compiled as one.

Layers of one class share compiled code, and torch counts its versions together: after eight it continues uncompiled,
with a warning. A layer legitimately has more than eight, so the limit grows with the layers of every model.
"""

from __future__ import annotations

import torch
from torch import nn

from ...torchkit.compiler import allow_recompiles
from ...tracing.layers import layers_of

VERSIONS_PER_LAYER = 32
"""Compiled versions that a layer may need: its input has a gradient or not, the batch is the first size, one sample or
any, training or evaluation; twice, because `verify` runs float64 and the plan's own type in one process."""


def compile_layers(model: nn.Module) -> None:
    """Compile in place: names of modules and parameters do not change."""
    modules = _compiled(model)
    allow_recompiles(VERSIONS_PER_LAYER * len(modules))
    for module in modules:
        module.forward = torch.compile(module.forward)


def inside_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules inside compiled ones, which cannot be observed: their calls are compiled away."""
    return {inner for module in _compiled(model) for inner in module.modules() if inner is not module}


def _compiled(model: nn.Module) -> list[nn.Module]:
    return [spec.module for spec in layers_of(model) if spec.composite] or [model]
