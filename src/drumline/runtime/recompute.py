"""Full recomputation: a layer keeps its input alone, and runs its forward again when its backward needs the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..errors import PlanError
from ..trace.layers import layers_of


def recompute(model: nn.Module) -> None:
    """Make every layer that holds other modules compute its forward again in the backward."""
    layers = [spec.module for spec in layers_of(model) if spec.composite]
    if not layers:
        raise PlanError(
            f"recompute=full saves nothing for {type(model).__name__}",
            rule="a layer that holds other modules keeps less than they do; this model has none",
            fix="recompute=none, or group the modules into blocks",
        )
    for module in layers:
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        again = functools.partial(_contexts, norms)
        module.forward = functools.partial(  # the name of the module must not change
            checkpoint, module.forward, use_reentrant=False, context_fn=again
        )


def _contexts(norms: list[_BatchNorm]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_held(norms)


@contextmanager
def _statistics_held(norms: list[_BatchNorm]) -> Iterator[None]:
    """The second forward sees the same batch: running statistics must not move again."""
    held = [(m, m.momentum, None if m.num_batches_tracked is None else m.num_batches_tracked.clone()) for m in norms]
    for m in norms:
        m.momentum = 0.0
    try:
        yield
    finally:
        for m, momentum, count in held:
            m.momentum = momentum
            if count is not None and m.num_batches_tracked is not None:
                m.num_batches_tracked.copy_(count)
