"""`compile=true`: the forward of every layer is fused by torch.compile, layer by layer.

Layers rather than the whole model: equal blocks are compiled once, and what wraps a layer (gathering of shards,
recomputation) stays outside of what is compiled. A model of nothing but simple layers is compiled as one.

Layers of one class share what is compiled, and torch counts its versions together: after eight it goes on uncompiled,
with no more than a warning. A layer has more than eight by right, so the limit grows with the layers of every model.
"""

from __future__ import annotations

import torch
from torch import nn

from ...torchkit.compiler import allow_recompiles
from ...tracing.layers import layers_of

VERSIONS = 32
"""Of one layer's code, that there may be: its input has a gradient or not, the batch is the first size, one sample or
any, training or evaluation; twice, because `verify` runs float64 and the plan's own type in one process."""


def compile_layers(model: nn.Module) -> None:
    """Compile in place: names of modules and parameters do not change."""
    found = _compiled(model)
    allow_recompiles(VERSIONS * len(found))
    for module in found:
        module.forward = torch.compile(module.forward)


def inside_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules inside compiled ones, which nobody can look at: their calls are no calls any more."""
    return {inner for module in _compiled(model) for inner in module.modules() if inner is not module}


def _compiled(model: nn.Module) -> list[nn.Module]:
    return [spec.module for spec in layers_of(model) if spec.composite] or [model]
