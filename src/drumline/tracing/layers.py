"""The layers of a model: the modules that are listed, sharded and recomputed as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

LEAST_UNIT = 2**14
"""Layers with fewer parameters than this get no message of their own when parameters are sharded."""

LONGEST_CHAIN = 8
"""A chain of up to this many simple modules is one layer; in a longer one, each is a layer."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A module that counts as a layer."""

    name: str
    module: nn.Module
    composite: bool
    """It contains other modules, so recomputing it saves memory."""
    unit: bool
    """It is sharded as one unit under zero=3."""


def layers_of(model: nn.Module) -> list[LayerSpec]:
    """The layers of a model, in order of registration.

    Elements of lists are layers, and so are short chains of simple modules. A module dominated by a list of equal
    blocks is entered. Any other module is a layer.
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    seen: set[int] = set()
    layers = []
    for name, module in _walk(model, ""):
        if id(module) in seen:
            continue
        seen.add(id(module))
        parameters = list(module.parameters())
        inside = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
        shared = any(uses[i] > n for i, n in inside.items())
        composite = not _is_leaf(module)
        unit = not shared and sum(p.numel() for p in parameters) >= LEAST_UNIT
        layers.append(LayerSpec(name, module, composite, unit))
    return layers


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    inside_list = isinstance(module, _LISTS)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        entered = isinstance(child, _LISTS) and not _short_chain(child)
        if entered or (not inside_list and not isinstance(child, _LISTS) and _dominated(child)):
            yield from _walk(child, path)
        else:
            yield path, child


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module contains no others, apart from tiles of itself: a tiled layer is as simple as before."""
    return all(getattr(c, "inside_a_leaf", False) for c in module.children())


def _short_chain(module: nn.Module) -> bool:
    """Whether it is a short chain of simple modules (convolution, norm, activation): one block."""
    children = list(module.children())
    leaves = all(_is_leaf(c) for c in children)
    return isinstance(module, nn.Sequential) and 2 <= len(children) <= LONGEST_CHAIN and leaves


def _dominated(module: nn.Module) -> bool:
    """Whether a list of at least two equal blocks has half of the module's parameters."""
    total = sum(p.numel() for p in module.parameters())
    for inner in module.modules():
        if isinstance(inner, _LISTS) and sum(p.numel() for p in inner.parameters()) * 2 >= total > 0:
            blocks = [type(c) for c in inner.children() if not _is_leaf(c)]
            if len(blocks) >= 2 and len(set(blocks)) == 1 and blocks[0] not in _LISTS:
                return True
    return False
