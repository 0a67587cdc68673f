"""Recognises mixtures of experts by their modules, and what a trace says of them.

Known are `Experts`, and the experts of transformers (5 and later): batched parameters [experts, ...] and a forward of
tokens, their experts and their weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..models.profile import ExpertLayer
from .expert_list import Experts

_INDEX, _WEIGHT = {"top_k_index", "router_indices"}, {"top_k_weights", "routing_weights"}


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The recognised modules of experts, by name; also after they were sharded."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts) or is_batched(m)}


def expert_count(module: nn.Module) -> int:
    """Number of experts of a module on this rank."""
    count = len(module) if isinstance(module, Experts) else module.num_experts
    assert isinstance(count, int)
    return count


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module's forward."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def is_batched(module: nn.Module) -> bool:
    """Whether it is transformers' kind: by the attributes that its decorator sets, its parameters and its forward."""
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return False
    names = argument_names(module)
    takes = len(names) == 3 and names[1] in _INDEX and names[2] in _WEIGHT
    rows = bool(own) and all(p.dim() > 1 and p.shape[0] == count for p in own)
    return takes and rows and not list(module.buffers(recurse=False))


class ExpertRouting:
    """Watches, while a model runs, how many experts each token of a mixture visits."""

    def __init__(self, model: nn.Module) -> None:
        self._known = expert_modules(model)
        self._active: dict[int, int] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls of all mixtures."""
        hooks = [m.register_forward_pre_hook(self._called, with_kwargs=True) for m in self._known.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1]
        indices = [x for x in given if not x.is_floating_point()]
        if indices:
            self._active[id(module)] = indices[0].shape[-1]

    def of(self, module: nn.Module) -> ExpertLayer | None:
        """The experts inside a layer; None without any. Of several mixtures in one layer, the parameters add up."""
        own = [m for m in module.modules() if any(m is known for known in self._known.values())]
        if not own:
            return None
        parameters = sum(p.numel() for m in own for p in m.parameters() if p.requires_grad)
        counts = [expert_count(m) for m in own]
        active = max(self._active.get(id(m), n) for m, n in zip(own, counts, strict=True))
        return ExpertLayer(min(counts), min(active, *counts), parameters)
