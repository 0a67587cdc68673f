"""Full recomputation: a layer keeps only its input, and runs its forward again when its backward needs the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...core.errors import PlanError
from ...torchkit.dispatch_modes import reenter_function_modes
from ...torchkit.modules import RunningNormBase
from ...tracing.layers import LayerSpec, layers_of

Contexts = Callable[[], tuple[AbstractContextManager[None], Callable[[], AbstractContextManager[None]]]]
"""For one forward: the context around it, and a factory of the contexts around each repetition."""


def recompute(model: nn.Module) -> None:
    """Make every layer that has submodules recompute its forward in the backward."""
    for spec in recomputed_layers(model, "full"):
        recompute_layer(spec.module, functools.partial(_contexts, spec.module))


def recomputed_layers(model: nn.Module, word: str) -> list[LayerSpec]:
    """The layers that recomputation works on."""
    layers = [spec for spec in layers_of(model) if spec.composite]
    if not layers:
        raise PlanError(
            f"recompute={word} saves nothing for {type(model).__name__}",
            rule="a layer with submodules keeps less than they do; this model has none",
            fix="recompute=none, or group the modules into blocks",
        )
    return layers


def recompute_layer(module: nn.Module, contexts: Contexts) -> None:
    """Run a layer's forward within the first context, and once more within the second when its backward begins."""
    _keep_no_cache(module)
    module.forward = functools.partial(  # the name of the module must not change
        checkpoint, module.forward, use_reentrant=False, context_fn=functools.partial(_repeatable, contexts)
    )


def _keep_no_cache(module: nn.Module) -> None:
    """Disable the key-value cache of transformers models: the second forward would append to it again."""
    for m in module.modules():
        config = getattr(m, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]  # it has one


def _repeatable(contexts: Contexts) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first, again = contexts()
    return first, reenter_function_modes(again)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], Callable[[], AbstractContextManager[None]]]:
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    return saving_buffers(module, saved), functools.partial(with_saved_buffers, saved)


@contextmanager
def saving_buffers(module: nn.Module, saved: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Save the buffers that the forward changes (running statistics, vectors of a spectral norm) as they were."""
    # torch's norms change theirs without a new version
    norms = [m for m in module.modules() if isinstance(m, RunningNormBase) and m.training]
    statistics = {id(b) for m in norms for b in m.buffers(recurse=False)}
    before = [(b, b._version, b.clone()) for b in module.buffers()]
    yield
    saved += [(b, old) for b, version, old in before if b._version != version or id(b) in statistics]


@contextmanager
def with_saved_buffers(saved: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Run the second forward from the buffers of the first, then restore those that the first left."""
    now = [b.clone() for b, _ in saved]
    for b, old in saved:
        b.copy_(old)
    try:
        yield
    finally:
        for (b, _), value in zip(saved, now, strict=True):
            b.copy_(value)
