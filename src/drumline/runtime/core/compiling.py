"""`compile=true`: torch.compile fuses the forward of the model, whole on one rank and layer by layer otherwise.

Whole, because each call of compiled code takes a GPU's host some tenths of a millisecond, which layers pay one by one.
Where layers have wrappers of their own (gathering of shards, recomputation, sums while the backward runs), they are
compiled one by one, and the wrappers stay outside. A model of nothing but simple layers is compiled as one.

Layers of one class share compiled code, and torch counts its versions together: after eight it continues uncompiled,
with a warning. A layer legitimately has more than eight, so the limit grows with the layers of every model.
"""

from __future__ import annotations

import torch
from torch import nn

from ...plans import Plan
from ...torchkit.compiler import allow_recompiles
from ...tracing.layers import layers_of

VERSIONS_PER_LAYER = 32
"""Compiled versions that a layer may need: its input has a gradient or not, the batch is the first size, one sample or
any, training or evaluation; twice, because `verify` runs float64 and the plan's own type in one process."""


def compile_layers(model: nn.Module, *, whole: bool = False) -> None:
    """Compile in place, as one or layer by layer: names of modules and parameters do not change."""
    modules = _compiled(model, whole)
    allow_recompiles(VERSIONS_PER_LAYER * len(modules))
    for module in modules:
        module.forward = torch.compile(module.forward)


def compiles_whole(plan: Plan) -> bool:
    """Whether a plan has no wrappers around single layers."""
    return plan.processes == 1 and plan.ranks == 1 and plan.zero < 3 and plan.recompute == "none" and plan.chunk == 1


def inside_compiled(model: nn.Module, *, whole: bool = False) -> set[nn.Module]:
    """The modules inside compiled ones, which cannot be observed: their calls are compiled away."""
    return {inner for module in _compiled(model, whole) for inner in module.modules() if inner is not module}


def _compiled(model: nn.Module, whole: bool) -> list[nn.Module]:
    return [model] if whole else [spec.module for spec in layers_of(model) if spec.composite] or [model]
