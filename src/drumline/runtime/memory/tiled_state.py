"""The state dict of a layer in parts has the layer's own names: `fc.weight`, not `fc.parts.0.weight`.

So `model.state_dict()` loads strictly into the model as its author wrote it, and the other way round. Sharded parts
keep their names: putting them together would be a message, and checkpoints do that with the strategy's pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .tiled_layers import TiledLayer

_NAMES = ("weight", "bias")


def keep_names(layer: nn.Module) -> None:
    """Let a layer's parts go by the layer's names in state dicts, out and in."""
    layer.register_state_dict_post_hook(_join)
    layer.register_load_state_dict_pre_hook(_split)


def _join(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(layer, TiledLayer)
    keys = {name: [f"{prefix}parts.{i}.{name}" for i in range(len(layer.parts))] for name in _NAMES}
    if any(isinstance(state.get(key), DTensor) for key in keys["weight"]):
        return
    for name in _NAMES:
        found = [state.pop(key) for key in keys[name] if key in state]
        if found and (name == "weight" or layer.has_bias):
            state[prefix + name] = torch.cat(found)


def _split(layer: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
    assert isinstance(layer, TiledLayer)
    for name in _NAMES:
        whole = state.pop(prefix + name, None)
        for i, part in enumerate(layer.parts):
            own = getattr(part, name)
            if isinstance(whole, torch.Tensor):
                state[f"{prefix}parts.{i}.{name}"] = whole[part.start : part.stop]
            elif own is not None and name == "bias" and not layer.has_bias:
                # the bias of a layer that shares this one's weight, which comes under that layer's name
                state.setdefault(f"{prefix}parts.{i}.{name}", own.detach())
